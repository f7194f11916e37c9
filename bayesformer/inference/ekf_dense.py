"""The extended Kalman filter with a dense Gaussian, for small numbers of weights."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesformer.core.types import Batch, LogJoint, Params, Transform
from bayesformer.core.vectors import THETA, blank, is_matrix, normal_like, value_and_grad
from bayesformer.inference.ekf_common import Curvature, Scores, check_settings, examples, scores
from bayesformer.inference.vi_dense import check_size, ravel, times, unravel
from bayesformer.laws import GaussianLaw, gaussian


class EKFDenseState(NamedTuple):
    """N(params, precision⁻¹), over the weights in the order of `vi_dense.ravel`."""

    params: Params  # the mean
    precision: Tensor  # (P, P) or (L, P, P)
    anchor: Params  # where likelihoods are linearised; empty: at the mean
    log_joint: Tensor  # () or (L,), of the last batch before it was absorbed


def build(
    log_joint: LogJoint,
    lr: float | None = None,
    transition_sd: float = 0.0,
    *,
    sd: float | Tensor = 1.0,
    start_precision: Tensor | None = None,
    prior_mean: Tensor | None = None,
    temperature: float = 1.0,
    curvature: Curvature | None = None,
    each: Scores = scores,
) -> Transform:
    """Predict and correct, with the outer product of scores as curvature.

        Λ ← (Λ⁻¹ + q² I)⁻¹                           weights wander with sd q between batches
        Λ ← Λ + η/τ mean_n s_n s_nᵀ                  s_n = ∇ log p(y_n | x_n, μ)
        μ ← μ + η/τ Λ⁻¹ mean_n s_n

    Duffield et al. (2024), `posteriors`, whose code subtracts the Fisher where the equation adds it. Arguments as
    in `ekf.diag.build`; `curvature(params, batch)` returns minus the mean Hessian, (P, P) or (L, P, P), and must
    leave Λ positive definite. `start_precision` (P, P) takes the place of 1/sd² I. `prior_mean` (P,) is where the
    prior is centred if not at the parameters a; likelihoods are then linearised there, at a mode, and not along the
    way, whose first steps go far: μ ← μ + η/τ Λ⁻¹ (mean_n s_n(a) - F(a) (μ - a)), F the curvature of the batch.

    Known exactly: with q = 0 no eigenvalue of Λ ever falls. On linear regression with the exact curvature this is
    the Kalman filter: after the last batch, the posterior. With inputs along the axes it equals `ekf.diag`.
    """
    check_settings(lr, transition_sd, sd, temperature)
    settings: dict[str, Any] = {"lr": lr, "transition_sd": transition_sd, "temperature": temperature}
    step = partial(update, log_joint=log_joint, curvature=curvature, each=each, **settings)
    return Transform(partial(init, sd=sd, start_precision=start_precision, prior_mean=prior_mean), step)


def init(
    params: Params,
    *,
    sd: float | Tensor = 1.0,
    start_precision: Tensor | None = None,
    prior_mean: Tensor | None = None,
) -> EKFDenseState:
    """The prior N(params, sd² I), or N(prior_mean, Λ⁻¹) for a mean (P,) or a precision Λ (P, P) that is given."""
    check_size(params, copies=3)  # the precision, what is added to it, its factor
    mean = {k: p.clone() for k, p in params.items()}
    if start_precision is not None:
        first = start_precision.expand(*ravel(params).shape[:-1], *start_precision.shape).clone()
    else:
        first = (torch.ones_like(ravel(params)) * sd**-2).diag_embed()
    if prior_mean is None:
        return EKFDenseState(mean, first, {}, blank(params))
    return EKFDenseState(unravel(prior_mean.expand_as(ravel(params)).clone(), params), first, mean, blank(params))


def update(
    state: EKFDenseState,
    batch: Batch,
    inplace: bool = False,
    *,
    log_joint: LogJoint,
    lr: float | None = None,
    transition_sd: float = 0.0,
    temperature: float = 1.0,
    curvature: Curvature | None = None,
    each: Scores = scores,
) -> tuple[EKFDenseState, Tensor]:
    """Absorb one batch; the second value is its outputs under the mean before."""
    value, outputs, grad, fisher = _moments(state.anchor or state.params, batch, log_joint, curvature, each)
    if state.anchor:
        grad = grad - times(fisher, ravel(state.params) - ravel(state.anchor))
    rate = (lr or examples(state.params, batch)) / temperature
    precision = predict(state.precision, transition_sd) + rate * fisher
    factor = torch.linalg.cholesky(precision)
    shift = unravel(rate * torch.cholesky_solve(grad.unsqueeze(-1), factor).squeeze(-1), state.params)
    if inplace:
        mean = {k: p.add_(shift[k]) for k, p in state.params.items()}
        return EKFDenseState(mean, state.precision.copy_(precision), state.anchor, value), outputs
    return EKFDenseState({k: p + shift[k] for k, p in state.params.items()}, precision, state.anchor, value), outputs


def sample(state: EKFDenseState) -> Params:
    """One draw of the weights (of each member): μ + R⁻ᵀ ε with R Rᵀ = Λ."""
    mean = ravel(state.params)
    root = torch.linalg.cholesky(state.precision)
    noise = torch.linalg.solve_triangular(root.mT, normal_like(mean).unsqueeze(-1), upper=True)
    return unravel(mean + noise.squeeze(-1), state.params)


def covariance(state: EKFDenseState) -> Tensor:
    """The covariance Λ⁻¹ of the weights, (P, P) or (L, P, P)."""
    return torch.cholesky_inverse(torch.linalg.cholesky(state.precision))


def predict(precision: Tensor, transition_sd: float) -> Tensor:
    """(Λ⁻¹ + q² I)⁻¹ = (I + q² Λ)⁻¹ Λ, which is Λ itself without wandering."""
    if not transition_sd:
        return precision
    eye = torch.eye(precision.shape[-1], dtype=precision.dtype, device=precision.device)
    wandered = torch.linalg.solve(eye + transition_sd**2 * precision, precision)
    return (wandered + wandered.mT) / 2


def _moments(
    params: Params, batch: Batch, log_joint: LogJoint, curvature: Curvature | None, each: Scores
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Value, outputs, mean score (..., P), and the Fisher or the curvature given (..., P, P)."""
    if curvature is not None:
        value, outputs, grads = value_and_grad(log_joint)(params, batch)
        return value, outputs, ravel(grads), curvature(params, batch)
    value, outputs, score = each(log_joint, params, batch)
    rows = score[THETA] if is_matrix(params) else torch.vmap(ravel)(score)  # (..., B, P)
    fisher = rows.mT @ rows / rows.shape[-2]
    return value.mean(1 if is_matrix(params) else 0), outputs, rows.mean(-2), fisher


def law(state: EKFDenseState) -> GaussianLaw:
    """The filtered Gaussian as a law over the one vector of weights, inverted in float64."""
    mean = state.params[THETA]
    whole = torch.linalg.inv(state.precision.double())
    return gaussian(mean, tril=torch.linalg.cholesky((whole + whole.mT) / 2).to(mean))
