"""Curvature of the log-likelihood in the forms that a Laplace posterior can use.

A structure holds H, the sum over the data of a generalised Gauss-Newton or Fisher matrix for some weights, in one
form. With a prior precision d and a factor h on the data (an inverse temperature), the posterior's precision is
P = h H + diag(d): `posterior` gives its inverse as a block, `log_det` its log-determinant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from bayesformer.laws import Block, Dense, Diagonal, Factors, Kronecker, LowRank


class CurvatureBlock(Protocol):
    """The curvature H of p weights, which a prior turns into a covariance."""

    @property
    def size(self) -> int:
        """p, the number of weights that the curvature is of."""
        ...

    def posterior(self, prior: Tensor, scale: float | Tensor = 1.0) -> Block:
        """The covariance (h H + diag(d))^-1; `prior` is () or (p,)."""
        ...

    def log_det(self, prior: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        """log det(h H + diag(d)), differentiable in d and h."""
        ...

    def diagonal(self) -> Tensor:
        """(p,): the diagonal of the curvature H."""
        ...

    def dense(self) -> Tensor:
        """(p, p): H itself, for tests and small p."""
        ...

    def scaled(self, factor: float) -> CurvatureBlock:
        """The same form of curvature, of factor · H."""
        ...


@dataclass(frozen=True)
class DiagonalCurvature:
    """The curvature H = diag(values): one number per weight."""

    values: Tensor  # (p,)

    @property
    def size(self) -> int:
        """p, the number of weights that the curvature is of."""
        return len(self.values)

    def posterior(self, prior: Tensor, scale: float | Tensor = 1.0) -> Diagonal:
        """The diagonal covariance 1 / (h H + d), (p,)."""
        return Diagonal((scale * self.values + prior).reciprocal())

    def log_det(self, prior: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        """The sum over weights of log(h H + d), ()."""
        return (scale * self.values + prior).log().sum()

    def diagonal(self) -> Tensor:
        """(p,): the values, which are the diagonal."""
        return self.values

    def dense(self) -> Tensor:
        """(p, p): the values on the diagonal of a matrix of zeros."""
        return self.values.diag()

    def scaled(self, factor: float) -> DiagonalCurvature:
        """One number per weight, each times the factor."""
        return DiagonalCurvature(factor * self.values)


@dataclass(frozen=True)
class DenseCurvature:
    """The curvature H as one matrix over all its weights."""

    matrix: Tensor  # (p, p)

    @property
    def size(self) -> int:
        """p, the number of weights that the curvature is of."""
        return len(self.matrix)

    def _factor(self, prior: Tensor, scale: float | Tensor) -> Tensor:
        """The Cholesky factor of the precision, in float64."""
        own, matrix = prior.double().expand(self.size).diag(), self.matrix.double()
        factor, failed = torch.linalg.cholesky_ex(scale * matrix + own)
        if failed:  # sums in single precision leave eigenvalues a little below 0, which a large scale makes large
            values, vectors = torch.linalg.eigh(matrix)
            factor = torch.linalg.cholesky(scale * (vectors * values.clamp_min(0)) @ vectors.mT + own)
        return factor

    def posterior(self, prior: Tensor, scale: float | Tensor = 1.0) -> Dense:
        """The Cholesky factor of the inverse, in float64 on the way."""
        covariance = torch.cholesky_inverse(self._factor(prior, scale))
        return Dense(torch.linalg.cholesky((covariance + covariance.mT) / 2).to(self.matrix.dtype))

    def log_det(self, prior: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        """log det(h H + diag(d)) by a Cholesky factor in float64, ()."""
        return 2 * self._factor(prior, scale).diagonal().log().sum()

    def diagonal(self) -> Tensor:
        """(p,): the diagonal of the matrix, a view of it."""
        return self.matrix.diagonal()

    def dense(self) -> Tensor:
        """(p, p): the matrix itself, not copied."""
        return self.matrix

    def scaled(self, factor: float) -> DenseCurvature:
        """The whole matrix times the factor."""
        return DenseCurvature(factor * self.matrix)


@dataclass(frozen=True)
class LowRankCurvature:
    """H = U diag(values) Uᵀ with orthonormal columns U."""

    vectors: Tensor  # (p, k)
    values: Tensor  # (k,)

    @property
    def size(self) -> int:
        """p, the number of weights that the curvature is of."""
        return len(self.vectors)

    def posterior(self, prior: Tensor, scale: float | Tensor = 1.0) -> LowRank:
        """The covariance (h U diag(values) Uᵀ + diag(d))^-1 as a block of low rank."""
        return LowRank.of(prior.expand(self.size).clone(), self.vectors, scale * self.values)

    def log_det(self, prior: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        """Σ log d + log det(I + Wᵀ W), W = D^-½ U (h s)^½."""
        d = prior.expand(self.size)
        scaled = self.vectors * (scale * self.values).clamp_min(0).sqrt() / d.sqrt().unsqueeze(-1)
        inner = torch.eye(len(self.values), dtype=scaled.dtype, device=scaled.device) + scaled.mT @ scaled
        return d.log().sum() + torch.linalg.slogdet(inner)[1]

    def diagonal(self) -> Tensor:
        """(p,): the squared columns weighted by the eigenvalues."""
        return self.vectors.square() @ self.values

    def dense(self) -> Tensor:
        """(p, p): the product U diag(values) Uᵀ written out."""
        return (self.vectors * self.values) @ self.vectors.mT

    def scaled(self, factor: float) -> LowRankCurvature:
        """The same vectors, with their eigenvalues times the factor."""
        return LowRankCurvature(self.vectors, factor * self.values)


@dataclass(frozen=True)
class KroneckerCurvature(Factors):
    """H = B ⊗ A for a matrix W (out, in) in row-major order, by eigenpairs of B (a sum) and A (an average).

    Vectors may be fewer than the side is long (a factor of low rank), or None for a diagonal factor.
    """

    out_values: Tensor  # (k,)
    in_values: Tensor  # (m,)
    out_vectors: Tensor | None = None  # (out, k)
    in_vectors: Tensor | None = None  # (in, m)

    @classmethod
    def of(cls, out_factor: Tensor, in_factor: Tensor) -> KroneckerCurvature:
        """From B (out, out), or its diagonal (out,), and A (in, in), or its diagonal (in,)."""
        out_values, out_vectors = _eigenpairs(out_factor)
        in_values, in_vectors = _eigenpairs(in_factor)
        return cls(out_values, in_values, out_vectors, in_vectors)

    def posterior(self, prior: Tensor, scale: float | Tensor = 1.0) -> Kronecker:
        """The same eigenvectors; only a scalar prior keeps the form."""
        self._check_scalar(prior)
        return Kronecker(scale * self.out_values, self.in_values, prior.reshape(()), self.out_vectors, self.in_vectors)

    def log_det(self, prior: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        """Σ log(h l_B l_Aᵀ + d), with log d where the vectors do not reach."""
        self._check_scalar(prior)
        known = torch.outer(self.out_values, self.in_values)
        rest = self.size - known.numel()
        return (scale * known + prior).log().sum() + rest * prior.reshape(()).log()

    def diagonal(self) -> Tensor:
        """(p,): the outer product of diag(B) and diag(A), flat in row-major order."""
        out = self.out_values if self.out_vectors is None else self.out_vectors.square() @ self.out_values
        into = self.in_values if self.in_vectors is None else self.in_vectors.square() @ self.in_values
        return torch.outer(out, into).flatten()

    def dense(self) -> Tensor:
        """(p, p): the Kronecker product B ⊗ A written out."""
        return torch.kron(_matrix(self.out_values, self.out_vectors), _matrix(self.in_values, self.in_vectors))

    def scaled(self, factor: float) -> KroneckerCurvature:
        """The same factors, with B, which is a sum over the data, times the factor."""
        return replace(self, out_values=factor * self.out_values)

    @staticmethod
    def _check_scalar(prior: Tensor) -> None:
        if prior.numel() != 1:
            raise ValueError(
                f"prior precision of a Kronecker block must be one number per parameter; got {prior.numel()}. "
                "Use structure='diag' or 'full' for one per weight."
            )


def _eigenpairs(factor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Of a symmetric matrix in float64, cut off at 0; a vector is a diagonal matrix."""
    if factor.dim() == 1:
        return factor.clamp_min(0), None
    values, vectors = torch.linalg.eigh(factor.double())
    return values.clamp_min(0).to(factor.dtype), vectors.to(factor.dtype)


def _matrix(values: Tensor, vectors: Tensor | None) -> Tensor:
    return values.diag() if vectors is None else (vectors * values) @ vectors.mT
