"""A diagonal covariance plus one spanned by a few deviations: the law of SWAG."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesformer.laws.block import Block


@dataclass(frozen=True)
class Deviations(Block):
    """Σ = diag(sd²) + Fᵀ F, from K deviations F. Maddox et al. (2019), eq. 1, with their factors ½ taken in."""

    sd: Tensor  # (p,)
    factor: Tensor  # (K, p)

    @property
    def size(self) -> int:
        """p, the number of weights whose covariance this is."""
        return len(self.sd)

    def times(self, rows: Tensor) -> Tensor:
        """Each row times both parts of Σ, (..., p)."""
        return rows * self.sd.square() + (rows @ self.factor.mT) @ self.factor

    def colour(self, noise: Tensor) -> Tensor:
        """(..., p + K) -> (..., p): noise for the diagonal, then noise for the deviations."""
        own, shared = noise.split([self.size, len(self.factor)], -1)
        return own * self.sd + shared @ self.factor

    def times_root(self, rows: Tensor) -> Tensor:
        """(..., p) -> (..., p + K): rows times [diag(sd), Fᵀ]."""
        return torch.cat([rows * self.sd, rows @ self.factor.mT], -1)

    def draw(self, like: Tensor, source: torch.Generator) -> Tensor:
        """(p,): one draw of N(0, Σ), with the dtype and device of `like`."""
        noise = torch.empty(self.size + len(self.factor), dtype=like.dtype, device=like.device)
        return self.colour(noise.normal_(generator=source))

    def diagonal(self) -> Tensor:
        """(p,): the variance of every weight."""
        return self.sd.square() + self.factor.square().sum(0)

    def precision_times(self, rows: Tensor) -> Tensor:
        """Each row times Σ⁻¹ by Woodbury's identity, (..., p); asks for sd > 0 everywhere."""
        white = rows / self.sd.square()
        inner = torch.cholesky_solve((white @ self.factor.mT).unsqueeze(-1), self._capacitance()).squeeze(-1)
        return white - (inner @ self.factor) / self.sd.square()

    def log_det_precision(self) -> Tensor:
        """Minus log det Σ by the matrix determinant lemma, ()."""
        return -2 * (self.sd.log().sum() + self._capacitance().diagonal().log().sum())

    def scaled(self, scale: Tensor) -> Deviations:
        """diag(s) Σ diag(s): both parts are scaled."""
        return Deviations(self.sd * scale, self.factor * scale)

    def _capacitance(self) -> Tensor:
        """(K, K): the Cholesky factor of I + F diag(sd⁻²) Fᵀ."""
        inner = (self.factor / self.sd.square()) @ self.factor.mT
        return torch.linalg.cholesky(inner + torch.eye(len(inner), dtype=inner.dtype, device=inner.device))
