"""Weibull attention with a Gamma prior. Fan, Zhang, Chen & Zhou (2020), Bayesian Attention Modules.

    S_ij = exp(Φ_ij) E_ij^(1/k) / Γ(1 + 1/k),   E_ij ~ Exp(1),   weights = S_i / Σ_j S_ij

S is Weibull with shape k and mean exp(Φ). The Γ cancels in a row, so a draw is softmax(Φ + log(E)/k); k → ∞ is
softmax attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesformer.attention.contextual import Contextual
from bayesformer.attention.edges import Visible
from bayesformer.attention.family import AttentionFamily, Drawn
from bayesformer.attention.ranges import check_above_zero
from bayesformer.attention.rows import Hidden, finite_exp, hidden_keys, hide, row_softmax, visible_count, visible_sum
from bayesformer.attention.special import EULER
from bayesformer.core.draws import log_uniform_like


class Weibull(AttentionFamily):
    """Weibull scores against Gamma(α, rate β). Section 3.2 and eq. 1 of the paper.

        KL_ij = α (γ/k - log λ_ij - log β) + log Γ(α) + β exp(Φ_ij) + log k - γ - 1,   log λ = Φ - log Γ(1 + 1/k)

    Args:
        k: shape of the Weibull; the relative spread of S is about 1.28 / k.
        alpha: shape of the prior; ignored with `contextual`.
        beta: rate of the prior.
        contextual: reads α_ij off the keys (section 3.3).
        dropout: of weights, after they are drawn.
    """

    def __init__(
        self,
        k: float = 10.0,
        alpha: float = 1e-4,
        beta: float = 1e-4,
        contextual: Contextual | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout)
        check_above_zero(k=k, alpha=alpha, beta=beta)
        self.k, self.alpha, self.beta, self.contextual = k, alpha, beta, contextual
        self.wants_keys = contextual is not None

    def log_s(self, logits: Tensor) -> Tensor:
        """A draw of log S, before a row is normalised; E[S] = exp(logits)."""
        return logits + self._noise(logits) / self.k - math.lgamma(1 + 1 / self.k)

    def draw(self, logits: Tensor, mask: Visible, keys: Tensor | None) -> Drawn:
        """One softmax with noise added to the logits."""
        hidden = hidden_keys(mask)
        weights = row_softmax(logits + self._noise(logits) / self.k, hidden)
        return weights, self._kl(logits, mask, hidden, keys) if self.counts else None

    @staticmethod
    def _noise(logits: Tensor) -> Tensor:
        return log_uniform_like(logits).neg_().log_()

    @property
    def _slope(self) -> float:
        """What multiplies α in an entry's KL besides -Φ."""
        return EULER / self.k + math.lgamma(1 + 1 / self.k) - math.log(self.beta)

    @property
    def _constant(self) -> float:
        return math.log(self.k) - EULER - 1

    def _kl(self, logits: Tensor, mask: Visible, hidden: Hidden, keys: Tensor | None) -> Tensor:
        if self.contextual is not None:
            return self._contextual_kl(logits, mask, hidden, self.contextual(keys, mask))
        each = self.alpha * self._slope + math.lgamma(self.alpha) + self._constant
        varying = hide(self._mean_under_prior_rate(logits) - self.alpha * logits, hidden)
        return varying.sum((-3, -2, -1)) + each * visible_count(mask, logits)

    def _contextual_kl(self, logits: Tensor, mask: Visible, hidden: Hidden, log_alpha: Tensor) -> Tensor:
        alpha = log_alpha.exp()
        # log Γ(α) = log Γ(1 + α) - log α: where the softmax underflows, α is 0 and its logarithm is not infinite.
        each = alpha * self._slope + torch.lgamma(1 + alpha) - log_alpha + self._constant
        shown = hide(logits, hidden)
        if alpha.shape[-2] == 1:  # one prior for all queries
            shown = shown.sum(-2, keepdim=True)
        varying = hide(self._mean_under_prior_rate(logits), hidden).sum((-3, -2, -1))
        return varying - (alpha * shown).sum((-3, -2, -1)) + visible_sum(each, mask, logits.shape)

    def _mean_under_prior_rate(self, logits: Tensor) -> Tensor:
        """β exp(Φ); β goes in as a logarithm, since exp(Φ) alone may overflow."""
        return finite_exp(logits + math.log(self.beta))

    def extra_repr(self) -> str:
        """The parameters of the law and of its prior, for printing."""
        return f"k={self.k:g}, alpha={self.alpha:g}, beta={self.beta:g}"
