"""Normalisation: LayerNorm, RMSNorm, BatchNorm at prediction.

`layer_norm="simple"` takes the statistics of the mean as constants (Li et al., 2025): s = γ² s / (Var(m) + ε).
"jacobian" is the full first order, with x̂ the normalised mean, D its width and r the reciprocal scale:

    LayerNorm   J = γ r (I - 1 1ᵀ/D - x̂ x̂ᵀ/D),      RMSNorm   J = γ r (I - x̂ x̂ᵀ/D)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.predict.one_pass.arithmetic import add, mul
from bayesformer.predict.one_pass.carrier import Uncertain, first_uncertain, mean_of, rule, times_


@rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Uncertain:
    """With gain and shift that may be uncertain themselves."""
    if not isinstance(input, Uncertain):
        return affine(F.layer_norm(input, normalized_shape, eps=eps), weight, bias)
    if len(normalized_shape) != 1:
        raise ValueError(f"layer_norm must act on the last axis alone; got normalized_shape={tuple(normalized_shape)}.")
    plain = not isinstance(weight, Uncertain) and not isinstance(bias, Uncertain)
    given = (weight, bias) if plain else (None, None)
    value, _mean, rstd = torch.native_layer_norm(input.m, normalized_shape, *given, eps)  # type: ignore[call-arg]
    if plain and input.settings.layer_norm == "simple" and not input.full:
        spread = input.v * (rstd * rstd)
        return input.like(value, spread if weight is None else times_(spread, weight * weight))
    normalised = (input.m - input.m.mean(-1, keepdim=True)) * rstd
    spread = normalised_spread(input, normalised, rstd, centred=True)
    return affine(input.like(normalised, spread), weight, bias)


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Uncertain:
    """As LayerNorm without centring."""
    if len(normalized_shape) != 1:
        raise ValueError(f"rms_norm must act on the last axis alone; got normalized_shape={tuple(normalized_shape)}.")
    m = mean_of(input)
    floor = torch.finfo(m.dtype).eps if eps is None else eps
    rstd = (m.square().mean(-1, keepdim=True) + floor).rsqrt()
    if not isinstance(input, Uncertain):
        return affine(m * rstd, weight, None)
    spread = normalised_spread(input, m * rstd, rstd, centred=False)
    return affine(input.like(m * rstd, spread), weight, None)


def normalised_spread(x: Uncertain, xhat: Tensor, rstd: Tensor, centred: bool) -> Tensor:
    """The spread of x̂ before gain and shift."""
    width = x.m.shape[-1]
    if x.full:
        scale = rstd.unsqueeze(-1)
        if x.settings.layer_norm == "simple":
            return x.v * (scale * scale)
        jacobian = torch.eye(width, dtype=xhat.dtype, device=xhat.device) - int(centred) / width
        jacobian = scale * (jacobian - xhat.unsqueeze(-1) * xhat.unsqueeze(-2) / width)
        return jacobian @ x.v @ jacobian.mT
    if x.settings.layer_norm == "simple":
        return x.v * (rstd * rstd)
    return _jacobian_variance(x.v, xhat, width, centred) * (rstd * rstd)


def _jacobian_variance(s: Tensor, xhat: Tensor, width: int, centred: bool) -> Tensor:
    """Σ_j (δ_ij - c/D - x̂_i x̂_j/D)² s_j, c = 1 where the mean is taken off, without the matrix."""
    own = s * (1 - (2 / width) * (int(centred) + xhat * xhat))
    along = (s * xhat * xhat).sum(-1, keepdim=True) * (xhat * xhat)
    if centred:
        along = along + s.sum(-1, keepdim=True) + 2 * xhat * (s * xhat).sum(-1, keepdim=True)
    return (own + along / width**2).clamp_min(0)  # rounding: the sum of squares it stands for is not negative


def affine(x: Any, weight: Any, bias: Any) -> Any:
    """The normalised input times the gain plus the shift, element by element."""
    for value, rule_ in ((weight, mul), (bias, add)):
        if value is None:
            continue
        uncertain = isinstance(x, Uncertain) or isinstance(value, Uncertain)
        x = rule_(x, value) if uncertain else (x * value if rule_ is mul else x + value)
    return x


@rule(F.batch_norm, torch.batch_norm)
def batch_norm(
    input: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,  # noqa: ARG001
    eps: float = 1e-5,
    *_: Any,
) -> Uncertain:
    """Running averages are constants, so this is an affine map per channel."""
    if training or running_mean is None or running_var is None:
        raise ValueError("batch_norm must use running averages in the one-pass rule: call model.eval().")
    shape = (-1, *[1] * (input.dim() - 2))
    first_uncertain(input, weight, bias)
    scale = (running_var + eps).rsqrt().view(shape)
    shift = -running_mean.view(shape) * scale
    centred = add(mul(input, scale), shift) if isinstance(input, Uncertain) else input * scale + shift
    return affine(centred, *[None if p is None else p.view(shape) for p in (weight, bias)])
