"""The covariance of C outputs from that of K combinations of them, and a regression calibrated beforehand.

M_x (C, C) is the covariance of the outputs on one input, M its average over calibration inputs, M = L Lᵀ + diag(ρ).
K rows U (K, C) are chosen per input, and backward passes give G = U M_x Uᵀ exactly. The other outputs follow by
regression under M, and what it leaves is scaled by the size just seen:

    B = M Uᵀ (U M Uᵀ)⁻¹,   R = (I - B U) M (I - B U)ᵀ,   τ = tr[(U M Uᵀ)⁻¹ G] / K
    Cov f = B G Bᵀ + τ R

Exact for every output that is a row of U, and everywhere if K = C or M_x has no more than K dimensions of M. U has the
⌊K/2⌋ likeliest outputs of the input, and the leading eigenvectors of what these leave of M.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LEADING = 16  # dimensions of M in which eigenvectors are looked for
SINGULAR = 1e-6  # eigenvalues of U M Uᵀ below this share of the largest are taken as 0


class OutputCovariance(NamedTuple):
    """Covariances diag(diagonal) + factor factorᵀ over C outputs of B examples."""

    factor: Tensor  # (B, C, r)
    diagonal: Tensor  # (B, C)

    @property
    def variance(self) -> Tensor:
        """(B, C): the variances on the diagonal of the whole."""
        return self.diagonal + self.factor.norm(dim=-1).square()


class Regression(NamedTuple):
    """How all outputs follow K combinations of them under the average covariance."""

    rows: Tensor  # U, (K, C)
    slopes: Tensor  # B, (C, K)
    inverse: Tensor  # (U M Uᵀ)⁻¹ over its rank, (K, K): K, or less where M has fewer dimensions
    apart: Tensor  # (C,): the diagonal of (I - B U) diag(ρ) (I - B U)ᵀ


class LeadingOutputs:
    """The regressions for one calibration: one for every choice of likeliest outputs, made when it is first met."""

    def __init__(self, root: Tensor, rest: Tensor, rows: int) -> None:
        self.root, self.rest = root, rest  # L (C, r), ρ (C,)
        self.rows = min(rows, len(rest))
        self.likeliest = self.rows // 2
        self.known: dict[tuple[int, ...], Regression] = {}

    def regressions(self, mean: Tensor) -> Regression:
        """For outputs of the given mean (B, C): every tensor with an axis of examples in front."""
        top = mean.topk(self.likeliest, -1).indices.sort(-1).values  # (B, k)
        numbers: dict[tuple[int, ...], int] = {}
        keys = [tuple(name) for name in top.tolist()]
        inverse = torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], device=mean.device)
        found = []
        for key in numbers:
            if key not in self.known:
                self.known[key] = self._regression(torch.tensor(key, dtype=torch.int64, device=mean.device))
            found.append(self.known[key])
        return Regression(*(torch.stack(parts)[inverse] for parts in zip(*found, strict=True)))

    def covariance(self, chosen: Regression, seen: Tensor) -> OutputCovariance:
        """Cov f (B, C, C) as a factor and a diagonal, from the regressions of B examples and G (B, K, K)."""
        scale = (chosen.inverse * seen).sum((-2, -1)).clamp_min(0)  # τ, (B,)
        size = scale.sqrt()[:, None, None]
        # [B G^½, √τ (I - B U) L] is one product with B, to which √τ L is added: no other tensor is (B, C, K + r).
        inner = torch.cat([_symmetric_root(seen), -size * (chosen.rows @ self.root)], -1)
        factor = chosen.slopes @ inner
        factor[..., seen.shape[-1] :].addcmul_(self.root, size)
        return OutputCovariance(factor, chosen.apart * scale.unsqueeze(-1))

    def _regression(self, outputs: Tensor) -> Regression:
        """In float64: U M Uᵀ may be nearly singular, and its inverse is then that of what is not."""
        rows, root, rest = self._rows(outputs).double(), self.root.double(), self.rest.double()
        through = root @ (root.mT @ rows.mT) + rest.unsqueeze(-1) * rows.mT  # M Uᵀ, (C, K)
        inner = rows @ through
        inverse = torch.linalg.pinv(inner, rtol=SINGULAR, hermitian=True)
        slopes, rank = through @ inverse, (inverse * inner).sum().clamp_min(1)
        # (I - B U) diag(ρ) (I - B U)ᵀ has the diagonal ρ - 2 ρ ∘ (B U)_cc + Σ_e ρ_e (B U)_ce²
        own = (slopes * rows.mT).sum(-1)
        apart = rest * (1 - 2 * own) + (slopes * (slopes @ ((rows * rest) @ rows.mT))).sum(-1)
        return Regression(*(t.to(self.root) for t in (rows, slopes, inverse / rank, apart.clamp_min(0))))

    def _rows(self, outputs: Tensor) -> Tensor:
        """U (K, C): some outputs, and the leading eigenvectors of what they leave of M."""
        root = self.root[:, :LEADING]
        kept = torch.eye(root.shape[1], dtype=root.dtype, device=root.device)
        if len(outputs):
            basis = torch.linalg.svd(root[outputs], full_matrices=False)[2]  # orthonormal rows that span these outputs
            kept = kept - basis.mT @ basis
        left = root @ kept
        values, vectors = torch.linalg.eigh(left.mT @ left)
        count = min(self.rows - len(outputs), root.shape[1])
        found = left @ vectors[:, values.argsort(descending=True)[:count]]
        found = found / found.norm(dim=0).clamp_min(torch.finfo(root.dtype).tiny)
        return torch.cat([torch.nn.functional.one_hot(outputs, len(root)).to(root), found.mT])


def _symmetric_root(matrix: Tensor) -> Tensor:
    """A root of each matrix (B, K, K), which may be singular: Cholesky where that works, else by eigenvalues."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not bool(failed.any()):
        return factor
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
