"""Functions of torch whose backward passes serve many columns at once.

`torch.vmap` over a backward pass sends S columns back together. For some functions torch then copies what the columns
share (attention weights, keys, values, the slopes of an activation) S times, or has no rule and warns. The functions
here have the same outputs and gradients as torch's; each backward pass is an autograd function with a `vmap` rule of
its own, which takes the columns as one tensor (S, ...):

    function     what its rule does with S columns
    gelu         multiplies them by one slope
    matmul       multiplies pairs of matrices column by column, on a CPU, where each product stays in the cache
    attention    runs the fused kernel's backward pass column by column, on a CPU

`REPLACEMENTS` maps torch's functions to these; arguments have the names that torch gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """GELU whose slope is computed once for all columns of a backward pass."""
    if not _has_gradient(input):
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
        return _GeluBackward.apply(by_out, ctx.saved_tensors[0], ctx.approximate), None


class _GeluBackward(torch.autograd.Function):
    @staticmethod
    def forward(by_out: Tensor, x: Tensor, approximate: str) -> Tensor:
        found: Tensor = torch.ops.aten.gelu_backward(by_out, x, approximate=approximate)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: it is not differentiated further."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, by_out: Tensor, x: Tensor, approximate: str) -> tuple[Tensor, int]:  # noqa: ARG004
        """The columns times one slope."""
        slope = torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=approximate)
        return by_out.movedim(in_dims[0], 0) * slope, 0


def matmul(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Products of matrices in pairs, (..., n, k) @ (..., k, m) with equal leading shapes; any others as torch does."""
    pairs = input.dim() > 2 and input.shape[:-2] == other.shape[:-2] and input.device.type == "cpu"
    if out is not None or not (pairs and _has_gradient(input) and _has_gradient(other)) or _autocast():
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
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _MatmulBackward.apply(by_out, *ctx.saved_tensors)
        return found


class _MatmulBackward(torch.autograd.Function):
    @staticmethod
    def forward(by_out: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return by_out @ b.mT, a.mT @ by_out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: it is not differentiated further."""

    @staticmethod
    def vmap(
        info: Any,  # noqa: ARG004
        in_dims: Any,
        by_out: Tensor,
        a: Tensor,
        b: Tensor,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """Column by column."""
        slopes = [g.flatten(0, -3) for g in by_out.movedim(in_dims[0], 0).unbind()]
        left, right = ([x.flatten(0, -3)] * len(slopes) for x in (a, b))
        by_a = _products(slopes, [x.mT for x in right])
        if b.stride(-1) == 1:
            by_b = _products([x.mT for x in left], slopes)
        else:  # keys seen through a transpose: in their own order, for what gave them
            by_b = _products([g.mT for g in slopes], left).mT
        return (by_a.unflatten(1, a.shape[:-2]), by_b.unflatten(1, b.shape[:-2])), (0, 0)


def _products(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """(S, N, rows, columns): N products for each of S columns, each written where it belongs."""
    count, rows, _ = left[0].shape
    found = left[0].new_empty(len(left), count, rows, right[0].shape[-1])
    for a, b, out in zip(left, right, found.unbind(), strict=True):
        torch.bmm(a, b, out=out)
    return found


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's attention, whose backward pass is made column by column without a copy of what they share."""
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    followed = any(_has_gradient(x) for x in (query, key, value)) and query.device.type == "cpu"
    if not followed or _autocast() or (attn_mask is not None and attn_mask.requires_grad):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)  # type: ignore[arg-type]
    result: Tensor = _Attention.apply(query, key, value, attn_mask, options)
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        with torch.enable_grad():  # a graph of its own, from which the backward pass is made as often as needed
            wanted = ctx.needs_input_grad[:3]
            own = [x.detach().requires_grad_(flag) for x, flag in zip((query, key, value), wanted, strict=True)]
            ctx.result = F.scaled_dot_product_attention(own[0], own[1], own[2], mask, **options)
        ctx.inputs = tuple(x for x in own if x.requires_grad)
        return ctx.result.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, ...]:
        found = iter(_AttentionBackward.apply(by_out, ctx.result, ctx.inputs))
        return (*(next(found) if wanted else None for wanted in ctx.needs_input_grad[:3]), None, None)


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(by_out: Tensor, result: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(result, inputs, by_out, retain_graph=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: it is not differentiated further."""

    @staticmethod
    def vmap(
        info: Any,  # noqa: ARG004
        in_dims: Any,
        by_out: Tensor,
        result: Tensor,
        inputs: tuple[Tensor, ...],
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Column by column."""
        columns = by_out.movedim(in_dims[0], 0)
        found = [torch.autograd.grad(result, inputs, column, retain_graph=True) for column in columns.unbind()]
        return tuple(torch.stack(parts) for parts in zip(*found, strict=True)), (0,) * len(inputs)


def _has_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu")


REPLACEMENTS: dict[Any, Callable[..., Tensor]] = {
    F.gelu: gelu,
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    **dict.fromkeys([torch.matmul, Tensor.matmul, Tensor.__matmul__], matmul),
}
