"""A diagonal precision plus one of low rank: a prior and the top eigenpairs of the curvature."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesformer.laws.block import Block


@dataclass(frozen=True)
class LowRank(Block):
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
        """p, the number of weights whose covariance this is."""
        return len(self.prior)

    def times(self, rows: Tensor) -> Tensor:
        """(..., p): each row times Σ, at the cost of k products of length p."""
        white = rows * self.prior.rsqrt()
        inner = (white @ self.vectors) * (self.values / (1 + self.values))
        return (white - inner @ self.vectors.mT) * self.prior.rsqrt()

    def colour(self, noise: Tensor) -> Tensor:
        """(..., p): white noise times a root of Σ, of covariance Σ."""
        inner = (noise @ self.vectors) * ((1 + self.values).rsqrt() - 1)
        return (noise + inner @ self.vectors.mT) * self.prior.rsqrt()

    def diagonal(self) -> Tensor:
        """(p,): the variances of the prior, 1 / D, less what the k eigenpairs take away from each."""
        return (1 - self.vectors.square() @ (self.values / (1 + self.values))) / self.prior

    def times_root(self, rows: Tensor) -> Tensor:
        """Rows times D^-½ (I + V (1 + l)^-½ Vᵀ - V Vᵀ), the transpose of what `colour` multiplies by."""
        white = rows * self.prior.rsqrt()
        return white + ((white @ self.vectors) * ((1 + self.values).rsqrt() - 1)) @ self.vectors.mT

    def precision_times(self, rows: Tensor) -> Tensor:
        """Each row times D^½ (I + V l Vᵀ) D^½, (..., p)."""
        white = rows * self.prior.sqrt()
        return (white + ((white @ self.vectors) * self.values) @ self.vectors.mT) * self.prior.sqrt()

    def log_det_precision(self) -> Tensor:
        """log det D plus the sum of log(1 + l), ()."""
        return self.prior.log().sum() + self.values.log1p().sum()

    def scaled(self, scale: Tensor) -> LowRank:
        """diag(s) Σ diag(s): only D changes, to D / s²."""
        return LowRank(self.prior / scale.square(), self.vectors, self.values)
