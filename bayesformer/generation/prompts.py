"""What is to be continued: text or token numbers, checked before anything is computed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer.likelihoods.language import is_causal_language_model, unwrapped, vocabulary


@dataclass(frozen=True)
class Prompts:
    """Left-padded prompts as token numbers."""

    ids: Tensor  # (B, T)
    mask: Tensor  # (B, T), 1 at tokens and 0 at padding, which stands in front

    @property
    def positions(self) -> Tensor:
        """(B, T): the position of every token in its own prompt, from 0; 0 in padding."""
        return (self.mask.cumsum(-1) - 1).clamp_min(0)


def as_prompts(model: nn.Module, inputs: Any, tokenizer: Any, device: torch.device) -> Prompts:
    """Text(s) with a tokenizer, or a mapping with input_ids and attention_mask, as prompts on a device."""
    check_generates(model)
    if isinstance(inputs, str) or (isinstance(inputs, Sequence) and inputs and isinstance(inputs[0], str)):
        inputs = _tokenised(model, [inputs] if isinstance(inputs, str) else list(inputs), tokenizer)
    if not isinstance(inputs, Mapping) or "input_ids" not in inputs:
        raise ValueError(
            "inputs must be text, a list of texts, or a mapping with input_ids and attention_mask; "
            f"got {type(inputs).__name__}{list(inputs) if isinstance(inputs, Mapping) else ''}"
            f"{' that is empty' if isinstance(inputs, Sequence) and not inputs else ''}."
        )
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        raise ValueError(f"input_ids must be whole numbers (B, T); got {_described(ids)}.")
    mask = _mask_of(model, ids) if mask is None else mask
    _check(model, ids, mask)
    return Prompts(ids.to(device).long(), mask.to(device).long())


def check_generates(model: nn.Module) -> None:
    """Refuse a model that does not continue text from left to right."""
    base = unwrapped(model)
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False) is True:
        raise ValueError(
            f"generate takes causal language models; encoder-decoder models ({type(base).__name__}) are not supported."
        )
    if "perm_mask" in inspect.signature(base.forward).parameters:  # of XLNet: without it a position sees its own token
        raise ValueError(
            f"generate takes models that read from left to right; {type(base).__name__} reads in any order."
        )
    if hasattr(base, "config") and not is_causal_language_model(base):
        raise ValueError(f"generate takes causal language models; got {type(base).__name__}.")


def check_length(model: nn.Module, longest: int, new_tokens: int) -> None:
    """Refuse a prompt that leaves no room for the new tokens among the positions of the model."""
    config = getattr(unwrapped(model), "config", None)
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if isinstance(limit, int) and limit > 0 and longest + new_tokens > limit:
        raise ValueError(
            f"prompt and new tokens must fit into the model's {limit} positions; got a prompt of {longest} tokens and "
            f"max_new_tokens={new_tokens}."
        )


def _tokenised(model: nn.Module, texts: list[str], tokenizer: Any) -> Mapping[str, Tensor]:
    if not callable(tokenizer):
        raise ValueError(f"tokenizer must be given where inputs are text; got {_described(tokenizer)}.")
    empty = next((number for number, text in enumerate(texts) if not text), None)
    if empty is not None:
        raise ValueError(f"prompts must not be empty; number {empty} is.")
    rows = vocabulary(model)
    if rows is not None and len(tokenizer) > rows:
        raise ValueError(
            f"tokenizer does not fit the model: it has {len(tokenizer)} tokens, the model {rows} embeddings."
        )
    lists = [tokenizer(text)["input_ids"] for text in texts]
    empty = next((number for number, tokens in enumerate(lists) if not tokens), None)
    if empty is not None:
        raise ValueError(f"prompts must have at least one token; number {empty}, {texts[empty]!r}, has none.")
    width = max(map(len, lists))
    ids = torch.zeros(len(lists), width, dtype=torch.int64, device="cpu")
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(lists):
        ids[row, width - len(tokens) :] = torch.tensor(tokens, device="cpu")
        mask[row, width - len(tokens) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def _check(model: nn.Module, ids: Tensor, mask: Tensor) -> None:
    if not ids.numel():
        raise ValueError(f"prompts must have at least one token; got input_ids of shape {tuple(ids.shape)}.")
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}; got {tuple(mask.shape)}."
        )
    on = mask.bool()
    if not bool(on.any(1).all()):
        raise ValueError(f"prompts must have at least one token; number {int((~on.any(1)).nonzero()[0])} has none.")
    if not bool((on[:, 1:] | ~on[:, :-1]).all()):
        row = int((~(on[:, 1:] | ~on[:, :-1]).all(1)).nonzero()[0])
        raise ValueError(
            f"prompts must be padded on the left, so that each ends where new tokens begin; number {row} is not. "
            "Use tokenizer(..., padding=True, padding_side='left')."
        )
    rows = vocabulary(model)
    counted = ids[on]
    if rows is not None and (int(counted.min()) < 0 or int(counted.max()) >= rows):
        raise ValueError(
            f"input_ids must lie in 0..{rows - 1}, the model's embeddings; got {int(counted.min())}.."
            f"{int(counted.max())}. Does the tokenizer belong to this model?"
        )


def _mask_of(model: nn.Module, ids: Tensor) -> Tensor:
    """1 after the pad tokens at the start of a row, if the pad token is not an end token: as transformers does."""
    base: Any = unwrapped(model)
    config = getattr(base, "generation_config", None) or getattr(base, "config", None)
    pad, end = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
    ends = end if isinstance(end, list | tuple) else [end]
    if not isinstance(pad, int) or pad in ends:
        return torch.ones_like(ids)
    if bool((ids[:, -1:] == pad).any()):
        row = int((ids[:, -1] == pad).nonzero()[0])
        raise ValueError(
            f"prompts must be padded on the left, so that each ends where new tokens begin; number {row} ends with the "
            "pad token. Use tokenizer(..., padding=True, padding_side='left'), and give its attention_mask."
        )
    return ((ids != pad).long().cumsum(1) > 0).long()


def _described(value: Any) -> str:
    if value is None:
        return "None"
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
