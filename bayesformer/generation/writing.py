"""The loop that writes: average the draws' probabilities, choose a token, read it under every draw."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bayesformer.generation.decoders import make_decoder
from bayesformer.generation.prompts import Prompts, as_prompts, check_length
from bayesformer.generation.result import Alternatives, Generation
from bayesformer.likelihoods.language import unwrapped, vocabulary
from bayesformer.likelihoods.predictive import entropy, log_mean_exp

if TYPE_CHECKING:
    from bayesformer.posterior import Posterior

ALTERNATIVES = 5  # tokens kept at every step, of the average and of each draw
TRIAL = 4  # tokens of a trial pass
NOT_USED: dict[str, Any] = {  # settings of transformers' generate that change its tokens, with what leaves them alone
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
    "sequence_bias": {},
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}
log = logging.getLogger("bayesformer")


class Step(NamedTuple):
    """What is known of one new token of every sequence."""

    tokens: Tensor  # (B,)
    values: dict[str, Tensor]  # each (B,), float64
    averaged: Alternatives  # (B, k)
    by_draw: Alternatives  # (L, B, k)


@dataclass(frozen=True)
class Choosing:
    """How a token is taken from the averaged probabilities."""

    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.do_sample, bool):
            raise ValueError(f"do_sample must be True or False; got {self.do_sample!r}.")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} must be a number; got {value!r}.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite; got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie above 0 and at most at 1; got {self.top_p}.")

    def __call__(self, log_mean: Tensor, generator: torch.Generator) -> Tensor:
        """(B,): the most probable tokens, or tokens drawn after tempering and cutting log_mean (B, V)."""
        if not self.do_sample:
            return log_mean.argmax(-1)
        scores = nucleus(log_mean.float() / self.temperature, self.top_p)
        return torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(-1)


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Scores (B, V) with -inf outside the smallest set of tokens that has probability top_p (Holtzman et al. 2020)."""
    if top_p == 1:
        return scores
    ordered, order = scores.sort(descending=False)
    below = ordered.softmax(-1).cumsum(-1) <= 1 - top_p  # the least probable tokens
    below[..., -1:] = False  # the most probable one stays
    return scores.masked_fill(torch.zeros_like(below).scatter(-1, order, below), -math.inf)


@dataclass
class Ending:
    """Which sequences have ended: by the model's end token, or by a token or a text to stop at."""

    ends: set[int]
    texts: Sequence[str]
    tokenizer: Any
    tokens: list[list[int]] = field(default_factory=list)

    def ended(self, tokens: Tensor, running: Tensor) -> Tensor:
        """(B,), boolean: whether each sequence ends with this token."""
        if not self.tokens:
            self.tokens = [[] for _ in range(len(tokens))]
        found = torch.tensor([int(t) in self.ends for t in tokens.tolist()], device=tokens.device)
        for row, token in enumerate(tokens.tolist()):
            if self.texts and bool(running[row]):
                self.tokens[row].append(token)
                written = self.tokenizer.decode(self.tokens[row])
                found[row] |= any(text in written for text in self.texts)
        return found


def end_tokens(model: Any, stop: Any, tokenizer: Any) -> Ending:
    """The end tokens of the model's generation settings, and the tokens or texts that the user stops at."""
    base = unwrapped(model)
    known = getattr(getattr(base, "generation_config", None), "eos_token_id", None)
    if known is None:
        known = getattr(getattr(base, "config", None), "eos_token_id", None)
    ends = set(known if isinstance(known, list | tuple) else [] if known is None else [known])
    given = [] if stop is None else list(stop) if isinstance(stop, list | tuple | set) else [stop]
    texts = [entry for entry in given if isinstance(entry, str)]
    if texts and tokenizer is None:
        raise ValueError(f"tokenizer must be given where stop is text; got stop={stop!r} and no tokenizer.")
    for entry in given:
        if not isinstance(entry, str | int) or isinstance(entry, bool) or entry == "":
            raise ValueError(f"stop must be texts or token numbers; got {entry!r}.")
    rows = vocabulary(model)
    beyond = [entry for entry in given if isinstance(entry, int) and not 0 <= entry < (rows or math.inf)]
    if beyond:
        raise ValueError(f"stop must be tokens of the model, 0..{'' if rows is None else rows - 1}; got {beyond[0]}.")
    return Ending(ends | {entry for entry in given if isinstance(entry, int)}, texts, tokenizer)


def warn_of_settings(model: Any) -> None:
    """Say in the log which of the model's generation settings would change its own `generate` and are not used here."""
    config = getattr(unwrapped(model), "generation_config", None)
    found = {name: getattr(config, name, None) for name in NOT_USED}
    told = [f"{name}={value}" for name, value in found.items() if value not in (None, NOT_USED[name])]
    if told:
        log.warning("generation settings of the model that are not used: %s.", ", ".join(told))


def pad_token(model: Any, ending: Ending) -> int:
    """What stands after the end of a sequence: the model's pad token, its end token, or 0."""
    base = unwrapped(model)
    for config in (getattr(base, "generation_config", None), getattr(base, "config", None)):
        if getattr(config, "pad_token_id", None) is not None:
            return int(config.pad_token_id)  # type: ignore[union-attr]
    return min(ending.ends, default=0)


