"""Steps that families share: rows of attention with hidden keys, and sums over the entries that are visible."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from bayesformer.attention.edges import Edges, Visible
from bayesformer.core.compat import transformed

LIMIT = 20.0  # e^20 nats per entry is lost anyway; beyond, the exponential goes on as its tangent and stays finite


Hidden: TypeAlias = Tensor | Edges | None
"""What is hidden of a row: where a mask hides, or None for nothing. Edges hide nothing, but say what makes a row."""


def hidden_keys(mask: Visible) -> Hidden:
    """Where a mask hides, or None where it hides nothing, which saves the passes that fill.

    Asked on a CPU only: elsewhere the answer would have to be waited for.
    """
    if isinstance(mask, Edges):
        return mask
    asked = mask.device.type == "cpu" and not transformed() and not torch.compiler.is_compiling()
    return None if asked and bool(mask.all()) else ~mask


def hide(x: Tensor, hidden: Hidden, value: float = 0.0) -> Tensor:
    """The tensor with its hidden entries set to a value."""
    return x.masked_fill(hidden, value) if isinstance(hidden, Tensor) else x


def row_softmax(x: Tensor, hidden: Hidden) -> Tensor:
    """Softmax of each row over what is not hidden; the rest, and a row without keys, is exactly 0."""
    if isinstance(hidden, Edges):
        return hidden.softmax(x)
    # A finite fill: with minus infinity a row without keys would be 0/0, and its NaN would come back in the gradient.
    return hide(torch.softmax(hide(x, hidden, torch.finfo(x.dtype).min), -1), hidden)


def masked_log_softmax(logits: Tensor, hidden: Hidden) -> Tensor:
    """log softmax over the keys that are not hidden; hugely negative, but finite, at those that are."""
    if isinstance(hidden, Edges):
        return hidden.log_softmax(logits)
    return torch.log_softmax(hide(logits, hidden, torch.finfo(logits.dtype).min), -1)


def finite_exp(x: Tensor) -> Tensor:
    """e^x with a finite value and derivative: beyond `LIMIT` it goes on as its tangent there."""
    capped = x.clamp_max(LIMIT)
    return capped.exp() * (1 + x - capped)


def visible_sum(values: Tensor, mask: Visible, shape: torch.Size) -> Tensor:
    """(B,): the sum of values at visible entries, where values, of at least three axes, and mask broadcast
    to `shape`, (B, H, T, S).

    An axis that neither writes out is multiplied, not expanded.
    """
    product = values if isinstance(mask, Edges) else values.masked_fill(~mask, 0.0)
    repeats = math.prod(full // own for full, own in zip(shape[-3:], product.shape[-3:], strict=True))
    return (product.sum((-3, -2, -1)) * repeats).expand(shape[:-3])


def visible_count(mask: Visible, like: Tensor) -> Tensor:
    """(B,): the number of visible entries of each example."""
    return visible_sum(like.new_ones(1, 1, 1), mask, like.shape)
