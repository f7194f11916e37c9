"""A covariance that is diagonal: one variance per weight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from bayesformer.laws.block import Block


@dataclass(frozen=True)
class Diagonal(Block):
    """A diagonal covariance, Σ = diag(variance): independent weights."""

    variance: Tensor  # (p,)

    @property
    def size(self) -> int:
        """p, the number of weights whose covariance this is."""
        return len(self.variance)

    @cached_property
    def sd(self) -> Tensor:
        """(p,): the standard deviations, computed once."""
        return self.variance.sqrt()

    def times(self, rows: Tensor) -> Tensor:
        """(..., p): each row times the variances."""
        return rows * self.variance

    def colour(self, noise: Tensor) -> Tensor:
        """(..., p): white noise times the standard deviations."""
        return noise * self.sd

    def diagonal(self) -> Tensor:
        """(p,): the variances as they were given."""
        return self.variance

    def precision_times(self, rows: Tensor) -> Tensor:
        """Each row divided by the variances, (..., p)."""
        return rows / self.variance

    def log_det_precision(self) -> Tensor:
        """Minus the sum of the log variances, ()."""
        return -self.variance.log().sum()

    def stretched(self, variance: Tensor) -> Diagonal:
        """The variances times v, diagonal again."""
        return Diagonal(self.variance * variance)

    def scaled(self, scale: Tensor) -> Diagonal:
        """diag(s²) Σ, the covariance of s · w, which is diagonal again."""
        return Diagonal(self.variance * scale.square())
