"""Predictives over a vocabulary, reduced draw by draw: what all draws say of all tokens is never in memory at once.

For one batch the averaged probabilities (B · T, V) are held while draws are added, in float64; beyond them a few rows
of one draw. Batches come in rounds of so few positions that these averages are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bayesformer.core.seeds import fold
from bayesformer.core.types import Draws
from bayesformer.data.inputs import first_tensor
from bayesformer.data.unlabelled import Asked
from bayesformer.likelihoods import Likelihood
from bayesformer.likelihoods.links import Link
from bayesformer.likelihoods.predictive import CategoricalPredictive, entropy, log_mean_exp
from bayesformer.likelihoods.token_predictive import TokenPredictive, join_tokens
from bayesformer.predict.sampled import Sampler

HELD_NUMBERS = 2**23  # averaged probabilities of a round, 64 MiB in float64
ROW_NUMBERS = 2**18  # probabilities of one draw that are looked at at once, 2 MiB in float64: they stay in the cache
TOP = 5  # tokens that are kept unless it is said how many
MISSING = -100  # in the place of a label that is none or does not count


class TokenReduction:
    """Draws of one batch, added one after the other; `result` is the predictive.

    Args:
        likelihood: turns logits into log-probabilities.
        labels: (B, T) at the positions of the rows that answer them; `MISSING` elsewhere. None if there are none.
        link: of the likelihood, for draws.
        tempering: temperature of every draw's probabilities.
        top: most probable tokens to keep.
    """

    def __init__(
        self, likelihood: Likelihood, labels: Tensor | None, link: Link | None, tempering: float, top: int
    ) -> None:
        self.likelihood, self.labels, self.link = likelihood, labels, link
        self.tempering, self.top = tempering, top
        self.summed: Tensor | None = None  # (B · T, V), float64: sum of the draws' probabilities
        self.entropies: list[Tensor] = []  # (B · T,) of every draw
        self.of_labels: list[Tensor] = []  # (B · T,) of every draw: log-probabilities of the labels
        self.shape = torch.Size()

    def add(self, outputs: Tensor) -> None:
        """Add l draws of logits, (l, B, T, V), to the running sums."""
        for draw in outputs:
            self._add_draw(draw, self._predicted)

    def add_predictive(self, predictive: CategoricalPredictive) -> None:
        """All components of a predictive (L, B, T, V) that is there already."""
        for log_probs in predictive.log_probs:
            self._add_draw(log_probs, Tensor.double)

    def _predicted(self, rows: Tensor) -> Tensor:
        """(n, V), float64: log-probabilities of some rows of logits."""
        found: Any = self.likelihood.predictive(Draws(rows.double()[None, None]), self.link)
        tempered = found if self.tempering == 1 else found.tempered(self.tempering)
        log_probs: Tensor = tempered.log_probs[0, 0]
        return log_probs

    def _check(self, one: Tensor) -> None:
        """Refuse outputs that are not those of a language model, and labels that do not fit them."""
        if one.dim() != 3:
            raise ValueError(
                f"outputs of a {self.likelihood.name} likelihood must be (B, T, V); got {tuple(one.shape)}."
            )
        if self.labels is None or self.summed is not None:
            return
        if self.labels.shape != one.shape[:2]:
            raise ValueError(f"labels must have shape {tuple(one.shape[:2])}; got {tuple(self.labels.shape)}.")
        kept = self.labels[self.labels != MISSING]
        wrong = kept[(kept < 0) | (kept >= one.shape[-1])]
        if len(wrong):
            raise ValueError(
                f"labels must lie in 0..{one.shape[-1] - 1} (the model has {one.shape[-1]} outputs) or be ignored; "
                f"got {int(wrong[0])}."
            )

    def _add_draw(self, draw: Tensor, log_probs_of: Callable[[Tensor], Tensor]) -> None:
        """One draw (B, T, V), of which `log_probs_of` makes log-probabilities in float64, some rows at a time."""
        self._check(draw)
        rows, self.shape = draw.flatten(0, 1), draw.shape[:2]
        if self.summed is None:
            with torch.inference_mode(False):  # a pass may be in it; what is summed here outlives the pass
                self.summed = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
        entropies, answered = [], []
        for a, b in _chunks(*rows.shape):
            log_probs = log_probs_of(rows[a:b])
            entropies.append(entropy(log_probs))
            if self.labels is not None:
                own = self.labels.flatten()[a:b].clamp_min(0)
                answered.append(log_probs.gather(-1, own.unsqueeze(-1)).squeeze(-1))
            self.summed[a:b] += log_probs.exp()
        self.entropies.append(torch.cat(entropies))
        if answered:
            self.of_labels.append(torch.cat(answered))

    def result(self) -> TokenPredictive:
        """The reduced predictive of the draws that were added."""
        assert self.summed is not None
        aleatoric, draws = torch.stack(self.entropies).mean(0), len(self.entropies)
        mean = self.summed.div_(draws)
        total, tokens, probs = [], [], []
        for a, b in _chunks(*mean.shape):
            total.append(entropy(mean[a:b].log()))
            best = mean[a:b].topk(min(self.top, mean.shape[-1]), dim=-1)
            tokens.append(best.indices)
            probs.append(best.values)
        self.summed = None
        whole = aleatoric if draws == 1 else torch.cat(total)  # so that one draw has no epistemic part at all
        found = {
            "total": whole,
            "aleatoric": aleatoric,
            "epistemic": (whole - aleatoric).clamp_min(0),
            "top_tokens": torch.cat(tokens),
            "top_probs": torch.cat(probs),
        }
        if self.labels is not None:
            log_probs = log_mean_exp(torch.stack(self.of_labels)).view(self.shape)
            found |= {"targets": self.labels, "target_log_prob": log_probs.masked_fill(self.labels == MISSING, 0.0)}
        shaped = {
            name: value.view(*self.shape, *value.shape[1:]) if value.shape != self.shape else value
            for name, value in found.items()
        }
        return TokenPredictive(**shaped, ahead=self.likelihood.ahead)


def empty_reduction(
    likelihood: Likelihood, asked: Asked, link: Link | None, tempering: float, top: int
) -> TokenReduction:
    """A reduction that has no draws yet, for one batch, with its labels at the rows that answer them."""
    labels = asked.labels
    if labels is not None:
        moved, counted = likelihood.align(labels, asked.mask)
        labels = moved if counted is None else moved.masked_fill(~counted, MISSING)
    return TokenReduction(likelihood, labels, link, tempering, top)


def reduced_rounds(
    sampler: Sampler, asked: Iterable[Asked], held: int, make: Callable[[Asked], TokenReduction], most: int
) -> Iterator[TokenPredictive]:
    """Reduced predictives of some batches at a time, in order.

    Args:
        sampler: of the draws.
        asked: batches.
        held: positions times tokens that an example has.
        make: from a batch to its empty `TokenReduction`.
        most: examples at a time.
    """
    for some in _rounds(asked, max(1, min(most, HELD_NUMBERS // held))):
        reductions = [make(one) for one in some]
        for _, number, outputs in sampler.passes([one.inputs for one in some]):
            reductions[number].add(outputs)
            del outputs
        yield join_tokens([reduction.result() for reduction in reductions])


def drawn_in_groups(numbers: int, draws: int, link: Link | None, seed: int) -> Iterator[tuple[int, int]]:
    """How many draws of Gaussian outputs to make at once, and from which seed, group after group.

    A batch has so many `numbers`. The first group has the seed itself, so that draws that fit into it are those of the
    full predictive, whatever the batches. A closed form needs one group.
    """
    each = max(1, HELD_NUMBERS // numbers) if link in (None, "mc") else draws
    for number, start in enumerate(range(0, draws, each)):
        yield min(each, draws - start), fold(seed, "outputs", number) if number else seed


def _rounds(asked: Iterable[Asked], examples: int) -> Iterator[list[Asked]]:
    """Batches in groups of at most so many examples, or of one batch that has more."""
    some: list[Asked] = []
    for one in asked:
        if some and sum(map(len_of, some)) + len_of(one) > examples:
            yield some
            some = []
        some.append(one)
    if some:
        yield some
    else:
        raise ValueError("inputs must have at least one example; got none.")


def len_of(asked: Asked) -> int:
    """How many examples a batch of questions has."""
    return len(first_tensor(asked.inputs))


def _chunks(count: int, width: int) -> Iterator[tuple[int, int]]:
    """Ends of pieces of so many rows that few numbers are looked at at once."""
    step = max(1, ROW_NUMBERS // max(width, 1))
    return pairwise([*range(0, count, step), count])
