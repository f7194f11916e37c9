"""The last way to a mode: Gauss-Newton steps on all data, and how far from the mode the weights then are.

    d = -H⁻¹ ∇U,    H = Σ_n J_nᵀ Λ_n J_n + Π,    θ ← θ + t d with t = 1, ½, ¼, ... until U falls

The Newton decrement δ = √(∇Uᵀ H⁻¹ ∇U / P) is the distance to the mode in posterior standard deviations, averaged over
the weights. For a linear model with Gaussian noise one step is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.inference.linear_algebra import conjugate_gradients
from bayesformer.train.full_batch import FullBatch
from bayesformer.train.metric import covariance_root, kronecker_root, precision_at

CLOSE = 0.05  # posterior standard deviations: nearer than this no further step is made
STEPS, HALVINGS = 5, 20  # Gauss-Newton steps and halvings of each, at most
MANY, WORK = 60, 2**36  # steps by a matrix, at most, and the multiplications that they may take together
FEW = 500  # weights up to which H is written down whatever the model is
DENSE = 2000  # and if its outputs are linear in them
SUFFICIENT = 1e-4  # share of the predicted decrease of U that a step must bring (Armijo)
PRODUCTS = 20  # of conjugate gradients for one step, at most: two epochs each
RESIDUAL = 0.03  # of conjugate gradients, over the gradient: the next step makes up for it


class Polished(NamedTuple):
    """Weights after the Gauss-Newton steps, and what is known there."""

    theta: Tensor  # (P,)
    decrement: float  # δ at θ; with the standard error of the mode over readings of random data
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
    return Polished(theta, math.hypot(decrement, _reading_error(batch, theta, found)), made, found.precision)


def _reading_error(batch: FullBatch, theta: Tensor, found: Direction) -> float:
    """How far the mode of the readings of random data is from that of ever more, in posterior standard deviations.

    A standard error, from how the gradients of the readings differ; 0 where data are not random.
    """
    count = batch.data.realisations
    if count == 1:
        return 0.0
    rows = batch.slopes(theta)
    root = kronecker_root(batch, theta) if found.precision is None else covariance_root(found.precision, theta)
    white = root.times_root(rows - rows.mean(0))
    return (float(white.double().square().sum()) / (count * (count - 1) * batch.size)) ** 0.5


def cheap_matrix(batch: FullBatch, linear: bool) -> bool:
    """Whether H is written down to find the mode: for few weights of a function that sampling sees as it is."""
    return batch.is_objective and batch.size <= (DENSE if linear else FEW)


def steps_allowed(batch: FullBatch, linear: bool) -> int:
    """Gauss-Newton steps that may be made: none where validation data have chosen the weights of a network.

    By products few steps are made. By a matrix as many as take about ten seconds, of which writing it down is the most:
    a small network needs tens of them, since its curvature changes on the way, and so do counts near 1000 with a
    rate exp(f), which end once they have arrived.
    """
    if not linear and batch.prototype.validation is not None:
        return 0
    if not cheap_matrix(batch, linear):
        return STEPS
    return min(MANY, max(STEPS, WORK // (batch.targets * batch.size**2)))


def _search(batch: FullBatch, theta: Tensor, value: float, found: Direction) -> Tensor | None:
    """θ + t d for the first t = 1, ½, ... at which U falls as it should; None if it never does."""
    length = 1.0
    for _ in range(HALVINGS):
        trial = theta + length * found.step
        if batch.potential(trial) <= value - SUFFICIENT * length * found.squared:
            return trial
        length /= 2
    return None


def _by_matrix(batch: FullBatch, theta: Tensor, gradient: Tensor) -> Direction:
    precision = precision_at(batch, theta)
    factor = torch.linalg.cholesky(precision)
    step = torch.cholesky_solve(gradient.double().unsqueeze(1), factor).squeeze(1)
    return Direction(-step.to(theta), float(gradient.double() @ step), precision)


def _by_products(batch: FullBatch, theta: Tensor, gradient: Tensor) -> Direction:
    """By conjugate gradients in the Kronecker metric, which never overstate the decrement however early they end."""
    root = kronecker_root(batch, theta)
    solved = conjugate_gradients(
        batch.hessian(theta),
        gradient,
        tolerance=RESIDUAL,
        iterations=PRODUCTS,
        precondition=lambda v: root.colour(root.times_root(v)),
    )
    return Direction(-solved.x, float(gradient.double() @ solved.x.double()), None)
