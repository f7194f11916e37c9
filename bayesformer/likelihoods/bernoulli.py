"""Yes or no, once or several times per example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.core.types import Outputs
from bayesformer.likelihoods import links
from bayesformer.likelihoods.base import Likelihood
from bayesformer.likelihoods.links import Link
from bayesformer.likelihoods.output_draws import as_draws, closed_form, promote
from bayesformer.likelihoods.predictive import CategoricalPredictive


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Yes or no: outputs are logits in the shape of the targets, targets 0 or 1.

    The predictive is categorical with two classes. Several labels of one example are its positions.
    """

    name: ClassVar[str] = "bernoulli"
    elementwise: ClassVar[bool] = True
    links: ClassVar[tuple[Link, ...]] = ("mc", "probit")

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(B, ...): minus the binary cross-entropy."""
        return -F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")

    def hessian_diagonal(self, outputs: Tensor) -> Tensor:
        """(B, ...): p (1 - p), each logit on its own."""
        probs = torch.sigmoid(promote(outputs))
        return probs * (1 - probs)

    def predictive(
        self, outputs: Outputs, link: Link | None = None, draws: int | None = None, seed: int = 0
    ) -> CategoricalPredictive:
        """Log-probabilities (L, B, ..., 2) of targets 0 and 1, from logits (L, B, ...) or from a Gaussian over logits.

        Of a Gaussian, link "probit" gives one component (L = 1) in closed form; "mc" or None makes `draws` draws of
        it.
        """
        closed = closed_form(outputs, link, self.links)
        if closed is not None:
            return CategoricalPredictive(links.binary_probit(closed)[None])
        logits = as_draws(outputs, draws, seed)
        return CategoricalPredictive(torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], -1))

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """(B, ...): 0.0 or 1.0 drawn with probability sigmoid(outputs) of 1."""
        return torch.bernoulli(torch.sigmoid(promote(outputs)).cpu(), generator=generator).to(outputs.device)

    def check(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """Shapes agree and every counted target is 0 or 1."""
        super().check(outputs, targets, mask)
        kept = targets[self.kept(targets, mask)]
        wrong = kept[(kept != 0) & (kept != 1)]
        if len(wrong):
            raise ValueError(f"targets of a bernoulli likelihood must be 0 or 1; got {wrong[0].item()}.")
