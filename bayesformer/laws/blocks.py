"""Covariances of Gaussian posteriors over weights, in the forms they come in.

A block is the covariance Σ of some weights, seen as one vector of p numbers. Every block can multiply rows by Σ,
turn white noise into noise of covariance Σ, and give its diagonal; none ever forms Σ unless it is `Dense`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from bayesformer.core.types import Params


class Block(Protocol):
    """The covariance Σ of p weights."""

    @property
    def size(self) -> int:
        """p."""
        ...

    def times(self, rows: Tensor) -> Tensor:
        """(..., p) -> (..., p): each row times Σ."""
        ...

    def colour(self, noise: Tensor) -> Tensor:
        """(..., p) -> (..., p): white noise made noise of covariance Σ."""
        ...

    def diagonal(self) -> Tensor:
        """(p,): the variances."""
        ...


class Structure(Protocol):
    """The curvature H of p weights, which a prior turns into a covariance; the forms are in `curvature/`."""

    @property
    def size(self) -> int:
        """p."""
        ...

    def posterior(self, prior: Tensor, scale: float | Tensor = 1.0) -> Block:
        """The covariance (h H + diag(d))^-1; `prior` is () or (p,)."""
        ...

    def log_det(self, prior: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        """log det(h H + diag(d)), differentiable in d and h."""
        ...

    def diagonal(self) -> Tensor:
        """(p,): the diagonal of H."""
        ...

    def dense(self) -> Tensor:
        """(p, p): H itself, for tests and small p."""
        ...


@dataclass(frozen=True)
class Diagonal:
    """Σ = diag(variance)."""

    variance: Tensor  # (p,)

    @property
    def size(self) -> int:
        """p."""
        return len(self.variance)

    def times(self, rows: Tensor) -> Tensor:
        """Elementwise."""
        return rows * self.variance

    def colour(self, noise: Tensor) -> Tensor:
        """Elementwise."""
        return noise * self.variance.sqrt()

    def diagonal(self) -> Tensor:
        """The variances."""
        return self.variance


@dataclass(frozen=True)
class Dense:
    """Σ = L Lᵀ."""

    tril: Tensor  # (p, p), lower triangular

    @property
    def size(self) -> int:
        """p."""
        return len(self.tril)

    def times(self, rows: Tensor) -> Tensor:
        """Two triangular products."""
        return (rows @ self.tril) @ self.tril.mT

    def colour(self, noise: Tensor) -> Tensor:
        """Rows ε Lᵀ, whose covariance is L Lᵀ."""
        return noise @ self.tril.mT

    def diagonal(self) -> Tensor:
        """Squared lengths of the rows of L."""
        return self.tril.square().sum(1)


@dataclass(frozen=True)
class LowRank:
    """Precision D^½ (I + V diag(l) Vᵀ) D^½, with D = diag(prior) and orthonormal columns V.

    Σ = D^-½ (I - V diag(l / (1 + l)) Vᵀ) D^-½
    """

    prior: Tensor  # (p,), precisions
    vectors: Tensor  # (p, k)
    values: Tensor  # (k,)

    @classmethod
    def of(cls, prior: Tensor, vectors: Tensor, values: Tensor) -> LowRank:
        """From the precision diag(prior) + U diag(values) Uᵀ, U of any columns."""
        scaled = vectors * values.clamp_min(0).sqrt() / prior.sqrt().unsqueeze(-1)
        left, singular, _ = torch.linalg.svd(scaled, full_matrices=False)
        return cls(prior, left, singular.square())

    @property
    def size(self) -> int:
        """p."""
        return len(self.prior)

    def times(self, rows: Tensor) -> Tensor:
        """Through the k columns."""
        white = rows * self.prior.rsqrt()
        inner = (white @ self.vectors) * (self.values / (1 + self.values))
        return (white - inner @ self.vectors.mT) * self.prior.rsqrt()

    def colour(self, noise: Tensor) -> Tensor:
        """The symmetric root."""
        inner = (noise @ self.vectors) * ((1 + self.values).rsqrt() - 1)
        return (noise + inner @ self.vectors.mT) * self.prior.rsqrt()

    def diagonal(self) -> Tensor:
        """Prior variance less what the data say."""
        return (1 - self.vectors.square() @ (self.values / (1 + self.values))) / self.prior


class Factors:
    """Eigenpairs of the two factors B (out) and A (in) of a Kronecker product."""

    out_values: Tensor  # (k,)
    in_values: Tensor  # (m,)
    out_vectors: Tensor | None  # (out, k); None for a diagonal factor
    in_vectors: Tensor | None  # (in, m)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows = len(self.out_values) if self.out_vectors is None else len(self.out_vectors)
        columns = len(self.in_values) if self.in_vectors is None else len(self.in_vectors)
        return rows, columns

    @property
    def size(self) -> int:
        """p = out · in."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Kronecker(Factors):
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
    def complete(self) -> bool:
        """Whether the eigenvectors span everything."""
        return self.shape == (len(self.out_values), len(self.in_values))

    @property
    def precisions(self) -> Tensor:
        """D (k, m)."""
        return torch.outer(self.out_values, self.in_values) + self.prior

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
        """Σ by the eigenpairs."""
        return self._function(rows, 1.0)

    def colour(self, noise: Tensor) -> Tensor:
        """The symmetric root of Σ."""
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


KINDS: dict[str, type[Any]] = {"diagonal": Diagonal, "dense": Dense, "low_rank": LowRank, "kronecker": Kronecker}


def to_tensors(block: Block) -> tuple[str, Params]:
    """The kind of a block and its parts, to save."""
    kind = next(name for name, known in KINDS.items() if type(block) is known)
    parts = {f.name: getattr(block, f.name) for f in fields(block)}  # type: ignore[arg-type]
    return kind, {name: part for name, part in parts.items() if part is not None}


def from_tensors(kind: str, parts: Mapping[str, Tensor]) -> Block:
    """The block that was saved."""
    return KINDS[kind](**parts)
