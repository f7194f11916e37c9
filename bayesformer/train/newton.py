"""The last way to a mode: a few Gauss-Newton steps on all data, and how far from the mode the weights then are.

    d = -H⁻¹ ∇U,    H = Σ_n J_nᵀ Λ_n J_n + Π,    θ ← θ + t d with t = 1, ½, ¼, ... until U falls

The Newton decrement δ = √(∇Uᵀ H⁻¹ ∇U / P) is the distance to the mode in posterior standard deviations, averaged over
the weights. For a linear model with Gaussian noise one step is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.inference.linear_algebra import conjugate_gradients
from bayesformer.laplace.structures import DenseCurvature
from bayesformer.laws import Dense
from bayesformer.train.full_batch import FullBatch

CLOSE = 0.05  # posterior standard deviations: nearer than this no further step is made
STEPS, HALVINGS = 5, 8  # Gauss-Newton steps and halvings of each, at most
SUFFICIENT = 1e-4  # share of the predicted decrease of U that a step must bring (Armijo)
JITTER = 1e-6  # of the mean diagonal, added where a flat prior leaves directions without curvature
PRODUCTS = 60  # of conjugate gradients for one step, at most: two epochs each
SHORTEST = 1e-3  # residual of conjugate gradients, over the gradient


class Polished(NamedTuple):
    """Weights after the Gauss-Newton steps, and what is known there."""

    theta: Tensor  # (P,)
    decrement: float  # δ at θ
    steps: int  # that were made
    precision: Tensor | None  # (P, P), H at θ in float64; None where it was never written down


class Direction(NamedTuple):
    """A Gauss-Newton direction -H⁻¹ ∇U and the squared length of the gradient in units of H."""

    step: Tensor  # (P,)
    squared: float  # ∇Uᵀ H⁻¹ ∇U
    precision: Tensor | None


def polish(batch: FullBatch, theta: Tensor, *, dense: bool, most: int = STEPS) -> Polished:
    """At most `most` Gauss-Newton steps from θ (P,), by a matrix (P, P) or by conjugate gradients."""
    solve: Callable[[FullBatch, Tensor, Tensor], Direction] = _by_matrix if dense else _by_products
    value, gradient = batch.slope(theta)
    found = solve(batch, theta, gradient)
    for made in range(most + 1):
        decrement = (max(found.squared, 0.0) / batch.size) ** 0.5
        if decrement < CLOSE or made == most:
            break
        moved = _search(batch, theta, value, found)
        if moved is None:  # nothing lowers U any more: rounding, or a kink
            break
        theta = moved
        value, gradient = batch.slope(theta)
        found = solve(batch, theta, gradient)
    return Polished(theta, decrement, made, found.precision)


def _search(batch: FullBatch, theta: Tensor, value: float, found: Direction) -> Tensor | None:
    """θ + t d for the first t = 1, ½, ... at which U falls as it should; None if it never does."""
    length = 1.0
    for _ in range(HALVINGS):
        trial = theta + length * found.step
        if batch.potential(trial) <= value - SUFFICIENT * length * found.squared:
            return trial
        length /= 2
    return None


def precision_at(batch: FullBatch, theta: Tensor) -> Tensor:
    """(P, P): H = the Gauss-Newton matrix plus the prior's precision, in float64, positive definite."""
    block = batch.curvature(theta, "full").structures[0]
    assert isinstance(block, DenseCurvature)
    eye = torch.eye(batch.size, dtype=theta.dtype, device=theta.device)
    matrix = block.matrix.double() + batch.prior.precision_times(theta, eye).double()
    matrix = (matrix + matrix.mT) / 2
    matrix.diagonal().add_(JITTER**2 * matrix.diagonal().mean())
    if torch.linalg.cholesky_ex(matrix)[1]:
        matrix.diagonal().add_(JITTER * matrix.diagonal().mean())
    return matrix


def covariance_root(precision: Tensor, like: Tensor) -> Dense:
    """L with L Lᵀ = H⁻¹ from H (P, P), in the precision of `like`."""
    covariance = torch.cholesky_inverse(torch.linalg.cholesky(precision))
    return Dense(torch.linalg.cholesky((covariance + covariance.mT) / 2).to(like))


def _by_matrix(batch: FullBatch, theta: Tensor, gradient: Tensor) -> Direction:
    precision = precision_at(batch, theta)
    factor = torch.linalg.cholesky(precision)
    step = torch.cholesky_solve(gradient.double().unsqueeze(1), factor).squeeze(1)
    return Direction(-step.to(theta), float(gradient.double() @ step), precision)


def _by_products(batch: FullBatch, theta: Tensor, gradient: Tensor) -> Direction:
    """By conjugate gradients with the diagonal as preconditioner; what they have found so far never overstates δ."""
    own, prior = batch.curvature(theta, "diag"), batch.prior
    diagonal = prior.precision(theta)
    for place, block in zip(own.places, own.structures, strict=True):
        diagonal[place] += block.diagonal()
    diagonal += JITTER * diagonal.mean()
    products = batch.products(theta)

    def product(v: Tensor) -> Tensor:
        return products.ggn(v) + prior.precision_times(theta, v) + JITTER**2 * diagonal.mean() * v

    solved = conjugate_gradients(
        product, gradient, tolerance=SHORTEST, iterations=PRODUCTS, precondition=lambda v: v / diagonal
    )
    batch.epochs += 2 * solved.iterations
    return Direction(-solved.x, float(gradient.double() @ solved.x.double()), None)
