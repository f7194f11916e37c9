"""Variational inference with a dense Gaussian, for small numbers of weights."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesformer.core.types import Batch, LogJoint, Params, Transform
from bayesformer.core.vectors import THETA, blank, count, is_matrix, normal_like, value_and_grad
from bayesformer.inference.optimise import clip_gradient
from bayesformer.inference.vi_diag import LOG_SD, Estimate, Rule, as_rule, average, check_settings, join, split
from bayesformer.laws import GaussianLaw, gaussian

LIMIT = 5000
"""Most weights a dense matrix is made for."""

FACTOR = "factor"


class VIDenseState(NamedTuple):
    """q(θ) = N(μ, C Cᵀ), over the weights in the order of `ravel`."""

    params: Params  # the mean μ
    factor: Tensor  # (P, P) or (L, P, P): C below the diagonal, log of its diagonal on it, 0 above
    rule: Any  # state of the ascent rule over {"mean.*", "log_sd.factor"}
    log_joint: Tensor  # () or (L,), averaged over the draws of the last step


def build(
    log_joint: LogJoint,
    temperature: float,
    rule: Any = None,
    *,
    log_sd: float = LOG_SD,
    draws: int = 1,
    stl: bool = True,
    clip: float = math.inf,
    pairs: bool = False,
) -> Transform:
    """Ascent on the evidence lower bound at θ = μ + C ε, ε ~ N(0, I), with C lower triangular and diag C = exp d.

        ELBO = E_q[log_joint(θ)] + T H[q],                   g = ∇ log_joint(θ)
        ∂μ = g,     ∂C = tril(g εᵀ),     ∂d = g ε exp d + T          stl=False
        the same with g + T C⁻ᵀ ε in place of g, and no + T          stl=True

    Titsias & Lázaro-Gredilla (2014), section 2, with the log-diagonal; Roeder et al. (2017) for stl.
    Arguments as in `vi_diag.build`; the gradient of the factor is clipped apart from that of μ.

    Known exactly: for log_joint = -½ (θ-a)ᵀΛ(θ-a) the optimum is μ = a, C Cᵀ = T Λ⁻¹: the posterior itself at
    T = 1/N. There the stl gradient is 0 for every ε, so that the ascent ends without noise.
    """
    check_settings(temperature, draws, clip)
    if not math.isfinite(log_sd):
        raise ValueError(f"log_sd must be finite; got {log_sd}.")
    ascent = as_rule(rule)
    settings: dict[str, Any] = {
        "temperature": temperature,
        "rule": ascent,
        "draws": draws,
        "stl": stl,
        "clip": clip,
        "pairs": pairs,
    }
    return Transform(partial(init, rule=ascent, log_sd=log_sd), partial(update, log_joint=log_joint, **settings))


def init(params: Params, *, rule: Rule, log_sd: float = LOG_SD) -> VIDenseState:
    """Independent weights of sd exp(log_sd); the mean is a copy, as in `vi_diag.init`."""
    check_size(params, copies=4)  # the factor, its gradient, two moments
    mean = {k: p.clone() for k, p in params.items()}
    factor = torch.full_like(ravel(params), log_sd).diag_embed()  # (..., P, P)
    return VIDenseState(mean, factor, rule.init(join(mean, {FACTOR: factor})), blank(params))


def update(
    state: VIDenseState,
    batch: Batch,
    inplace: bool = False,
    *,
    log_joint: LogJoint,
    temperature: float,
    rule: Rule,
    draws: int = 1,
    stl: bool = True,
    clip: float = math.inf,
    pairs: bool = False,
) -> tuple[VIDenseState, Tensor]:
    """One step; the second value is the outputs of the batch under the last draw."""
    value, outputs, mean_grad, factor_grad = elbo_gradient(state, batch, log_joint, temperature, draws, stl, pairs)
    clipped = join(clip_gradient(mean_grad, clip), {FACTOR: _clip_factor(factor_grad[FACTOR], clip)})
    moved, rule_state = rule.step(join(state.params, {FACTOR: state.factor}), clipped, state.rule, inplace)
    mean, factor = split(moved)
    return VIDenseState(mean, factor[FACTOR], rule_state, value), outputs


def sample(state: VIDenseState) -> Params:
    """One draw of the weights (of each member): μ + C ε."""
    mean = ravel(state.params)
    return unravel(mean + times(cholesky(state), normal_like(mean)), state.params)


def cholesky(state: VIDenseState) -> Tensor:
    """The Cholesky factor C of the covariance, (P, P) or (L, P, P)."""
    return state.factor.tril(-1) + state.factor.diagonal(dim1=-2, dim2=-1).exp().diag_embed()


def covariance(state: VIDenseState) -> Tensor:
    """The covariance C Cᵀ of q, (P, P) or (L, P, P)."""
    root = cholesky(state)
    return root @ root.mT


def elbo_gradient(
    state: VIDenseState,
    batch: Batch,
    log_joint: LogJoint,
    temperature: float,
    draws: int = 1,
    stl: bool = True,
    pairs: bool = False,
) -> Estimate:
    """Log joint, outputs and the gradients of μ and of {"factor"}."""
    evaluate = value_and_grad(log_joint)
    mean, root = ravel(state.params), cholesky(state)
    sticks = stl and temperature > 0

    def at(noise: Params) -> Estimate:
        eps = noise[THETA]
        value, outputs, grads = evaluate(unravel(mean + times(root, eps), state.params), batch)
        grad = ravel(grads)
        if sticks:
            score = torch.linalg.solve_triangular(root.mT, eps.unsqueeze(-1), upper=True).squeeze(-1)  # C⁻ᵀ ε
            grad = grad + temperature * score
        log_diagonal = grad * eps * root.diagonal(dim1=-2, dim2=-1) + (0.0 if sticks else temperature)
        outer = (grad.unsqueeze(-1) * eps.unsqueeze(-2)).tril(-1) + log_diagonal.diag_embed()  # (..., P, P)
        return value, outputs, unravel(grad, state.params), {FACTOR: outer}

    return average(at, lambda: {THETA: normal_like(mean)}, draws, pairs)


def _clip_factor(grad: Tensor, clip: float) -> Tensor:
    return clip_gradient({THETA: grad.flatten(-2)}, clip)[THETA].view_as(grad)


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrix times vector, of each member."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def ravel(params: Params) -> Tensor:
    """All weights as one vector (P,), or (L, P) for members in rows."""
    if list(params) == [THETA]:
        return params[THETA]
    return torch.cat([p.reshape(-1) for p in params.values()])


def unravel(vector: Tensor, like: Params) -> Params:
    """Views of `vector` (P,) with the names and shapes of `like`; the inverse of `ravel`."""
    if list(like) == [THETA]:
        return {THETA: vector}
    parts = vector.split([p.numel() for p in like.values()])
    return {k: part.view(p.shape) for (k, p), part in zip(like.items(), parts, strict=True)}


def check_size(params: Params, copies: int) -> None:
    """Refuse a matrix over too many weights, and say what it would take."""
    size = count(params)
    if size > LIMIT:
        one = next(iter(params.values()))
        members = len(one) if is_matrix(params) else 1
        gigabytes = copies * members * size**2 * one.element_size() / 1e9
        raise ValueError(
            f"params must have at most {LIMIT} weights for a dense Gaussian; got {size}, whose matrices would need "
            f"{gigabytes:.1f} GB. Use the diagonal form or fewer weights."
        )


def law(state: VIDenseState) -> GaussianLaw:
    """q as a law over the one vector of weights."""
    return gaussian(state.params[THETA], tril=cholesky(state))
