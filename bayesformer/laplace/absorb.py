"""A posterior as the next prior: N(m, P⁻¹) after some data is the prior for what comes after.

    P_new = P_old + h H_new,   the next mode maximises  log p(D_new | θ) - ½ (θ - m)ᵀ P_old (θ - m)

For a linear network with Gaussian noise this is Bayes' rule in two steps. The sum of an old block (rows) and a new
curvature (columns) has the form

                 diagonal     dense    low rank    Kronecker
    diagonal     diagonal     dense    low rank    Kronecker, if all variances are equal
    dense        dense        dense    dense       dense
    low rank     low rank     -        low rank    -
    deviations   deviations   -        -           -
    Kronecker    -            -        -           Kronecker, merged

and is exact but for the last: Kronecker blocks keep one pair of factors, the sums B add up, the averages A are
averaged by the numbers of data. What has no form is refused.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from bayesformer.laplace.structures import CurvatureBlock, DiagonalCurvature, KroneckerCurvature, LowRankCurvature
from bayesformer.laws import Block, Dense, Deviations, Diagonal, Kronecker, LowRank


def absorb(
    block: Block, structure: CurvatureBlock, scale: float | Tensor = 1.0, *, num_old: int, num_new: int
) -> Block:
    """(P_old + h H_new)⁻¹ for an old block and new curvature of the same weights; numbers of data weigh averages."""
    if block.size != structure.size:
        raise ValueError(f"structure must have the {block.size} weights of the old block; got {structure.size}.")
    found = _absorbed(block, structure, scale, num_old, num_new)
    if found is None:
        name = type(structure).__name__.removesuffix("Curvature")
        raise ValueError(
            f"structure must have a form that can be added to the old block, {type(block).__name__}; got {name}."
        )
    return found


def _absorbed(
    block: Block, structure: CurvatureBlock, scale: float | Tensor, num_old: int, num_new: int
) -> Block | None:
    if isinstance(block, Diagonal):
        return _onto_diagonal(block, structure, scale)
    if isinstance(block, Dense):
        return dense_of(block.precision_times(_eye(block)), structure, scale)
    if isinstance(block, LowRank):
        return _onto_low_rank(block, structure, scale)
    if isinstance(block, Deviations) and isinstance(structure, DiagonalCurvature):
        return _onto_deviations(block, scale * structure.values)
    if isinstance(block, Kronecker) and isinstance(structure, KroneckerCurvature):
        return _add_factors(block, structure.posterior(block.prior, scale), num_old, num_new)
    return None


def _onto_diagonal(block: Diagonal, structure: CurvatureBlock, scale: float | Tensor) -> Block | None:
    precision = block.variance.reciprocal()
    if isinstance(structure, KroneckerCurvature):
        if not torch.allclose(precision, precision[:1], rtol=1e-6, atol=0.0):
            return None
        precision = precision[0].clone()
    return structure.posterior(precision, scale)


def _onto_low_rank(block: LowRank, structure: CurvatureBlock, scale: float | Tensor) -> Block | None:
    if isinstance(structure, LowRankCurvature):
        return _add_columns(block, structure.posterior(block.prior, scale))
    if isinstance(structure, DiagonalCurvature):
        columns = block.vectors * block.prior.sqrt().unsqueeze(-1)
        return LowRank.of(block.prior + scale * structure.values, columns, block.values)
    return None


def dense_of(precision: Tensor, structure: CurvatureBlock, scale: float | Tensor) -> Dense:
    """The block of the inverse of a precision (p, p) plus h times a curvature, in float64 on the way."""
    total = precision.double() + scale * structure.dense().double()
    covariance = torch.cholesky_inverse(torch.linalg.cholesky((total + total.mT) / 2))
    return Dense(torch.linalg.cholesky((covariance + covariance.mT) / 2).to(precision.dtype))


def _eye(block: Dense) -> Tensor:
    return torch.eye(block.size, dtype=block.tril.dtype, device=block.tril.device)


def _add_columns(old: LowRank, new: LowRank) -> LowRank:
    """D^½ (I + V₁ l₁ V₁ᵀ + V₂ l₂ V₂ᵀ) D^½ with orthonormal columns again: exact, of the sum of the ranks."""
    columns = torch.cat([old.vectors * old.values.sqrt(), new.vectors * new.values.sqrt()], 1)
    left, singular, _ = torch.linalg.svd(columns, full_matrices=False)
    return LowRank(old.prior, left, singular.square())


def _onto_deviations(old: Deviations, values: Tensor) -> Deviations:
    """(Σ⁻¹ + diag(h))⁻¹ for Σ = diag(s) + Fᵀ F, again of this form.

    With S = 1 / (1 / s + h) and G = F diag(S / s):  diag(S) + Gᵀ (I + F diag(h / (1 + s h)) Fᵀ)⁻¹ G.
    """
    variance = old.sd.square()
    shrink = (1 + variance * values).reciprocal()  # S / s
    factor = old.factor.double()
    inner = (factor * (values * shrink).double()) @ factor.mT
    inner = inner + torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
    root = torch.linalg.cholesky(inner)
    rows = torch.linalg.solve_triangular(root, factor * shrink.double(), upper=False)
    return Deviations((variance * shrink).sqrt(), rows.to(old.factor))


def _add_factors(old: Kronecker, new: Kronecker, num_old: int, num_new: int) -> Kronecker:
    share = num_old / (num_old + num_new)
    out_values, out_vectors = _mixed((old.out_values, old.out_vectors, 1.0), (new.out_values, new.out_vectors, 1.0))
    in_values, in_vectors = _mixed((old.in_values, old.in_vectors, share), (new.in_values, new.in_vectors, 1 - share))
    return Kronecker(out_values, in_values, old.prior, out_vectors, in_vectors)


Eigenpairs: TypeAlias = tuple[Tensor, Tensor | None, float]  # values, vectors (None: a diagonal matrix), weight


def _mixed(first: Eigenpairs, second: Eigenpairs) -> tuple[Tensor, Tensor | None]:
    """Eigenpairs of a weighted sum of two positive matrices, which may be of low rank or diagonal."""
    if first[1] is None and second[1] is None:
        return first[2] * first[0] + second[2] * second[0], None
    if first[1] is None or second[1] is None:
        raise ValueError("the factors of two Kronecker blocks must both be diagonal, or neither.")
    columns = torch.cat([v * (w * values).sqrt() for values, v, w in (first, second) if v is not None], 1).double()
    left, singular, _ = torch.linalg.svd(columns, full_matrices=False)
    return singular.square().to(first[0]), left.to(first[0])
