"""Covariances of a weight matrix that are diagonal in the basis of two Kronecker factors, as KFAC finds it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bayesformer.laws.block import Block


class Factors:
    """Eigenpairs of the two factors B (out) and A (in) of a Kronecker product."""

    out_values: Tensor  # (k,)
    in_values: Tensor  # (m,)
    out_vectors: Tensor | None  # (out, k); None for a diagonal factor
    in_vectors: Tensor | None  # (in, m)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), the shape of the weight matrix."""
        rows = len(self.out_values) if self.out_vectors is None else len(self.out_vectors)
        columns = len(self.in_values) if self.in_vectors is None else len(self.in_vectors)
        return rows, columns

    @property
    def size(self) -> int:
        """p = out · in, the number of weights of the matrix."""
        return self.shape[0] * self.shape[1]


class KroneckerBasis(Factors, Block):
    """A covariance of W (out, in), in row-major order, that is diagonal in the basis Q_B ⊗ Q_A."""

    precisions: Tensor  # D (k, m), along every pair of eigenvectors
    prior: Tensor  # (), the precision where there are no vectors

    @property
    def complete(self) -> bool:
        """Whether all eigenvectors are there, k = out and m = in; otherwise the rest has the prior's precision."""
        return self.shape == self.precisions.shape

    @cached_property
    def scales(self) -> Tensor:
        """D^-½ (k, m): the standard deviation along every pair of eigenvectors, computed once."""
        return self.precisions.rsqrt()

    @cached_property
    def out_squares(self) -> Tensor | None:
        """(out, k): the squares of the outputs' eigenvectors, computed once."""
        return None if self.out_vectors is None else self.out_vectors.square()

    def rotate(self, matrix: Tensor) -> Tensor:
        """Q_Bᵀ G Q_A: (..., out, in) -> (..., k, m)."""
        if self.out_vectors is not None:
            matrix = self.out_vectors.mT @ matrix
        return matrix if self.in_vectors is None else matrix @ self.in_vectors

    def rotate_back(self, matrix: Tensor) -> Tensor:
        """Q_B G Q_Aᵀ: (..., k, m) -> (..., out, in)."""
        if self.out_vectors is not None:
            matrix = self.out_vectors @ matrix
        return matrix if self.in_vectors is None else matrix @ self.in_vectors.mT

    def _function(self, rows: Tensor, power: float) -> Tensor:
        """Rows times the precision to a negative power."""
        matrix = rows.unflatten(-1, self.shape)
        factors = self.precisions**-power
        if self.complete:
            return self.rotate_back(self.rotate(matrix) * factors).flatten(-2)
        rest = self.prior**-power
        return (matrix * rest + self.rotate_back(self.rotate(matrix) * (factors - rest))).flatten(-2)

    def times(self, rows: Tensor) -> Tensor:
        """(..., p): each row times Σ, in the basis of the eigenvectors."""
        return self._function(rows, 1.0)

    def colour(self, noise: Tensor) -> Tensor:
        """(..., p): white noise times the symmetric root of Σ."""
        return self._function(noise, 0.5)

    def diagonal(self) -> Tensor:
        """Squared eigenvectors on both sides of 1 / D."""
        rest = self.prior.reciprocal()
        spread = self.precisions.reciprocal() - (0 if self.complete else rest)
        if self.out_vectors is not None:
            spread = self.out_vectors.square() @ spread
        if self.in_vectors is not None:
            spread = spread @ self.in_vectors.square().mT
        return (spread if self.complete else spread + rest).flatten()

    def log_det_precision(self) -> Tensor:
        """The sum of log D, and log d for every direction that has no eigenvector, ()."""
        known = self.precisions
        return known.log().sum() + (self.size - known.numel()) * self.prior.log()


@dataclass(frozen=True)
class Kronecker(KroneckerBasis):
    """Precision B ⊗ A + d I of a matrix W (out, in) in row-major order, by the eigenpairs of B and A.

        Σ vec(G) = Q_B ((Q_Bᵀ G Q_A) / D) Q_Aᵀ,   D = l_B l_Aᵀ + d

    Vectors may be fewer than the side is long (a factor of low rank: the missing eigenvalues are 0, so that
    G / d is left there), or None for the identity (a diagonal factor).
    """

    out_values: Tensor  # (k,)
    in_values: Tensor  # (m,)
    prior: Tensor  # (), d
    out_vectors: Tensor | None = None  # (out, k)
    in_vectors: Tensor | None = None  # (in, m)

    @property
    def precisions(self) -> Tensor:  # type: ignore[override]
        """D (k, m): the precision along every pair of eigenvectors."""
        return torch.outer(self.out_values, self.in_values) + self.prior

    def precision_times(self, rows: Tensor) -> Tensor:
        """Each row times B ⊗ A + d I, (..., p)."""
        matrix = rows.unflatten(-1, self.shape)
        known = torch.outer(self.out_values, self.in_values)
        return (self.prior * matrix + self.rotate_back(self.rotate(matrix) * known)).flatten(-2)


@dataclass(frozen=True)
class Eigenbasis(KroneckerBasis):
    """A variance of its own along every pair of eigenvectors of two Kronecker factors, Σ = Q diag(1 / D) Qᵀ.

    Q = Q_B ⊗ Q_A, whole bases (George et al. 2018): the form of variational inference that is diagonal there.
    """

    precisions: Tensor  # D (out, in)
    out_vectors: Tensor | None = None  # (out, out); None for the identity
    in_vectors: Tensor | None = None  # (in, in)

    @property
    def prior(self) -> Tensor:  # type: ignore[override]
        """(): there is nothing outside the vectors, so that any number serves."""
        return self.precisions.new_ones(())

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), the shape of the weight matrix."""
        rows, columns = self.precisions.shape
        return rows, columns

    def colour(self, noise: Tensor) -> Tensor:
        """(..., p): Q D^-½ ε, with ε in the basis."""
        return self.rotate_back(noise.unflatten(-1, self.shape) * self.precisions.rsqrt()).flatten(-2)

    def times_root(self, rows: Tensor) -> Tensor:
        """(..., p): D^-½ Qᵀ g for every row g."""
        return (self.rotate(rows.unflatten(-1, self.shape)) * self.precisions.rsqrt()).flatten(-2)

    def precision_times(self, rows: Tensor) -> Tensor:
        """Each row times Q D Qᵀ, (..., p)."""
        return self.rotate_back(self.rotate(rows.unflatten(-1, self.shape)) * self.precisions).flatten(-2)

    def stretched(self, variance: Tensor) -> Eigenbasis:
        """The variances along the pairs of eigenvectors times v (p,)."""
        return Eigenbasis(self.precisions / variance.view(self.shape), self.out_vectors, self.in_vectors)
