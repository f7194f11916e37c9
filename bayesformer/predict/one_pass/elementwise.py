"""Element-wise functions g, to first order at the mean: m = g(m_h), S = g'(m_h) S_h g'(m_h).

Li et al. (2025), section 3. `activations="exact"` uses the Gaussian's own moments for ReLU, where the kink makes the
first order overstate the variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.predict.one_pass.carrier import Uncertain, rule, times_
from bayesformer.predict.one_pass.linear import Affine

NAMES = ("exp", "log", "sqrt", "rsqrt", "sin", "cos", "erf", "abs", "log1p", "expm1", "square", "pow", "clamp")
AUTOMATIC = [
    *[F.elu, F.celu, F.selu, F.leaky_relu, F.softplus, F.mish, F.hardswish, F.hardtanh, F.relu6, F.softsign],
    *[torch.selu, torch.celu, F.hardsigmoid, F.tanhshrink, F.logsigmoid, Tensor.__pow__],
    *[torch.clamp_min, Tensor.clamp_min, torch.clamp_max, Tensor.clamp_max],
    *[getattr(owner, name) for name in NAMES for owner in (torch, Tensor)],
]


def elementwise(x: Uncertain, value: Tensor, slope: Tensor) -> Uncertain:
    """g(x) from the value and slope of g at the mean."""
    both = slope.unsqueeze(-1) * slope.unsqueeze(-2) if x.full else slope * slope
    found = x.like(value, times_(both, x.v))
    if isinstance(x.origin, Affine) and not x.origin.moves:
        found.gate = (x.origin, slope)
    return found


def by_autograd(function: Callable[..., Tensor], x: Any, *args: Any, **kwargs: Any) -> Uncertain:
    """Any element-wise function: its slope is the gradient of its sum."""
    kwargs.pop("inplace", None)
    if not isinstance(x, Uncertain) or any(isinstance(a, Uncertain) for a in args):
        name = getattr(function, "__name__", str(function))
        raise TypeError(f"{name} must have one uncertain argument, its first.")
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        m = x.m.view_as(x.m) if further and x.m.requires_grad else x.m.detach().requires_grad_()
        value = function(m, *args, **kwargs)
        (slope,) = torch.autograd.grad(value.sum(), m, create_graph=further)
    return elementwise(x, value if further else value.detach(), slope)


for _function in AUTOMATIC:
    rule(_function)(partial(by_autograd, _function))


@rule(F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_)
def relu(input: Uncertain, inplace: bool = False) -> Uncertain:  # noqa: ARG001
    """Slope 1 above 0, else 0; or the exact moments."""
    m = input.m
    if input.settings.activations == "linear":
        return elementwise(input, F.relu(m), (m > 0).to(m.dtype))
    value, second, slope = relu_moments(m, input.s)
    if not input.full:
        return input.like(value, (second - value * value).clamp_min(0))
    # The exact variances; correlations as a linear function with the mean slope would leave them (Stein's lemma).
    around = input.v * (slope.unsqueeze(-1) * slope.unsqueeze(-2))
    variance = (second - value * value).clamp_min(0)
    return input.like(value, around + torch.diag_embed(variance - around.diagonal(dim1=-2, dim2=-1)))


def relu_moments(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E[relu(h)], E[relu(h)²] and P(h > 0) for h ~ N(m, s).

    E = m Φ(r) + √s φ(r),   E2 = (m² + s) Φ(r) + m √s φ(r),   r = m / √s
    """
    sd = s.clamp_min(torch.finfo(s.dtype).tiny).sqrt()
    r = m / sd
    above = torch.special.ndtr(r)
    density = torch.exp(-0.5 * r * r) / math.sqrt(2 * math.pi)
    return m * above + sd * density, (m * m + s) * above + m * sd * density, above


@rule(F.gelu)
def gelu(input: Uncertain, *, approximate: str = "none") -> Uncertain:
    """In the variant the network uses."""
    value = F.gelu(input.m, approximate=approximate)
    slope = torch.ops.aten.gelu_backward(torch.ones_like(input.m), input.m, approximate=approximate)
    return elementwise(input, value, slope)


@rule(F.silu)
def silu(input: Uncertain, inplace: bool = False) -> Uncertain:  # noqa: ARG001
    """m σ(m), with the slope σ(m) (1 + m (1 - σ(m)))."""
    gate = torch.sigmoid(input.m)
    return elementwise(input, input.m * gate, gate * (1 + input.m * (1 - gate)))


@rule(F.tanh, torch.tanh, Tensor.tanh)
def tanh(input: Uncertain) -> Uncertain:
    """tanh(m), with the slope 1 - tanh²(m)."""
    value = torch.tanh(input.m)
    return elementwise(input, value, 1 - value * value)


@rule(F.sigmoid, torch.sigmoid, Tensor.sigmoid)
def sigmoid(input: Uncertain) -> Uncertain:
    """σ(m), with the slope σ(m) (1 - σ(m))."""
    value = torch.sigmoid(input.m)
    return elementwise(input, value, value * (1 - value))


@rule(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.dropout)
def dropout(input: Uncertain, p: float = 0.5, training: bool = True, inplace: bool = False) -> Uncertain:  # noqa: ARG001
    """The input itself: a pass is a prediction, and dropout must be off."""
    if training and p > 0:
        raise ValueError(f"dropout must be off in the one-pass rule: call model.eval(); got training=True, p={p}.")
    return input
