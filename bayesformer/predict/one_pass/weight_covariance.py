"""How the entries of a weight matrix W (out, in) vary together, as a linear layer needs it.

For an input with second moment M = m mᵀ + S the noise of the weights adds to the covariance of the outputs

    S_h[k, l] = Σ_ij M_ij Cov(W_ki, W_lj)

Li et al. (2025), section 3. `variance` gives its diagonal, `covariance` all of it, for inputs m (..., in) whose
spread is None, variances (..., in) or covariances (..., in, in). A structure `with_bias` has one more input, the
constant 1: weights and bias of a layer are then correlated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.laws import Kronecker, KroneckerBasis


class WeightCovariance(Protocol):
    """Covariance of a weight matrix."""

    @property
    def with_bias(self) -> bool:
        """Whether the last column is the bias."""
        ...

    def variance(self, m: Tensor, v: Tensor | None) -> Tensor:
        """(..., out): what the weights' noise adds to the variance of every output."""
        ...

    def covariance(self, m: Tensor, v: Tensor | None) -> Tensor:
        """(..., out, out): what the weights' noise adds to the covariance of the outputs."""
        ...

    def rows(self, index: slice) -> WeightCovariance:
        """Of some rows of W: one projection of a packed weight."""
        ...

    def transposed(self) -> WeightCovariance:
        """The same weights seen as the transposed matrix Wᵀ (in, out)."""
        ...


def diagonal_of(v: Tensor | None, m: Tensor) -> Tensor | None:
    """Variances from either form of spread."""
    return v if v is None or v.dim() == m.dim() else v.diagonal(dim1=-2, dim2=-1)


@dataclass(frozen=True)
class Independent:
    """Every entry by itself: S_h = diag_k(Σ_i V_ki M_ii)."""

    variances: Tensor  # V, (out, in)
    with_bias: bool = False

    def variance(self, m: Tensor, v: Tensor | None) -> Tensor:
        """(..., out): V (m² + s), with the variances V of the entries."""
        s = diagonal_of(v, m)
        return F.linear(m * m if s is None else torch.addcmul(s, m, m), self.variances)

    def covariance(self, m: Tensor, v: Tensor | None) -> Tensor:
        """(..., out, out): the variances on a diagonal, since outputs have no weight in common."""
        return torch.diag_embed(self.variance(m, v))

    def rows(self, index: slice) -> Independent:
        """The variances of some rows of W."""
        return Independent(self.variances[index])

    def transposed(self) -> Independent:
        """The variances of Wᵀ, which are Vᵀ."""
        return Independent(self.variances.mT)


