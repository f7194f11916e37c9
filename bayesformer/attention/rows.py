"""Steps that families share, with hand-written derivatives: fewer passes over (B, H, T, S) than autograd takes.

Each has a slow twin in the tests.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bayesformer.attention.edges import Edges, Visible
from bayesformer.core.vectors import transformed

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
    """x with hidden entries set to a value."""
    return x.masked_fill(hidden, value) if isinstance(hidden, Tensor) else x


def hide_(x: Tensor, hidden: Hidden, value: float = 0.0) -> Tensor:
    """The same in place."""
    return x.masked_fill_(hidden, value) if isinstance(hidden, Tensor) else x


def row_softmax(x: Tensor, hidden: Hidden) -> Tensor:
    """Softmax of each row over what is not hidden; the rest, and a row without keys, is exactly 0."""
    if isinstance(hidden, Edges):
        return hidden.softmax(x)
    return hide(torch.softmax(hide(x, hidden, torch.finfo(x.dtype).min), -1), hidden)


def row_softmax_(x: Tensor, hidden: Hidden) -> Tensor:
    """The same without a gradient. Overwrites `x`."""
    if isinstance(hidden, Edges):
        return hidden.softmax(x)
    # A finite fill: with minus infinity a row without keys would be 0/0.
    return hide_(torch.softmax(hide_(x, hidden, torch.finfo(x.dtype).min), -1), hidden)


def softmax_backward(grad: Tensor, weights: Tensor, edges: Edges | None) -> Tensor:
    """w (g - Σ w g) of each row."""
    if edges is None:
        return torch._softmax_backward_data(grad, weights, -1, weights.dtype)
    return edges.softmax_backward(grad, weights)


def noisy_softmax(logits: Tensor, scale: Tensor | float, noise: Tensor, hidden: Hidden) -> Tensor:
    """softmax(logits + scale · noise) over the keys that are not hidden, whose weights are exactly 0.

    `noise` is used up. A row without keys is zeros.
    """
    if transformed():
        return row_softmax(logits + scale * noise, hidden)
    result: Tensor = _NoisySoftmax.apply(logits, scale, noise, hidden)
    return result


class _NoisySoftmax(Function):
    """∂/∂logits = w (g - Σ w g),  ∂/∂scale = that times the noise."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, scale: Tensor | float, noise: Tensor, hidden: Hidden) -> Tensor:
        learned = isinstance(scale, Tensor) and ctx.needs_input_grad[1]
        noisy = (noise * scale if learned else noise.mul_(scale)).add_(logits)
        weights = row_softmax_(noisy, hidden)
        ctx.edges = hidden if isinstance(hidden, Edges) else None
        ctx.shapes = logits.shape, scale.shape if isinstance(scale, Tensor) else None
        ctx.save_for_backward(weights, noise if learned else None)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, noise = ctx.saved_tensors
        slope = softmax_backward(grad, weights, ctx.edges)
        of_scale = None if noise is None else (slope * noise).sum_to_size(ctx.shapes[1])
        return slope.sum_to_size(ctx.shapes[0]), of_scale, None, None


def known(compute: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
    """A function whose derivatives are computed with its value: `compute(*inputs) -> (value, slope, ...)`.

    One slope per input, of a shape that broadcasts to it. A value either has the shape of its slopes, elementwise,
    or the leading axes of that shape: then it is a sum over the others.
    """
    if transformed():
        return _tangent(compute, *inputs)
    result: Tensor = _Known.apply(compute, *inputs)
    return result


def _tangent(compute: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
    """The same in plain operations: the tangent at the inputs, which has their value and their derivative there."""
    with warnings.catch_warnings():  # of operations in place that vmap makes one by one
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        value, *slopes = compute(*(x.detach().clone() for x in inputs))
    value = value.detach()
    for x, slope in zip(inputs, slopes, strict=True):
        nothing = torch.where(x.isfinite(), x - x.detach(), 0)  # a hidden entry may be minus infinity
        change = slope.detach() * nothing  # 0, with the derivative
        value = value + change.flatten(value.dim()).sum(-1) if change.dim() > value.dim() else value + change
    return value


class _Known(Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
        value, *slopes = compute(*inputs)
        ctx.shapes = [x.shape for x in inputs]
        ctx.save_for_backward(*slopes)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None]
        for slope, shape in zip(ctx.saved_tensors, ctx.shapes, strict=True):
            spread = grad.reshape(grad.shape + (1,) * (slope.dim() - grad.dim()))
            found.append((spread * slope).sum_to_size(shape))
        return tuple(found)


PIECE = 1 << 18  # numbers per piece: small enough for the cache, large enough to hide the calls


def in_pieces(compute: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """`compute(*inputs)`, which maps rows (R, ·) to rows, on some rows at a time; all axes but the last broadcast.

    A long computation on a CPU costs less when its temporaries stay in the cache. A single number stays one, (1, 1):
    to multiply by it is faster than by as many copies of it as there are rows.
    """
    lead = torch.broadcast_shapes(*(x.shape[:-1] for x in inputs))
    size = max(1, PIECE // inputs[0].shape[-1]) if inputs[0].device.type == "cpu" else max(1, math.prod(lead))
    count = max(1, -(-math.prod(lead) // size))

    def pieces(x: Tensor) -> Sequence[Tensor]:
        if x.numel() == 1:
            return [x.reshape(1, 1)] * count
        return x.expand(*lead, x.shape[-1]).reshape(-1, x.shape[-1]).split(size)

    whole: list[Tensor] = []
    for start, piece in zip(range(0, count * size, size), zip(*map(pieces, inputs), strict=True), strict=True):
        found = compute(*piece)
        if count == 1:
            whole = list(found)
        else:  # put into their place while they are in the cache
            whole = whole or [part.new_empty(math.prod(lead), part.shape[-1]) for part in found]
            for part, place in zip(found, whole, strict=True):
                place[start : start + size] = part
    return tuple(part.view(*lead, -1) for part in whole)


def exponential_(x: Tensor) -> tuple[Tensor, Tensor]:
    """e^x and its derivative, both finite: beyond `LIMIT` the tangent there. Overwrites `x`."""
    capped = x.clamp_max(LIMIT)
    beyond = x.sub_(capped)
    slope = capped.exp_()
    return torch.addcmul(slope, slope, beyond), slope


def visible_sum(values: Tensor, mask: Visible, shape: torch.Size) -> Tensor:
    """(B,): the sum of values at visible entries, where values, of at least three axes, and mask broadcast
    to `shape`, (B, H, T, S).

    An axis that neither writes out is multiplied, not expanded.
    """
    product = values if isinstance(mask, Edges) else values.masked_fill(~mask, 0.0)
    repeats = math.prod(full // own for full, own in zip(shape[-3:], product.shape[-3:], strict=True))
    return (product.sum((-3, -2, -1)) * repeats).expand(shape[:-3])


def visible_count(mask: Visible, like: Tensor) -> Tensor:
    """(B,): visible entries of each example."""
    return visible_sum(like.new_ones(1, 1, 1), mask, like.shape)


def masked_log_softmax(logits: Tensor, hidden: Hidden) -> Tensor:
    """log softmax over the keys that are not hidden; hugely negative, but finite, at those that are."""
    if isinstance(hidden, Edges):
        return hidden.log_softmax(logits)
    return torch.log_softmax(hide(logits, hidden, torch.finfo(logits.dtype).min), -1)
