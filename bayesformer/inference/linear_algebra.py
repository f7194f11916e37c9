"""Linear algebra by products alone: conjugate gradients and the largest eigenvalue, for matrices never written down.

A matrix is a function from a vector (P,) to its product (P,), such as `CurvatureProducts.ggn` plus a prior's precision:

    solution = conjugate_gradients(lambda v: products.ggn(v) + precision * v, gradient)
    stiffest = power_iteration(products.ggn, theta)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from bayesformer.core.seeds import generator

Product: TypeAlias = Callable[[Tensor], Tensor]
"""v (P,) -> A v (P,) for a symmetric matrix A."""


class LinearSolution(NamedTuple):
    """What conjugate gradients found for A x = b."""

    x: Tensor  # (P,)
    residual: float  # |b - A x| / |b|, as carried along
    iterations: int  # products made, beyond one for a start other than 0
    converged: bool  # whether the residual is below the tolerance
    positive: bool  # False if a direction of curvature 0 or below was met, where the solution stops


class EigenPair(NamedTuple):
    """The largest eigenvalue of a positive semidefinite matrix and its direction."""

    value: float  # vᵀ A v, never above the true one
    vector: Tensor  # (P,), of length 1
    iterations: int  # products made
    converged: bool  # whether |A v - value v| is below tolerance · value


def conjugate_gradients(
    product: Product,
    b: Tensor,
    *,
    start: Tensor | None = None,
    tolerance: float = 1e-5,
    iterations: int | None = None,
    precondition: Product | None = None,
) -> LinearSolution:
    """Solve A x = b for positive definite A (Hestenes & Stiefel 1952).

    Exact after P products without rounding; the error falls by (√κ - 1)/(√κ + 1) per product, κ the condition number
    of A, or of M A with a preconditioner M. It ends early, with `positive=False`, at a direction d with dᵀ A d ≤ 0:
    then A is not positive definite and x is the solution so far, as in truncated Newton methods.

    Args:
        product: v -> A v.
        b: (P,).
        start: (P,), where to begin; 0 by default.
        tolerance: on |b - A x| / |b|.
        iterations: products at most; P by default.
        precondition: v -> M v, M positive definite and near the inverse of A.
    """
    if tolerance < 0 or (iterations is not None and iterations < 0):
        raise ValueError(f"tolerance and iterations must be at least 0; got {tolerance} and {iterations}.")
    x = torch.zeros_like(b) if start is None else start.clone()
    r = b.clone() if start is None else b - product(x)
    z = r if precondition is None else precondition(r)
    d, rz, scale = z.clone(), float(r @ z), float(b.norm()) or 1.0
    done, positive = 0, True
    most = len(b) if iterations is None else iterations
    while float(r.norm()) > tolerance * scale and done < most:
        forward = product(d)
        curvature = float(d @ forward)
        done += 1
        if curvature <= 0:
            positive = False
            break
        length = rz / curvature
        x += length * d
        r = r - length * forward
        z = r if precondition is None else precondition(r)
        rz, before = float(r @ z), rz
        d = z + (rz / before) * d
    residual = float(r.norm()) / scale
    return LinearSolution(x, residual, done, residual <= tolerance, positive)


def power_iteration(
    product: Product,
    like: Tensor,
    *,
    iterations: int = 50,
    tolerance: float = 1e-2,
    start: Tensor | None = None,
    seed: int = 0,
) -> EigenPair:
    """The largest eigenvalue of a positive semidefinite A: v ← A v / |A v|.

    The error of the value falls by (λ₂/λ₁)² per product. A warm `start`, the vector found at weights nearby, needs few.

    Args:
        product: v -> A v.
        like: (P,), gives dtype and device.
        iterations: products at most.
        tolerance: on |A v - λ v| / λ, an upper bound of the relative distance to an eigenvalue.
        start: (P,), any length; a random direction by default.
        seed: of that direction.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1; got {iterations}.")
    if start is not None and not float(start.norm()) > 0:
        raise ValueError("start must be a direction, a vector with a length; got zeros or NaN.")
    v = _random_direction(like, seed) if start is None else start / start.norm()
    for done in range(1, iterations + 1):
        forward = product(v)
        value = float(v @ forward)
        converged = float((forward - value * v).norm()) <= tolerance * abs(value)
        length = forward.norm()
        if converged or float(length) == 0 or done == iterations:
            break
        v = forward / length
    return EigenPair(value, v, done, converged)


def _random_direction(like: Tensor, seed: int) -> Tensor:
    source = generator(seed, "power iteration")
    drawn = torch.randn(len(like), generator=source, dtype=torch.float64, device="cpu").to(like)
    return drawn / drawn.norm()
