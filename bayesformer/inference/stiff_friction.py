"""Friction along stiff directions: an exact O step of Langevin dynamics whose friction is a low-rank matrix."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.core.vectors import PIECE


class StiffDirections(NamedTuple):
    """Orthonormal directions of large curvature; those of curvature 1 or below carry no friction of their own."""

    rows: Tensor  # (S, P), u_i
    curvature: Tensor  # (S,), λ_i


def no_directions(like: Tensor, count: int) -> StiffDirections:
    """`count` directions of curvature 0."""
    return StiffDirections(like.new_zeros(count, len(like)), like.new_zeros(count))


def stiff_directions(scores: Tensor) -> StiffDirections:
    """Eigenvectors and eigenvalues of Σ_j v_j v_jᵀ for scores v (S, P), by the Gram matrix (S, S).

    The Gram matrix is added up in float64: curvatures span six orders of magnitude.
    """
    gram = torch.zeros(len(scores), len(scores), dtype=torch.float64, device=scores.device)
    for piece in scores.split(max(1, PIECE // len(scores)), 1):
        wide = piece.double()
        gram.addmm_(wide, wide.mT)
    values, vectors = torch.linalg.eigh(gram)
    # Directions of curvature below 1 are not used: their rows need not have length 1.
    turned = (vectors / values.clamp_min(1).sqrt()).mT.to(scores.dtype)
    return StiffDirections(turned @ scores, values.clamp_min(0).to(scores.dtype))


def relax(momentum: Tensor, noise: Tensor, stiff: StiffDirections, friction: float, time: float) -> Tensor:
    """The O step p ← e^{-Γt} p + (1 - e^{-2Γt})^½ z in place; returns the u_iᵀp before and after it, (S, 2).

        Γ = γ I + Σ_i (γ_i - γ) u_i u_iᵀ,    γ_i = max(γ, 2 √λ_i) where λ_i > 1

    It leaves N(0, I) unchanged whatever Γ is, so Γ may depend on the position without a correction. With
    c = e^{-γt}, s = √(1 - c²) it is

        p ← c p + s z + Σ_i u_i [(c_i - c) u_iᵀp + (s_i - s) u_iᵀz].

    Args:
        momentum: (P,), p.
        noise: (P,), z ~ N(0, I).
        stiff: u_i and λ_i.
        friction: γ.
        time: t.
    """
    keep, add = math.exp(-friction * time), math.sqrt(-math.expm1(-2 * friction * time))
    damping = (2 * stiff.curvature.sqrt()).clamp_min(friction).mul_(time)  # (S,), γ_i t
    along = stiff.rows @ torch.stack([momentum, noise], 1)  # (S, 2)
    after = torch.exp(-damping) * along[:, 0] + torch.expm1(-2 * damping).neg_().sqrt_() * along[:, 1]
    changed = after - keep * along[:, 0] - add * along[:, 1]
    momentum.mul_(keep).add_(noise, alpha=add)
    momentum.addmv_(stiff.rows.mT, changed.masked_fill_(stiff.curvature <= 1, 0))
    along[:, 1] = after
    return along
