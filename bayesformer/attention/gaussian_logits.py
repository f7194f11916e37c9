"""Gaussian logits: A_ij ~ N(logits_ij, σ_ij²), weights = softmax(A_i)."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesformer.attention.edges import Visible
from bayesformer.attention.family import AttentionFamily, Drawn
from bayesformer.attention.ranges import check_above_zero
from bayesformer.attention.rows import hidden_keys, row_softmax, visible_sum
from bayesformer.attention.spread import Learned, LogitSpread
from bayesformer.core.draws import normal_like


class GaussianLogits(AttentionFamily):
    """Gaussian logits against N(logits_ij, σ₀²), a prior centred on the logits themselves.

        KL_ij = ½ (σ_ij²/σ₀² - 1) - log(σ_ij/σ₀)

    σ → 0 is softmax attention.

    Args:
        spread: gives σ; one learned number per head by default, see `bayesformer.attention.spread`.
        prior_sigma: σ₀.
        dropout: of weights, after they are drawn.
    """

    def __init__(self, spread: LogitSpread | None = None, prior_sigma: float = 0.1, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        check_above_zero(prior_sigma=prior_sigma)
        self.spread, self.prior_sigma = spread or Learned(start=prior_sigma), prior_sigma

    def draw(self, logits: Tensor, mask: Visible, keys: Tensor | None) -> Drawn:  # noqa: ARG002
        """One softmax with noise added to the logits."""
        sigma = self.spread(logits, mask)  # broadcasts to (B, H, T, S)
        weights = row_softmax(logits + sigma * normal_like(logits), hidden_keys(mask))
        return weights, self._kl(sigma / self.prior_sigma, mask, logits.shape) if self.counts else None

    @staticmethod
    def _kl(ratio: Tensor, mask: Visible, shape: torch.Size) -> Tensor:
        return visible_sum(0.5 * (ratio.square() - 1) - ratio.log(), mask, shape)

    def extra_repr(self) -> str:
        """The scale of the prior, for printing."""
        return f"prior_sigma={self.prior_sigma:g}"