@dataclass(frozen=True)
class Factored:
    """Precision B ⊗ A + d I by eigenpairs: S_h = Q_B diag(r) Q_Bᵀ, r_a = Σ_j μ_j / D_aj, μ_j = (Q_Aᵀ M Q_A)_jj.

    Exact, and never larger than a layer's sides. Where d = 0, D = l_B l_Aᵀ and S_h = C_B ⟨C_A, M⟩.
    """

    spread: Tensor  # 1 / D, less 1 / d where the vectors do not span everything, (k, j)
    rest: Tensor  # (): 1 / d there, else 0
    out_vectors: Tensor | None  # (out, k)
    in_vectors: Tensor | None  # (in, j)
    with_bias: bool = False

    @classmethod
    def of(cls, block: KroneckerBasis, damping: str, with_bias: bool = False) -> Factored:
        """From a block; `damping="factored"` splits d between the factors, as the authors' code does."""
        if damping == "factored":
            if not isinstance(block, Kronecker):
                raise ValueError("kronecker='factored' needs a precision B ⊗ A + d I, to split d; got another one.")
            if not block.complete:
                raise ValueError("kronecker='factored' needs Kronecker factors of full rank; got one of low rank.")
            root = block.prior.sqrt()
            precisions = torch.outer(block.out_values + root, block.in_values + root)
        else:
            precisions = block.precisions
        rest = torch.zeros_like(block.prior) if block.complete else block.prior.reciprocal()
        return cls(precisions.reciprocal() - rest, rest, block.out_vectors, block.in_vectors, with_bias)

    def _rates(self, m: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
        """r (..., k), and the trace of M times what lies outside the vectors, (..., 1)."""
        q = self.in_vectors
        mu = m.square() if q is None else (m @ q).square()
        s = diagonal_of(v, m)
        if v is not None and s is not None:
            if q is None:
                mu = mu + s
            elif v.dim() == m.dim():
                mu = mu + s @ q.square()
            else:
                mu = mu + ((v @ q) * q).sum(-2)
        trace = m.square().sum(-1, keepdim=True)
        if s is not None:
            trace = trace + s.sum(-1, keepdim=True)
        return mu @ self.spread.mT, trace * self.rest

    def variance(self, m: Tensor, v: Tensor | None) -> Tensor:
        """Squared vectors times the rates."""
        rates, rest = self._rates(m, v)
        q = self.out_vectors
        return (rates if q is None else rates @ q.square().mT) + rest

    def covariance(self, m: Tensor, v: Tensor | None) -> Tensor:
        """(..., out, out): Q_B diag(r) Q_Bᵀ, and 1 / d times the trace outside the vectors."""
        rates, rest = self._rates(m, v)
        q = self.out_vectors
        if q is None:
            return torch.diag_embed(rates + rest)
        eye = torch.eye(len(q), dtype=m.dtype, device=m.device)
        return (q * rates.unsqueeze(-2)) @ q.mT + rest.unsqueeze(-1) * eye

    def rows(self, index: slice) -> Factored:
        """Rows of Q_B: the noise of the other rows is simply not looked at."""
        q = self.out_vectors
        if q is None:
            q = torch.eye(len(self.spread), dtype=self.spread.dtype, device=self.spread.device)
        return replace(self, out_vectors=q[index])

    def transposed(self) -> Factored:
        """The factors in each other's place."""
        return Factored(self.spread.mT, self.rest, self.in_vectors, self.out_vectors)


@dataclass(frozen=True)
class Complete:
    """Σ in full, viewed as Cov(W_ki, W_lj) = sigma[k, i, l, j]."""

    sigma: Tensor  # (out, in, out, in)
    with_bias: bool = False

    @cached_property
    def own(self) -> Tensor:
        """(out, in, in): the covariance of each row with itself."""
        return torch.stack([self.sigma[k, :, k] for k in range(len(self.sigma))])

    def variance(self, m: Tensor, v: Tensor | None) -> Tensor:
        """(..., out): Σ_ij M_ij sigma[k, i, k, j] for every output k."""
        return torch.einsum("...ij,kij->...k", _second_moment(m, v), self.own)

    def covariance(self, m: Tensor, v: Tensor | None) -> Tensor:
        """(..., out, out): Σ_ij M_ij sigma[k, i, l, j] for every pair of outputs."""
        return torch.einsum("...ij,kilj->...kl", _second_moment(m, v), self.sigma)

    def rows(self, index: slice) -> Complete:
        """The covariance of some rows of W: a sub-block of sigma."""
        return replace(self, sigma=self.sigma[index][:, :, index])

    def transposed(self) -> Complete:
        """The two indices of each weight swapped."""
        return Complete(self.sigma.permute(1, 0, 3, 2))


@dataclass(frozen=True)
class ScaledCovariance:
    """Another structure with all its covariances times c."""

    inner: WeightCovariance
    c: Tensor  # ()

    @property
    def with_bias(self) -> bool:
        """Whether the last column of the inner covariance is the bias."""
        return self.inner.with_bias

    def variance(self, m: Tensor, v: Tensor | None) -> Tensor:
        """(..., out): c times the inner variance."""
        return self.c * self.inner.variance(m, v)

    def covariance(self, m: Tensor, v: Tensor | None) -> Tensor:
        """(..., out, out): c times the inner covariance."""
        return self.c * self.inner.covariance(m, v)

    def rows(self, index: slice) -> ScaledCovariance:
        """Some rows of W, scaled by the same c."""
        return ScaledCovariance(self.inner.rows(index), self.c)

    def transposed(self) -> ScaledCovariance:
        """The transposed matrix, scaled by the same c."""
        return ScaledCovariance(self.inner.transposed(), self.c)


def _second_moment(m: Tensor, v: Tensor | None) -> Tensor:
    moment = m.unsqueeze(-1) * m.unsqueeze(-2)
    if v is None:
        return moment
    return moment + (torch.diag_embed(v) if v.dim() == m.dim() else v)


def with_one(m: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The input with a last entry that is always 1: the bias's own."""
    m_one = F.pad(m, (0, 1), value=1.0)
    if v is None:
        return m_one, None
    return m_one, F.pad(v, (0, 1)) if v.dim() == m.dim() else F.pad(v, (0, 1, 0, 1))
