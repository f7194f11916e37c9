"""The covariance of some weights, in the form it comes in.

A block is the covariance Σ of p weights, seen as one vector. Every block can multiply rows by Σ and by Σ⁻¹, turn white
noise into noise of covariance Σ, draw, and give its diagonal; none ever forms Σ unless it is `Dense`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Block(ABC):
    """The covariance Σ of p weights."""

    @property
    @abstractmethod
    def size(self) -> int:
        """p, the number of weights whose covariance this is."""

    @abstractmethod
    def times(self, rows: Tensor) -> Tensor:
        """(..., p) -> (..., p): each row times Σ."""

    @abstractmethod
    def colour(self, noise: Tensor) -> Tensor:
        """(..., p) -> (..., p): white noise made noise of covariance Σ, ε Lᵀ for a root L with Σ = L Lᵀ."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """(p,): the variance of every weight."""

    @abstractmethod
    def precision_times(self, rows: Tensor) -> Tensor:
        """(..., p) -> (..., p): each row times Σ⁻¹, differentiable in the rows."""

    @abstractmethod
    def log_det_precision(self) -> Tensor:
        """(): log det Σ⁻¹, the log determinant of the precision."""

    def times_root(self, rows: Tensor) -> Tensor:
        """(..., p) -> (..., q): rows times L where Σ = L Lᵀ; as `colour` wherever the root is symmetric."""
        return self.colour(rows)

    def stretched(self, variance: Tensor) -> Block:
        """The covariance L diag(v) Lᵀ of L φ for the root L of `colour` and independent φ of variances v (p,)."""
        from bayesformer.laws.dense import Dense

        eye = torch.eye(self.size, dtype=variance.dtype, device=variance.device)
        return Dense.of_root(self.times_root(eye) * variance.sqrt())

    def scaled(self, scale: Tensor) -> Block:
        """The covariance of s · w for w of this one, s (p,) positive: diag(s) Σ diag(s)."""
        from bayesformer.laws.dense import Dense

        eye = torch.eye(self.size, dtype=scale.dtype, device=scale.device)
        return Dense.of_root(scale.unsqueeze(-1) * self.times_root(eye))

    def draw(self, like: Tensor, source: torch.Generator) -> Tensor:
        """(p,): one draw of N(0, Σ), with the dtype and device of `like`."""
        noise = torch.empty(self.size, dtype=like.dtype, device=like.device)
        return self.colour(noise.normal_(generator=source))
