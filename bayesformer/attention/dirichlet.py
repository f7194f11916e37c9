"""Dirichlet weights: a row of weights w_i ~ Dir(a_i m_i), m_i = softmax(logits_i), a_i > 0 its sharpness.

Cinquin, Immer, Horn & Fortuin (2021), Pathologies in priors and inference for Bayesian transformers.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bayesformer.attention.edges import Edges, Visible
from bayesformer.attention.family import AttentionFamily, Drawn
from bayesformer.attention.ranges import check_above_zero
from bayesformer.attention.rows import (
    Hidden,
    exponential_,
    hidden_keys,
    hide,
    hide_,
    in_pieces,
    known,
    masked_log_softmax,
    row_softmax,
    row_softmax_,
    softmax_backward,
)
from bayesformer.attention.special import IMPLICIT, LEAST, SURROGATE, GammaSampler, gamma_ratio, gammas_and_trigamma
from bayesformer.attention.spread import Learned, LogitSpread
from bayesformer.core.errors import unknown_name
from bayesformer.core.vectors import transformed

Gradient: TypeAlias = Literal["implicit", "surrogate"]
Divergence: TypeAlias = Literal["dirichlet", "gamma"]
SAMPLERS = {"implicit": IMPLICIT, "surrogate": SURROGATE}


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
        if gradient not in SAMPLERS:
            raise unknown_name("gradient", gradient, SAMPLERS)
        if divergence not in {"dirichlet", "gamma"}:
            raise unknown_name("divergence", divergence, ["dirichlet", "gamma"])
        self.spread = spread or Learned(start=prior_sharpness, per_row=True)
        if not self.spread.per_row:
            raise ValueError("spread must be per_row for Dirichlet attention; got one with a number per key.")
        self.prior_sharpness, self.symmetric = prior_sharpness, symmetric
        self.gradient, self.divergence = gradient, divergence

    def draw(self, logits: Tensor, mask: Visible, keys: Tensor | None) -> Drawn:  # noqa: ARG002
        """Gamma draws in logarithms, and their softmax."""
        hidden, counts = hidden_keys(mask), self.counts
        a = self.spread(logits, mask)  # broadcasts to (B, H, T, 1), or to (B, H, 1, E) on a graph
        draw = drawn_plainly if transformed() else drawn
        a0 = self.prior_sharpness if counts and not self.symmetric else None
        weights, total = draw(SAMPLERS[self.gradient], logits, a, a0, hidden)
        if counts and self.symmetric:
            total = known(partial(_symmetric_sum, s=self.prior_sharpness, hidden=hidden), _log_alpha(logits, a, hidden))
        return weights, None if total is None else total + self._of_rows(a, mask, logits)

    def _of_rows(self, a: Tensor, mask: Visible, logits: Tensor) -> Tensor:
        """(B,): what the KL owes to the rows, whatever α is."""
        keys = _keys_of_rows(mask, logits).to(a.dtype)  # (·, ·, T, 1), or (E,)
        # On a graph a row's term is shared out among its edges.
        shown = keys.reciprocal() if isinstance(mask, Edges) else (keys > 0).to(a.dtype)
        rows = torch.Size((*logits.shape[-3:-1], logits.shape[-1] if isinstance(mask, Edges) else 1))

        def total(a: Tensor) -> tuple[Tensor, Tensor]:
            value, slope = (each * shown for each in self._of_row(a, keys))
            repeats = math.prod(rows) // math.prod(value.shape[-3:])  # of axes that neither writes out
            value = (value.sum((-3, -2, -1)) * repeats).expand(logits.shape[:-3])
            return value, (slope * repeats)[(None,) * (logits.dim() - slope.dim())]

        return known(total, a)

    def _of_row(self, a: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """n (r - 1 - log r), unless the prior is symmetric; less the KL of Gamma(a) to Gamma(a₀); derivative in a."""
        if self.symmetric:
            value = slope = torch.zeros_like(a)
            a0 = self.prior_sharpness * keys.clamp_min(1e-30)
        else:
            a0 = torch.full_like(a, self.prior_sharpness)
            r = a0 / a
            value, slope = keys * (r - 1 - r.log()), keys * (1 - r) / a
        if self.divergence == "gamma":
            return value, slope
        away = a - a0
        of_sum = torch.lgamma(a0) - torch.lgamma(a) + away * torch.digamma(a)
        return value - of_sum, slope - away * torch.polygamma(1, a)

    def extra_repr(self) -> str:
        """The prior and how it is drawn."""
        kind = "symmetric" if self.symmetric else "centred"
        return f"{kind}, prior_sharpness={self.prior_sharpness:g}, gradient={self.gradient}"


def _keys_of_rows(mask: Visible, like: Tensor) -> Tensor:
    """How many keys a row has: (·, ·, T, 1), or for each edge, (E,)."""
    if isinstance(mask, Edges):
        return mask.seen(like)
    return mask.sum(-1, keepdim=True) * (like.shape[-1] // mask.shape[-1])


def _log_alpha(logits: Tensor, a: Tensor, hidden: Hidden) -> Tensor:
    return hide(masked_log_softmax(logits, hidden) + a.log(), hidden, -math.inf)


def drawn(sampler: GammaSampler, logits: Tensor, a: Tensor, a0: float | None, hidden: Hidden) -> Drawn:
    """Weights, and with a₀ what their KL owes to α: (B,), see `_centred`."""
    found: Drawn = _Gammas.apply(sampler, logits, a, a0, hidden)
    return found


class _Gammas(Function):
    """From logits to weights and KL in one step, in which α and its logarithm's derivatives are there but once.

    Derivatives are in log α, since that in α is infinite where α underflows. What comes back to it, g, goes on to the
    logits as g - m Σ g and to a as Σ g / a; r = a₀/a has a derivative of its own.
    """

    @staticmethod
    def forward(ctx: Any, sampler: GammaSampler, logits: Tensor, a: Tensor, a0: float | None, hidden: Hidden) -> Drawn:
        means = row_softmax(logits, hidden)
        alpha = means * a
        noise = sampler.noise(alpha)
        kl = kl_slope = by_r = None
        if a0 is None:
            log_x, slope = in_pieces(sampler.log_x, alpha, *noise)
        else:
            r = a0 / a
            log_x, slope, kl, kl_slope, by_r = in_pieces(partial(_draw_and_kl, sampler), alpha, r, *noise)
            kl, by_r = kl.sum((-3, -2, -1)), by_r.mul_(r)
        weights = row_softmax_(log_x, hidden)
        ctx.edges, ctx.shape = hidden if isinstance(hidden, Edges) else None, logits.shape
        ctx.save_for_backward(means, weights, slope, kl_slope, a, by_r)
        return weights, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_weights: Tensor, by_kl: Tensor | None) -> tuple[Tensor | None, ...]:
        means, weights, slope, kl_slope, a, by_r = ctx.saved_tensors
        edges: Edges | None = ctx.edges
        g = softmax_backward(by_weights, weights, edges).mul_(slope)
        if by_kl is not None:
            by_kl = by_kl[..., None, None, None]
            g = torch.addcmul(g, by_kl, kl_slope)
        total = g.sum(-1, keepdim=True) if edges is None else edges.spread(edges.sum(g))
        by_log_a = (total if edges is None else g).sum_to_size(a.shape)
        if by_kl is not None:
            by_log_a = by_log_a - (by_kl * by_r).sum_to_size(a.shape)
        by_logits = torch.addcmul(g, means, total, value=-1).sum_to_size(ctx.shape)
        return None, by_logits, by_log_a / a, None, None


def drawn_plainly(sampler: GammaSampler, logits: Tensor, a: Tensor, a0: float | None, hidden: Hidden) -> Drawn:
    """The same in single operations, for torch.func."""
    log_alpha = _log_alpha(logits, a, hidden)

    def log_x(log_alpha: Tensor) -> tuple[Tensor, Tensor]:
        alpha = log_alpha.exp()
        return sampler.log_x(alpha, *sampler.noise(alpha))

    def varying(log_alpha: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        value, slope, of_r = _centred(log_alpha.exp(), r)
        return value.sum((-3, -2, -1)), slope, of_r

    return row_softmax(known(log_x, log_alpha), hidden), None if a0 is None else known(varying, log_alpha, a0 / a)


def _draw_and_kl(sampler: GammaSampler, alpha: Tensor, r: Tensor, *noise: Tensor) -> tuple[Tensor, ...]:
    return *sampler.log_x(alpha, *noise), *_centred(alpha, r)


def _centred(alpha: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ log Γ(1 + rα) - log Γ(1 + α) + (1 - r) α ψ(1 + α) of rows, where α⁰ = r α; derivatives in log α and r.

    What is left of an entry's KL, r - 1 - log r, does not depend on α. There is no term in 1/α, so that a hidden
    entry, α = 0, adds exactly 0.
    """
    value, less_digamma, trigamma = gamma_ratio(alpha, r)
    of_r = less_digamma.mul_(alpha)
    slope = (r * of_r).addcmul_(trigamma.mul_(1 - r), alpha * alpha)
    # Keys of a row share r. Where a row of numbers is a list of edges, each has that of its node.
    return value.sum(-1, keepdim=True), slope, of_r.sum(-1, keepdim=True) if r.shape[-1] == 1 else of_r


def _symmetric_sum(log_alpha: Tensor, s: float, hidden: Hidden) -> tuple[Tensor, Tensor]:
    value, slope = in_pieces(partial(_symmetric, s=s), log_alpha)
    return hide_(value, hidden).sum((-3, -2, -1)), hide_(slope, hidden)


def _symmetric(log_alpha: Tensor, s: float) -> tuple[Tensor, Tensor]:
    """log Γ(s) - log Γ(α) + (α - s) ψ(α), and its derivative in log α."""
    log_alpha = log_alpha.clamp_min(math.log(LEAST))
    alpha = log_alpha.exp()
    log_gamma, digamma, trigamma = gammas_and_trigamma(alpha)
    ratio, slope = exponential_(math.log(s) - log_alpha)  # s / α
    away = alpha - s
    value = ratio.add_(log_alpha).sub_(log_gamma).addcmul_(away, digamma).add_(math.lgamma(s) - 1)
    return value, (1 - slope).addcmul_(away.mul_(alpha), trigamma)
