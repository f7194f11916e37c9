"""Dirichlet weights: a row of weights w_i ~ Dir(a_i m_i), m_i = softmax(logits_i), a_i > 0 its sharpness."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from bayesformer.attention.checks import check_above_zero
from bayesformer.attention.edges import Edges, Visible
from bayesformer.attention.family import Drawn, Family
from bayesformer.attention.fused import (
    Hidden,
    exponential_,
    hidden_keys,
    hide,
    hide_,
    in_pieces,
    known,
    masked_log_softmax,
    row_softmax,
    visible_sum,
)
from bayesformer.attention.special import FLOOR, gamma_ratio, gammas_and_trigamma, log_gamma_draw, log_surrogate_draw
from bayesformer.attention.spread import Learned, Spread
from bayesformer.errors import unknown_name

Gradient: TypeAlias = Literal["implicit", "surrogate"]
Divergence: TypeAlias = Literal["dirichlet", "gamma"]
DRAWS = {"implicit": log_gamma_draw, "surrogate": log_surrogate_draw}


class Dirichlet(Family):
    """Dirichlet weights against Dir(a₀ m_i), centred on the same mean, or against a symmetric Dirichlet.

        w = X / Σ X,   X_j ~ Gamma(α_j),   α = a m

    in logarithms throughout: at the sharpness the thesis starts from, 10⁻³, X itself underflows, and a row of
    zeros, or of the smallest number, is uniform over all keys, hidden ones included. Such rows are how the future
    reached its results. a → ∞ is softmax attention.

    The KL is that of the Dirichlets, or the thesis's, of the Gammas before they are divided by their sum, which
    exceeds it by the KL of that sum, Gamma(a) against Gamma(a₀):

        Σ_j [log Γ(α⁰_j) - log Γ(α_j) + (α_j - α⁰_j) ψ(α_j)]

    Args:
        spread: gives a, per row; one learned number per head by default, see `bayesformer.attention.spread`.
        prior_sharpness: a₀; with `symmetric`, the one parameter of the Dirichlet.
        symmetric: whether the prior ignores the logits.
        gradient: "implicit", of exact draws, or "surrogate", an approximate inverse CDF, for α below 1.
        divergence: "dirichlet", of the weights, or "gamma", of the thesis.
        dropout: of weights, after they are drawn.
    """

    def __init__(
        self,
        spread: Spread | None = None,
        prior_sharpness: float = 10.0,
        symmetric: bool = False,
        gradient: Gradient = "implicit",
        divergence: Divergence = "dirichlet",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout)
        check_above_zero(prior_sharpness=prior_sharpness)
        if gradient not in DRAWS:
            raise unknown_name("gradient", gradient, DRAWS)
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
        log_alpha = hide(masked_log_softmax(logits, hidden) + a.log(), hidden, FLOOR)
        weights = row_softmax(known(DRAWS[self.gradient], log_alpha), hidden)
        return weights, lambda: self._kl(log_alpha, a, mask, hidden)

    def _kl(self, log_alpha: Tensor, a: Tensor, mask: Visible, hidden: Hidden) -> Tensor:
        seen = _keys_of_rows(mask, log_alpha)  # (·, ·, T, 1), or (E,)
        if self.symmetric:
            a0 = self.prior_sharpness * seen.to(a.dtype)
            total = known(partial(_symmetric_sum, s=self.prior_sharpness, hidden=hidden), log_alpha)
        else:
            a0 = a.new_tensor(self.prior_sharpness)
            r = a0 / a
            each = r - 1 - r.log()
            shown = hide(log_alpha, hidden, -math.inf)
            total = known(_centred_sum, shown, r) + visible_sum(each, mask, log_alpha.shape)
        if self.divergence == "gamma":
            return total
        of_sum = torch.lgamma(a0.clamp_min(1e-30)) - torch.lgamma(a) + (a - a0) * torch.digamma(a)
        if isinstance(mask, Edges):  # a row's term, shared out among its edges
            return total - visible_sum(of_sum / seen, mask, log_alpha.shape)
        return total - visible_sum(of_sum, seen > 0, torch.Size((*log_alpha.shape[:-1], 1)))

    def extra_repr(self) -> str:
        """The prior and how it is drawn."""
        kind = "symmetric" if self.symmetric else "centred"
        return f"{kind}, prior_sharpness={self.prior_sharpness:g}, gradient={self.gradient}"


def _keys_of_rows(mask: Visible, like: Tensor) -> Tensor:
    """How many keys a row has: (·, ·, T, 1), or for each edge, (E,)."""
    if isinstance(mask, Edges):
        return mask.seen(like)
    return mask.sum(-1, keepdim=True) * (like.shape[-1] // mask.shape[-1])


def _centred_sum(log_alpha: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value, slope, of_r = in_pieces(_centred, log_alpha, r)
    return value.sum((-3, -2, -1)), slope, of_r


def _centred(log_alpha: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ log Γ(1 + rα) - log Γ(1 + α) + (1 - r) α ψ(1 + α) of rows, where α⁰ = r α; derivatives in log α and r.

    What is left of an entry's KL, r - 1 - log r, does not depend on α. There is no term in 1/α, so that a hidden
    entry, α = 0, adds exactly 0.
    """
    alpha = log_alpha.exp()
    value, less_digamma, trigamma = gamma_ratio(alpha, r)
    of_r = less_digamma.mul_(alpha)
    slope = (r * of_r).addcmul_(trigamma.mul_(1 - r), alpha.square_())
    # Keys of a row share r. Where a row of numbers is a list of edges, each has that of its node.
    return value.sum(-1, keepdim=True), slope, of_r.sum(-1, keepdim=True) if r.shape[-1] == 1 else of_r


def _symmetric_sum(log_alpha: Tensor, s: float, hidden: Hidden) -> tuple[Tensor, Tensor]:
    value, slope = in_pieces(partial(_symmetric, s=s), log_alpha)
    return hide_(value, hidden).sum((-3, -2, -1)), hide_(slope, hidden)


def _symmetric(log_alpha: Tensor, s: float) -> tuple[Tensor, Tensor]:
    """log Γ(s) - log Γ(α) + (α - s) ψ(α), and its derivative in log α."""
    log_alpha = log_alpha.clamp_min(FLOOR)
    alpha = log_alpha.exp()
    log_gamma, digamma, trigamma = gammas_and_trigamma(alpha)
    ratio, slope = exponential_(math.log(s) - log_alpha)  # s / α
    away = alpha - s
    value = ratio.add_(log_alpha).sub_(log_gamma).addcmul_(away, digamma).add_(math.lgamma(s) - 1)
    return value, (1 - slope).addcmul_(away.mul_(alpha), trigamma)
