"""Lognormal attention with a Lognormal prior. Fan, Zhang, Chen & Zhou (2020), Bayesian Attention Modules.

    S_ij = exp(Φ_ij + σ ε_ij - σ²/2),   ε_ij ~ N(0, 1),   weights = S_i / Σ_j S_ij

S has the mean exp(Φ). The σ²/2 cancels in a row, so a draw is softmax(Φ + σ ε); σ → 0 is softmax attention.
"""

from __future__ import annotations

import math

from torch import Tensor

from bayesformer.attention.contextual import Contextual
from bayesformer.attention.edges import Visible
from bayesformer.attention.family import AttentionFamily, Drawn
from bayesformer.attention.ranges import check_above_zero
from bayesformer.attention.rows import Hidden, hidden_keys, hide, row_softmax, visible_count
from bayesformer.core.draws import normal_like


class Lognormal(AttentionFamily):
    """Lognormal scores against Lognormal(μ, σ₀²). Section 3.2 and eq. 2 of the paper.

        KL_ij = log(σ₀/σ) + [σ² + (Φ_ij - σ²/2 - μ)²] / 2σ₀² - ½

    Args:
        sigma: standard deviation of log S.
        mu: mean of the logarithm under the prior; ignored with `contextual`.
        prior_sigma: its standard deviation.
        contextual: reads μ_ij off the keys (section 3.3).
        dropout: of weights, after they are drawn.
    """

    def __init__(
        self,
        sigma: float = 0.1,
        mu: float = 0.0,
        prior_sigma: float = 1.0,
        contextual: Contextual | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout)
        check_above_zero(sigma=sigma, prior_sigma=prior_sigma)
        if not math.isfinite(mu):
            raise ValueError(f"mu must be finite; got {mu}.")
        self.sigma, self.mu, self.prior_sigma, self.contextual = sigma, mu, prior_sigma, contextual
        self.wants_keys = contextual is not None

    def log_s(self, logits: Tensor) -> Tensor:
        """A draw of log S, before a row is normalised; E[S] = exp(logits)."""
        return logits + self.sigma * normal_like(logits) - self.sigma**2 / 2

    def draw(self, logits: Tensor, mask: Visible, keys: Tensor | None) -> Drawn:
        """One softmax with noise added to the logits."""
        hidden = hidden_keys(mask)
        weights = row_softmax(logits + self.sigma * normal_like(logits), hidden)
        return weights, self._kl(self._away(logits, mask, keys), mask, hidden) if self.counts else None

    def _away(self, logits: Tensor, mask: Visible, keys: Tensor | None) -> Tensor:
        """(B, H, T, S): the distance of the two locations."""
        if self.contextual is None:
            return logits - (self.mu + self.sigma**2 / 2)
        return logits - self.contextual(keys, mask).exp() - self.sigma**2 / 2

    def _kl(self, away: Tensor, mask: Visible, hidden: Hidden) -> Tensor:
        # Ratios are squared, not squares divided: σ₀ may be 1e15 and σ 1e-15.
        each = math.log(self.prior_sigma) - math.log(self.sigma) + 0.5 * (self.sigma / self.prior_sigma) ** 2 - 0.5
        z = hide(away / self.prior_sigma, hidden)
        return 0.5 * z.square().sum((-3, -2, -1)) + each * visible_count(mask, away)

    def extra_repr(self) -> str:
        """The parameters of the law and of its prior, for printing."""
        return f"sigma={self.sigma:g}, mu={self.mu:g}, prior_sigma={self.prior_sigma:g}"
