"""Sums, products and quotients.

Two uncertain operands are taken as independent, unless both are images of one input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.predict.one_pass.carrier import Uncertain, first_uncertain, mean_of, rule, then
from bayesformer.predict.one_pass.linear import Affine


@rule(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
def add(input: Any, other: Any, *, alpha: float = 1) -> Uncertain:
    """Variances add: a residual branch is taken as independent of what it is added to."""
    if input is other:
        return mul(input, 1 + alpha)
    m = torch.add(mean_of(input), mean_of(other), alpha=alpha)
    if isinstance(input, Uncertain) and isinstance(other, Uncertain):
        return input.like(m, sum_of(input, other, alpha, m))
    x = first_uncertain(input, other)
    factor = alpha if x is other else 1
    found = x.like(m, then(x, lambda v: spread_to(v if factor == 1 else v * factor**2, x.m, m)))
    found.scores = x.scores
    return found


@rule(torch.sub, Tensor.sub, Tensor.__sub__, torch.subtract)
def sub(input: Any, other: Any, *, alpha: float = 1) -> Uncertain:
    """A difference, whose variances add as in a sum."""
    return add(input, other, alpha=-alpha)


@rule(torch.rsub, Tensor.__rsub__)
def rsub(input: Any, other: Any, *, alpha: float = 1) -> Uncertain:
    """other - input, whose variances add as in a sum."""
    return add(other if isinstance(other, Tensor) else torch.as_tensor(other, device=input.device), input, alpha=-alpha)


@rule(Tensor.neg, torch.neg, Tensor.__neg__)
def neg(input: Uncertain) -> Uncertain:
    """-input, which has the spread of the input."""
    return input.like(-input.m, then(input, lambda v: v))


@rule(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply)
def mul(input: Any, other: Any) -> Uncertain:
    """By a known factor, or the product of two uncertain tensors."""
    if input is other:
        return _square(input)
    m = mean_of(input) * mean_of(other)
    if isinstance(input, Uncertain) and isinstance(other, Uncertain):
        return input.like(m, product_spread(input, other, m))
    x, factor = (input, other) if isinstance(input, Uncertain) else (other, input)
    found = x.like(m, then(x, lambda v: scaled(v, factor, x.m, m)))
    found.scores = x.scores
    return found


@rule(torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide)
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Uncertain:
    """By a known number, or to first order by an uncertain one."""
    if rounding_mode is not None:
        raise ValueError(f"div must not round an uncertain tensor; got rounding_mode={rounding_mode!r}.")
    if not isinstance(other, Uncertain):
        return mul(input, 1 / other)
    return mul(input, reciprocal(other))


@rule(torch.reciprocal, Tensor.reciprocal)
def reciprocal(input: Uncertain) -> Uncertain:
    """1 / input to first order, with the slope -1/m²."""
    m = input.m.reciprocal()
    return input.like(m, then(input, lambda v: scaled(v, m * m, m, m)))


@rule(Tensor.__rtruediv__, Tensor.__rdiv__)
def rdiv(input: Uncertain, other: Any) -> Uncertain:
    """other / input, to first order in the input."""
    return mul(reciprocal(input), other)


def _in_place(function: Callable[..., Uncertain]) -> Callable[..., Uncertain]:
    """x takes the result; a known tensor cannot, but Python rebinds the name of `x += y` to what is returned."""

    def run(input: Any, *args: Any, **kwargs: Any) -> Uncertain:
        found = function(input, *args, **kwargs)
        return input.become(found) if isinstance(input, Uncertain) else found

    return run


def _known_in_place(name: str) -> Callable[..., Uncertain]:
    def refuse(input: Any, *args: Any, **kwargs: Any) -> Uncertain:  # noqa: ARG001
        raise TypeError(f"Tensor.{name} would put an uncertain value into a known tensor in place; use x = x + y.")

    return refuse


def _register_in_place() -> None:
    pairs = {
        add: ("__iadd__", "add_"),
        sub: ("__isub__", "sub_"),
        mul: ("__imul__", "mul_"),
        div: ("__itruediv__", "div_"),
    }
    for function, (operator, method) in pairs.items():
        rule(getattr(Tensor, operator))(_in_place(function))
        changed, refused = _in_place(function), _known_in_place(method)

        def by_method(
            input: Any, *args: Any, changed: Any = changed, refused: Any = refused, **kwargs: Any
        ) -> Uncertain:
            return (changed if isinstance(input, Uncertain) else refused)(input, *args, **kwargs)

        rule(getattr(Tensor, method))(by_method)


_register_in_place()


def spread_to(v: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """The spread of a tensor that a sum broadcast from `old` to `new`; one value repeated is wholly correlated."""
    if old.shape == new.shape:
        return v
    if v.dim() == old.dim():
        return v.expand(new.shape)
    return v.expand(*new.shape, new.shape[-1])


def sum_of(x: Uncertain, y: Uncertain, alpha: float, m: Tensor) -> Tensor:
    """The spread of x + alpha y for independent x and y, in the shape of their sum m."""
    full = x.full or y.full
    a, b = (x.S, y.S) if full else (x.v, y.v)
    found = a + b if alpha * alpha == 1 else torch.add(a, b, alpha=alpha * alpha)
    shape = (*m.shape, m.shape[-1]) if full else m.shape
    return found if found.shape == shape else found.expand(shape)


def scaled(v: Tensor, factor: Any, old: Tensor, new: Tensor) -> Tensor:
    """The spread of a tensor times a known factor, a number or of a shape that broadcasts."""
    if not isinstance(factor, Tensor) or factor.dim() == 0:
        return spread_to(v * (factor * factor), old, new)
    factor = factor.to(v.dtype) if not factor.is_floating_point() else factor
    if v.dim() == old.dim():
        return v * (factor * factor)
    return v * (factor.unsqueeze(-1) * factor.unsqueeze(-2))


def product_spread(x: Uncertain, y: Uncertain, m: Tensor) -> Tensor:
    """Cov(xy), exact for Gaussians:

    S_x ∘ m_y m_yᵀ + S_y ∘ m_x m_xᵀ + S_x ∘ S_y, and with a cross-covariance C: m_y m_xᵀ ∘ C + its transpose + C ∘ Cᵀ
    """
    cross = _cross_covariance(x, y)
    if not (x.full or y.full):
        found = x.v * (y.m * y.m + y.v) + y.v * (x.m * x.m)
        found = found if cross is None else found + cross * (2 * x.m * y.m + cross)
        return found.clamp_min(0).expand(m.shape)
    a, b = x.S, y.S
    found = a * (_outer(y.m, y.m) + b) + b * _outer(x.m, x.m)
    if cross is not None:
        both = _outer(y.m, x.m) * cross
        found = found + both + both.mT + cross * cross.mT
    return found


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def _cross_covariance(x: Uncertain, y: Uncertain) -> Tensor | None:
    """Of two images of one uncertain input, as in a gated MLP: slopes ∘ W_x S W_yᵀ. The weights' noise is their own."""
    first, second = _image(x), _image(y)
    if first is None or second is None:
        return None
    (f, f_slope), (g, g_slope) = first, second
    if f.x is not g.x or not isinstance(f.x, Uncertain):
        return None
    u, w = mean_of(f.w), mean_of(g.w)
    if x.full or y.full:
        found = u @ f.x.S @ w.mT
        for slope, axis in ((f_slope, -1), (g_slope, -2)):
            found = found if slope is None else found * slope.unsqueeze(axis)
        return found
    found = F.linear(f.x.s, u * w)
    for slope in (f_slope, g_slope):
        found = found if slope is None else found * slope
    return found


def _image(x: Uncertain) -> tuple[Affine, Tensor | None] | None:
    """The affine map behind a tensor and the slope since."""
    if x.gate is not None:
        return x.gate
    return (x.origin, None) if x.origin is not None and not x.origin.moves else None


def _square(x: Uncertain) -> Uncertain:
    """x², to first order: slope 2m."""
    return x.like(x.m * x.m, then(x, lambda v: scaled(v, 2 * x.m, x.m, x.m)))
