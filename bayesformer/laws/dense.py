"""A covariance in full, by its Cholesky factor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bayesformer.laws.block import Block

STRIP = 128  # columns of the factor multiplied at once: fewer multiply fewer zeros, but do it more slowly


@dataclass(frozen=True)
class Dense(Block):
    """A dense covariance Σ = L Lᵀ by its Cholesky factor L (p, p)."""

    tril: Tensor  # (p, p), lower triangular

    @classmethod
    def of_root(cls, root: Tensor) -> Dense:
        """Σ = R Rᵀ from any root R (p, q), q at least p: the triangle of its QR decomposition, without forming Σ."""
        upper = torch.linalg.qr(root.mT, mode="r").R
        return cls((upper * torch.where(upper.diagonal() < 0, -1.0, 1.0).unsqueeze(-1)).mT.contiguous())

    @property
    def size(self) -> int:
        """p, the number of weights whose covariance this is."""
        return len(self.tril)

    @cached_property
    def axes(self) -> Tensor:
        """(p, p): the root of Σ whose columns are its eigenvectors, the longest first; computed once."""
        values, vectors = torch.linalg.eigh(self.tril @ self.tril.mT)
        signs = torch.where(vectors.sum(0) < 0, -1.0, 1.0)  # of the two eigenvectors the same one everywhere
        return (vectors * (signs * values.clamp_min(0).sqrt())).flip(1)

    def times(self, rows: Tensor) -> Tensor:
        """(..., p): each row times L, then times Lᵀ."""
        return (rows @ self.tril) @ self.tril.mT

    def colour(self, noise: Tensor) -> Tensor:
        """Rows ε Lᵀ, whose covariance is L Lᵀ."""
        return noise @ self.tril.mT

    def diagonal(self) -> Tensor:
        """Squared lengths of the rows of L."""
        return self.tril.square().sum(1)

    def times_root(self, rows: Tensor) -> Tensor:
        """Rows times L, a strip of columns at a time: each strip begins where its zeros above the diagonal end."""
        flat, size = rows.reshape(-1, self.size), self.size
        strips = [flat[:, i:] @ self.tril[i:, i : i + STRIP] for i in range(0, size, STRIP)]
        return (strips[0] if len(strips) == 1 else torch.cat(strips, -1)).view(*rows.shape[:-1], size)

    def precision_times(self, rows: Tensor) -> Tensor:
        """Each row times (L Lᵀ)⁻¹ by two triangular solves, (..., p)."""
        flat = rows.reshape(-1, self.size)
        return torch.cholesky_solve(flat.mT, self.tril).mT.reshape(rows.shape)

    def log_det_precision(self) -> Tensor:
        """Minus twice the sum of the log diagonal of L, ()."""
        return -2 * self.tril.diagonal().log().sum()

    def stretched(self, variance: Tensor) -> Dense:
        """L diag(v) Lᵀ, by scaled columns of L."""
        return Dense(self.tril * variance.sqrt())

    def scaled(self, scale: Tensor) -> Dense:
        """diag(s) Σ diag(s), by scaled rows of L."""
        return Dense(scale.unsqueeze(-1) * self.tril)
