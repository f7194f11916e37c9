"""The extended Kalman filter with a diagonal Gaussian."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesformer.core.types import Batch, LogJoint, Params, Transform
from bayesformer.core.vectors import THETA, blank, is_matrix, normal_like, value_and_grad
from bayesformer.inference.ekf_common import Curvature, Scores, check_settings, examples, scores
from bayesformer.laws import GaussianLaw, gaussian


class EKFDiagState(NamedTuple):
    """The filtered Gaussian N(params, 1 / precision)."""

    params: Params  # the mean
    precision: Params  # in the shapes of the mean
    log_joint: Tensor  # () or (L,), of the last batch before it was absorbed


def build(
    log_joint: LogJoint,
    lr: float | None = None,
    transition_sd: float = 0.0,
    *,
    sd: float | Tensor = 1.0,
    temperature: float = 1.0,
    curvature: Curvature | None = None,
    each: Scores = scores,
    moves: bool = True,
) -> Transform:
    """Predict and correct, weight by weight, with the squared score as curvature.

        ρ ← ρ / (1 + q² ρ)                           weights wander with sd q between batches
        ρ ← ρ + η/τ mean_n s_n²                      s_n = ∇ log p(y_n | x_n, μ)
        μ ← μ + η/τ mean_n s_n / ρ                   if it `moves`

    Duffield et al. (2024), `posteriors`, written in precisions ρ. `lr` is η: the batch size B is the Bayes
    update, and None takes it from each batch, so a short last batch counts as what it is; τ is the temperature of the
    likelihood. The empirical Fisher is right only on average and at the true weights; `curvature(params, batch)`
    replaces it by minus the diagonal of the mean Hessian, in the shapes of the parameters. `each` gives the scores
    s_n: all at once by vmap, or one example after the other (`ekf_common.looped_scores`).

    Known exactly: with q = 0 no precision ever falls. On linear regression with orthogonal inputs and the exact
    curvature this is the Kalman filter: after the last batch, the posterior. With correlated inputs the precisions are
    still those of the best diagonal Gaussian, but the mean of one pass is not the posterior's (.2 to .8 standard
    deviations off on linear regression): `moves=False` leaves it where it is, at a mode that was found before.
    """
    check_settings(lr, transition_sd, sd, temperature)
    settings: dict[str, Any] = {"lr": lr, "transition_sd": transition_sd, "temperature": temperature, "moves": moves}
    step = partial(update, log_joint=log_joint, curvature=curvature, each=each, **settings)
    return Transform(partial(init, sd=sd), step)


def init(params: Params, *, sd: float | Tensor = 1.0) -> EKFDiagState:
    """The state before the first batch: the prior N(params, sd²)."""
    mean = {k: p.clone() for k, p in params.items()}
    return EKFDiagState(mean, {k: torch.ones_like(p) * sd**-2 for k, p in params.items()}, blank(params))


def update(
    state: EKFDiagState,
    batch: Batch,
    inplace: bool = False,
    *,
    log_joint: LogJoint,
    lr: float | None = None,
    transition_sd: float = 0.0,
    temperature: float = 1.0,
    curvature: Curvature | None = None,
    each: Scores = scores,
    moves: bool = True,
) -> tuple[EKFDiagState, Tensor]:
    """Absorb one batch; the second value is its outputs under the mean before."""
    value, outputs, grad, square = _moments(state.params, batch, log_joint, curvature, each)
    rate = (lr or examples(state.params, batch)) / temperature
    precision = {k: r / (1 + transition_sd**2 * r) if transition_sd else r for k, r in state.precision.items()}
    if inplace:
        for k, p in state.params.items():
            state.precision[k].copy_(precision[k]).add_(square[k], alpha=rate)
            if moves:
                p.addcdiv_(grad[k], state.precision[k], value=rate)
        return EKFDiagState(state.params, state.precision, value), outputs
    precision = {k: r + rate * square[k] for k, r in precision.items()}
    if not moves:
        return EKFDiagState(state.params, precision, value), outputs
    mean = {k: p + rate * grad[k] / precision[k] for k, p in state.params.items()}
    return EKFDiagState(mean, precision, value), outputs


def sample(state: EKFDiagState) -> Params:
    """One draw of the weights (of each member): μ + ε / √ρ."""
    return {k: p + normal_like(p) * state.precision[k].rsqrt() for k, p in state.params.items()}


def _moments(
    params: Params, batch: Batch, log_joint: LogJoint, curvature: Curvature | None, each: Scores
) -> tuple[Tensor, Tensor, Params, Params]:
    """Value, outputs, mean score, and mean squared score or the curvature given."""
    if curvature is not None:
        value, outputs, grad = value_and_grad(log_joint)(params, batch)
        return value, outputs, grad, curvature(params, batch)
    value, outputs, score = each(log_joint, params, batch)
    axis = 1 if is_matrix(params) else 0
    grad = {k: s.mean(axis) for k, s in score.items()}
    return value.mean(axis), outputs, grad, {k: s.square().mean(axis) for k, s in score.items()}


def law(state: EKFDiagState) -> GaussianLaw:
    """The filtered Gaussian as a law over the one vector of weights."""
    return gaussian(state.params[THETA], state.precision[THETA].rsqrt())
