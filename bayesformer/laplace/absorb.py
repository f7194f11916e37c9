"""A posterior as the next prior: N(m, P⁻¹) after some data is the prior for what comes after.

    P_new = P_old + h H_new,   the next mode maximises  log p(D_new | θ) - ½ (θ - m)ᵀ P_old (θ - m)

For a linear network with Gaussian noise this is Bayes' rule in two steps, exact for dense blocks. Kronecker blocks
keep one pair of factors: the sums B add up, the averages A are averaged by the numbers of data.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from bayesformer.laplace.structures import CurvatureBlock
from bayesformer.laws import Block, Dense, Diagonal, Kronecker, LowRank

B = TypeVar("B", bound=Block)


def absorb(
    block: Block, structure: CurvatureBlock, scale: float | Tensor = 1.0, *, num_old: int, num_new: int
) -> Block:
    """(P_old + h H_new)⁻¹ in the form of the old block; the numbers of data weigh averages."""
    if block.size != structure.size:
        raise ValueError(f"structure must have the {block.size} weights of the old block; got {structure.size}.")
    if isinstance(block, Diagonal):
        _like(block, structure.posterior(block.variance.new_ones(()), scale))
        return Diagonal((block.variance.reciprocal() + scale * structure.diagonal()).reciprocal())
    if isinstance(block, Dense):
        precision = torch.cholesky_inverse(block.tril.double()) + scale * structure.dense().double()
        covariance = torch.cholesky_inverse(torch.linalg.cholesky(precision))
        return Dense(torch.linalg.cholesky((covariance + covariance.mT) / 2).to(block.tril))
    if isinstance(block, LowRank):
        return _add_columns(block, _like(block, structure.posterior(block.prior, scale)))
    if isinstance(block, Kronecker):
        return _add_factors(block, _like(block, structure.posterior(block.prior, scale)), num_old, num_new)
    raise _unknown(block)


def _add_columns(old: LowRank, new: LowRank) -> LowRank:
    """D^½ (I + V₁ l₁ V₁ᵀ + V₂ l₂ V₂ᵀ) D^½ with orthonormal columns again: exact, of the sum of the ranks."""
    columns = torch.cat([old.vectors * old.values.sqrt(), new.vectors * new.values.sqrt()], 1)
    left, singular, _ = torch.linalg.svd(columns, full_matrices=False)
    return LowRank(old.prior, left, singular.square())


def _add_factors(old: Kronecker, new: Kronecker, num_old: int, num_new: int) -> Kronecker:
    share = num_old / (num_old + num_new)
    out_values, out_vectors = _mixed((old.out_values, old.out_vectors, 1.0), (new.out_values, new.out_vectors, 1.0))
    in_values, in_vectors = _mixed((old.in_values, old.in_vectors, share), (new.in_values, new.in_vectors, 1 - share))
    return Kronecker(out_values, in_values, old.prior, out_vectors, in_vectors)


Factor: TypeAlias = tuple[Tensor, Tensor | None, float]  # eigenvalues, eigenvectors (None: diagonal), weight


def _mixed(first: Factor, second: Factor) -> tuple[Tensor, Tensor | None]:
    """Eigenpairs of a weighted sum of two positive matrices, which may be of low rank or diagonal."""
    if first[1] is None and second[1] is None:
        return first[2] * first[0] + second[2] * second[0], None
    if first[1] is None or second[1] is None:
        raise ValueError("the factors of two Kronecker blocks must both be diagonal, or neither.")
    columns = torch.cat([v * (w * values).sqrt() for values, v, w in (first, second) if v is not None], 1).double()
    left, singular, _ = torch.linalg.svd(columns, full_matrices=False)
    return singular.square().to(first[0]), left.to(first[0])


def _like(block: B, new: Block) -> B:
    """The new block, if it has the form of the old one."""
    if type(new) is not type(block):
        raise ValueError(
            f"structure must have the form of the old block, {type(block).__name__}; got {type(new).__name__}."
        )
    return new


def _unknown(block: Block) -> ValueError:
    return ValueError(f"block must be Diagonal, Dense, LowRank or Kronecker; got {type(block).__name__}.")
