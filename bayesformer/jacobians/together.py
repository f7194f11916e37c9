"""Functions of torch whose backward passes serve many columns at once.

`torch.vmap` sends columns back together, and for that writes out what they share once for each: attention weights,
keys and values, the slopes of an activation. These give the gradients that autograd gives, and write out nothing.
`FASTER` says what each stands in for; arguments have the names that torch gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

functorch = torch._C._functorch


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """GELU whose slope is computed once."""
    if not _wanted(input):
        return F.gelu(input, approximate=approximate)
    result: Tensor = _Gelu.apply(input, approximate)
    return result


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        return F.gelu(x, approximate=approximate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        slope = torch.ops.aten.gelu_backward
        if functorch.is_batchedtensor(by_out):
            return by_out * slope(torch.ones_like(x), x, approximate=ctx.approximate), None
        return slope(by_out, x, approximate=ctx.approximate), None


def matmul(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Products of matrices in pairs, one column after another: on a CPU, where each then stays in the cache."""
    pairs = input.dim() > 2 and input.shape[:-2] == other.shape[:-2] and input.device.type == "cpu"
    if out is not None or not (pairs and _wanted(input) and _wanted(other)) or torch.is_autocast_enabled("cpu"):
        return torch.matmul(input, other, out=out)
    result: Tensor = _Matmul.apply(input, other)
    return result


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        if not functorch.is_batchedtensor(by_out):
            return by_out @ b.mT, a.mT @ by_out
        level = functorch.maybe_get_level(by_out)
        columns = functorch.get_unwrapped(by_out).movedim(functorch.maybe_get_bdim(by_out), 0)
        slopes = [g.flatten(0, -3) for g in columns.unbind()]
        left, right = ([x.flatten(0, -3)] * len(slopes) for x in (a, b))
        by_a = _products(slopes, [x.mT for x in right])
        if b.stride(-1) == 1:
            by_b = _products([x.mT for x in left], slopes)
        else:  # keys seen through a transpose: in their own order, for what gave them
            by_b = _products([g.mT for g in slopes], left).mT
        found = (by_x.unflatten(1, x.shape[:-2]) for by_x, x in ((by_a, a), (by_b, b)))
        return tuple(functorch._add_batch_dim(by_x, 0, level) for by_x in found)


def _products(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """(S, N, rows, columns): N products for each of S columns, each written where it belongs."""
    count, rows, _ = left[0].shape
    found = left[0].new_empty(len(left), count, rows, right[0].shape[-1])
    for a, b, out in zip(left, right, found.unbind(), strict=True):
        torch.bmm(a, b, out=out)
    return found


def _wanted(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


FASTER: dict[Any, Callable[..., Tensor]] = {
    F.gelu: gelu,
    **dict.fromkeys([torch.matmul, Tensor.matmul, Tensor.__matmul__], matmul),
}
