"""Dirichlet weights: a row of weights w_i ~ Dir(a_i m_i), m_i = softmax(logits_i), a_i > 0 its sharpness.

Cinquin, Immer, Horn & Fortuin (2021), Pathologies in priors and inference for Bayesian transformers.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from bayesformer.attention.edges import Edges, Visible
from bayesformer.attention.family import AttentionFamily, Drawn
from bayesformer.attention.ranges import check_above_zero
from bayesformer.attention.rows import Hidden, finite_exp, hidden_keys, hide, masked_log_softmax, row_softmax
from bayesformer.attention.special import LEAST, gamma_ratio, log_gamma_draw, log_surrogate_draw, with_derivatives
from bayesformer.attention.spread import Learned, LogitSpread
from bayesformer.core.errors import unknown_name

Gradient: TypeAlias = Literal["implicit", "surrogate"]
Divergence: TypeAlias = Literal["dirichlet", "gamma"]


class Dirichlet(AttentionFamily):
    """Dirichlet weights against Dir(a₀ m_i), centred on the same mean, or against a symmetric Dirichlet.

        w = X / Σ X,   X_j ~ Gamma(α_j),   α = a m

    in logarithms throughout: at the sharpness that Cinquin et al. (2021) start from, 10⁻³, X itself underflows, and a
    row of zeros, or of the smallest number, is uniform over all keys, hidden ones included: through such rows a causal
    model sees the future. a → ∞ is softmax attention.

    The KL is that of the Dirichlets; or, as in Cinquin et al. (2021), that of the Gammas before they are divided by
    their sum, which exceeds it by the KL of that sum, Gamma(a) against Gamma(a₀):

        Σ_j [log Γ(α⁰_j) - log Γ(α_j) + (α_j - α⁰_j) ψ(α_j)]

    Args:
        spread: gives a, per row; one learned number per head by default, see `bayesformer.attention.spread`.
        prior_sharpness: a₀; with `symmetric`, the one parameter of the Dirichlet.
        symmetric: whether the prior ignores the logits.
        gradient: "implicit", of exact draws, or "surrogate", an approximate inverse CDF, for α below 1.
        divergence: "dirichlet", of the weights, or "gamma", of the Gammas.
        dropout: of weights, after they are drawn.
    """

    def __init__(
        self,
        spread: LogitSpread | None = None,
        prior_sharpness: float = 10.0,
        symmetric: bool = False,
        gradient: Gradient = "implicit",
        divergence: Divergence = "dirichlet",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout)
        check_above_zero(prior_sharpness=prior_sharpness)
        if gradient not in {"implicit", "surrogate"}:
            raise unknown_name("gradient", gradient, ["implicit", "surrogate"])
        if divergence not in {"dirichlet", "gamma"}:
            raise unknown_name("divergence", divergence, ["dirichlet", "gamma"])
        self.spread = spread or Learned(start=prior_sharpness, per_row=True)
        if not self.spread.per_row:
            raise ValueError("spread must be per_row for Dirichlet attention; got one with a number per key.")
        self.prior_sharpness, self.symmetric = prior_sharpness, symmetric
        self.gradient, self.divergence = gradient, divergence

    def draw(self, logits: Tensor, mask: Visible, keys: Tensor | None) -> Drawn:  # noqa: ARG002
        """Gamma draws in logarithms, and their softmax."""
        hidden = hidden_keys(mask)
        a = self.spread(logits, mask)  # broadcasts to (B, H, T, 1), or to (B, H, 1, E) on a graph
        log_alpha = (masked_log_softmax(logits, hidden) + a.log()).clamp_min(LEAST)  # (B, H, T, S)
        weights = row_softmax(self._log_x(log_alpha), hidden)
        if not self.counts:
            return weights, None
        if self.symmetric:
            entries = hide(_symmetric_kl(log_alpha, self.prior_sharpness), hidden).sum((-3, -2, -1))
        else:
            entries = _centred_kl(log_alpha, self.prior_sharpness / a, hidden)
        return weights, entries + self._kl_of_rows(a, mask, logits)

    def _log_x(self, log_alpha: Tensor) -> Tensor:
        """(B, H, T, S): log X for X ~ Gamma(α, 1), differentiable in log α."""
        if self.gradient == "surrogate":
            return log_surrogate_draw(log_alpha)
        value, slope = log_gamma_draw(log_alpha.detach())
        return with_derivatives(value, (log_alpha, slope))

    def _kl_of_rows(self, a: Tensor, mask: Visible, logits: Tensor) -> Tensor:
        """(B,): the part of the KL that depends on a row's sharpness and number of keys alone.

        It is n (r - 1 - log r), r = a₀/a, for a centred prior, less the KL of the sum of the Gammas unless that counts.
        """
        keys = _keys_of_rows(mask, logits).to(a.dtype)  # (·, ·, T, 1), or (E,)
        if self.symmetric:
            value, a0 = torch.zeros_like(a), self.prior_sharpness * keys.clamp_min(1e-30)
        else:
            a0 = torch.full_like(a, self.prior_sharpness)
            r = a0 / a
            value = keys * (r - 1 - r.log())
        if self.divergence == "dirichlet":
            value = value - (torch.lgamma(a0) - torch.lgamma(a) + (a - a0) * torch.digamma(a))
        # On a graph a row's term is shared out among its edges.
        value = value * (keys.reciprocal() if isinstance(mask, Edges) else (keys > 0).to(a.dtype))
        rows = (*logits.shape[-3:-1], logits.shape[-1] if isinstance(mask, Edges) else 1)
        repeats = math.prod(rows) // math.prod(value.shape[-3:])  # of axes that neither writes out
        return (value.sum((-3, -2, -1)) * repeats).expand(logits.shape[:-3])

    def extra_repr(self) -> str:
        """The prior and how weights are drawn, for printing."""
        kind = "symmetric" if self.symmetric else "centred"
        return f"{kind}, prior_sharpness={self.prior_sharpness:g}, gradient={self.gradient}"


def _keys_of_rows(mask: Visible, like: Tensor) -> Tensor:
    """How many keys a row has: (·, ·, T, 1), or for each edge, (E,)."""
    if isinstance(mask, Edges):
        return mask.seen(like)
    return mask.sum(-1, keepdim=True) * (like.shape[-1] // mask.shape[-1])


def _centred_kl(log_alpha: Tensor, r: Tensor, hidden: Hidden) -> Tensor:
    """(B,): Σ log Γ(1 + rα) - log Γ(1 + α) + (1 - r) α ψ(1 + α) over visible entries, where α⁰ = r α.

    What is left of an entry's KL, r - 1 - log r, does not depend on α.
    """
    alpha, ratio = log_alpha.detach().exp(), r.detach()
    value, less_digamma, trigamma = gamma_ratio(alpha, ratio)
    by_r = hide(less_digamma * alpha, hidden)
    by_log_alpha = ratio * by_r + hide((1 - ratio) * alpha * alpha * trigamma, hidden)
    return with_derivatives(hide(value, hidden).sum((-3, -2, -1)), (log_alpha, by_log_alpha), (r, by_r))


def _symmetric_kl(log_alpha: Tensor, s: float) -> Tensor:
    """(B, H, T, S): log Γ(s) - log Γ(α) + (α - s) ψ(α), with Γ(α) = Γ(1 + α) / α and ψ(α) = ψ(1 + α) - 1/α."""
    alpha = log_alpha.exp()
    gammas = math.lgamma(s) - torch.lgamma(1 + alpha) + (alpha - s) * torch.digamma(1 + alpha)
    return gammas + log_alpha - 1 + finite_exp(math.log(s) - log_alpha)
