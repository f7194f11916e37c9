"""Linear maps R from standard noise φ to deviations of θ, in the forms in which a covariance R Rᵀ is cheap to apply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesformer.laws.block import Block
from bayesformer.laws.diagonal import Diagonal
from bayesformer.laws.kronecker import Eigenbasis, Kronecker


@dataclass(frozen=True)
class KroneckerRoot:
    """R = (Q_B ⊗ Q_A) diag(D^-½) for a precision (Q_B ⊗ Q_A) diag(D) (Q_B ⊗ Q_A)ᵀ of a matrix (out, in).

    Its axes are the pairs of eigenvectors, so that a law that is diagonal in φ is diagonal in the Kronecker basis.
    """

    block: Kronecker  # with all of its eigenvectors

    def __post_init__(self) -> None:
        if not self.block.complete:
            raise ValueError("a Kronecker root needs all eigenvectors of both factors; some are missing.")

    def colour(self, noise: Tensor) -> Tensor:
        """(..., p) -> (..., p): R φ for every row φ."""
        scaled = noise.unflatten(-1, self.block.shape) * self.block.precisions.rsqrt()
        return self.block.rotate_back(scaled).flatten(-2)

    def times_root(self, rows: Tensor) -> Tensor:
        """(..., p) -> (..., p): Rᵀ g for every row g."""
        turned = self.block.rotate(rows.unflatten(-1, self.block.shape))
        return (turned * self.block.precisions.rsqrt()).flatten(-2)

    @property
    def covariance(self) -> Eigenbasis:
        """R Rᵀ as a block with the same root."""
        return Eigenbasis(self.block.precisions, self.block.out_vectors, self.block.in_vectors)


@dataclass(frozen=True)
class StackedRoot:
    """Roots of separate weights side by side: block-diagonal, each at its places of θ and of φ."""

    places: tuple[slice | Tensor, ...]
    roots: tuple[Any, ...]  # each with `colour` and `times_root`

    def colour(self, noise: Tensor) -> Tensor:
        """(..., P) -> (..., P): every block's R φ at its places."""
        found = torch.zeros_like(noise)
        for place, root in zip(self.places, self.roots, strict=True):
            found[..., place] = root.colour(noise[..., place])
        return found

    def times_root(self, rows: Tensor) -> Tensor:
        """(..., P) -> (..., P): every block's Rᵀ g at its places."""
        found = torch.zeros_like(rows)
        for place, root in zip(self.places, self.roots, strict=True):
            found[..., place] = root.times_root(rows[..., place])
        return found

    @property
    def blocks(self) -> tuple[Block, ...]:
        """R Rᵀ block by block, each in a form that keeps it when its axes are stretched (`Block.stretched`).

        A Kronecker product with factors of low rank has no such form: there its variances are taken alone.
        """
        found = (root.covariance if isinstance(root, KroneckerRoot) else root for root in self.roots)
        return tuple(Diagonal(b.diagonal()) if isinstance(b, Kronecker) else b for b in found)