def look(logits: Tensor, tempering: float, choose: Choosing, generator: torch.Generator) -> Step:
    """Average, measure and choose, given logits (L, B, V) of the draws."""
    log_probs = (logits.double() / tempering).log_softmax(-1)  # (L, B, V)
    log_mean = log_mean_exp(log_probs) if len(log_probs) > 1 else log_probs[0]  # (B, V)
    total = entropy(log_mean)
    aleatoric = entropy(log_probs).mean(0) if len(log_probs) > 1 else total
    tokens = choose(log_mean, generator)
    values = {
        "total": total,
        "aleatoric": aleatoric,
        "epistemic": (total - aleatoric).clamp_min(0),
        "log_prob": log_mean.gather(-1, tokens.unsqueeze(-1)).squeeze(-1),
        "self_certainty": -log_mean.mean(-1) - math.log(log_mean.shape[-1]),
    }
    count = min(ALTERNATIVES, log_mean.shape[-1])
    return Step(tokens, values, _top(log_mean, count), _top(log_probs, count))


def _top(log_probs: Tensor, count: int) -> Alternatives:
    values, ids = log_probs.topk(count, dim=-1)
    return Alternatives(ids, values.exp().float())


def write(
    posterior: Posterior,
    inputs: Any,
    *,
    draws: int,
    max_new_tokens: int,
    choose: Choosing,
    seed: int,
    tokenizer: Any = None,
    stop: Any = None,
    cached: bool | None = None,
    on_step: Callable[[Step, Tensor], object] | None = None,
) -> Generation:
    """The continuation of prompts; see `Posterior.generate`. `on_step` sees every step and which sequences run on."""
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a whole number, at least 1; got {max_new_tokens!r}.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number; got {seed!r}.")
    prompts = as_prompts(posterior.model, inputs, tokenizer, posterior.device)
    check_length(posterior.model, int(prompts.mask.sum(1).max()), max_new_tokens)
    ending = end_tokens(posterior.model, stop, tokenizer)
    warn_of_settings(posterior.model)
    pad, generator = pad_token(posterior.model, ending), torch.Generator(posterior.device).manual_seed(seed)
    running = torch.ones(len(prompts.ids), dtype=torch.bool, device=posterior.device)
    steps: list[Step] = []
    counted: list[Tensor] = []
    with ExitStack() as stack:
        decoder = make_decoder(posterior, draws, seed, _trial(prompts), cached, stack)
        ids, mask, positions = prompts.ids, prompts.mask, prompts.positions
        while len(steps) < max_new_tokens and bool(running.any()):
            step = look(decoder.read(ids, mask, positions), posterior.tempering, choose, generator)
            tokens = torch.where(running, step.tokens, pad)
            steps.append(step._replace(tokens=tokens))
            counted.append(running)
            if on_step is not None:
                on_step(steps[-1], running)
            running = running & ~ending.ended(tokens, running)
            ids, positions = tokens.unsqueeze(1), positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return _generation(prompts, steps, torch.stack(counted, 1), tokenizer)


def _trial(prompts: Prompts) -> dict[str, Tensor]:
    """The last tokens of two prompts, for trial passes."""
    return {"input_ids": prompts.ids[:2, -TRIAL:], "attention_mask": prompts.mask[:2, -TRIAL:]}


def _generation(prompts: Prompts, steps: list[Step], counted: Tensor, tokenizer: Any) -> Generation:
    tokens = torch.stack([step.tokens for step in steps], 1)  # (B, T_new)
    values: dict[str, Any] = {
        name: torch.stack([step.values[name] for step in steps], 1).masked_fill(~counted, 0.0)
        for name in steps[0].values
    }
    averaged = Alternatives(*(torch.stack(parts, -2) for parts in zip(*(s.averaged for s in steps), strict=True)))
    by_draw = Alternatives(*(torch.stack(parts, -2) for parts in zip(*(s.by_draw for s in steps), strict=True)))
    made = Generation(
        torch.cat([prompts.ids, tokens], 1), tokens, counted, **values, averaged=averaged, by_draw=by_draw
    )
    return made if tokenizer is None else _with_text(made, prompts, tokenizer)


def _with_text(made: Generation, prompts: Prompts, tokenizer: Any) -> Generation:
    from dataclasses import replace

    rows = [row[on].tolist() for row, on in zip(made.tokens, made.counted, strict=True)]
    asked = [row[on.bool()].tolist() for row, on in zip(prompts.ids, prompts.mask, strict=True)]
    known = {
        *made.averaged.ids.flatten().tolist(),
        *made.by_draw.ids.flatten().tolist(),
        *made.tokens.flatten().tolist(),
    }
    return replace(
        made,
        text=tuple(tokenizer.decode(row, skip_special_tokens=True) for row in rows),
        prompts=tuple(tokenizer.decode(row, skip_special_tokens=True) for row in asked),
        pieces=tuple(tuple(tokenizer.decode([token]) for token in row) for row in rows),
        names={token: tokenizer.decode([token]) for token in sorted(known)},
    )
