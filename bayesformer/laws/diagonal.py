"""A covariance that is diagonal: one variance per weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bayesformer.laws.block import Block


@dataclass(frozen=True)
class Diagonal(Block):
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

    def precision_times(self, rows: Tensor) -> Tensor:
        """Each row divided by the variances, (..., p)."""
        return rows / self.variance

    def log_det_precision(self) -> Tensor:
        """Minus the sum of the log variances, ()."""
        return -self.variance.log().sum()

    def scaled(self, scale: Tensor) -> Diagonal:
        """diag(s²) Σ, diagonal again."""
        return Diagonal(self.variance * scale.square())
