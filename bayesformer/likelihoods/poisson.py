"""Counts: the example of CONTRIBUTING.md for a likelihood of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayesformer.core.types import Outputs
from bayesformer.likelihoods.base import Likelihood
from bayesformer.likelihoods.links import Link
from bayesformer.likelihoods.output_draws import promote
from bayesformer.likelihoods.predictive import PoissonPredictive


@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts 0, 1, 2, ...: outputs are log rates in the shape of the targets."""

    name: ClassVar[str] = "poisson"
    elementwise: ClassVar[bool] = True

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(B, ...): y f - e^f - log y! for f the log rate."""
        counts = targets.to(outputs.dtype)
        return counts * outputs - outputs.exp() - torch.lgamma(counts + 1)

    def predictive(
        self, outputs: Outputs, link: Link | None = None, draws: int | None = None, seed: int = 0
    ) -> PoissonPredictive:
        """One Poisson distribution per draw of the outputs."""
        return PoissonPredictive(self.output_draws(outputs, link, draws, seed))

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """(B, ...): counts drawn with rate e^outputs."""
        return torch.poisson(promote(outputs).exp().cpu(), generator=generator).to(outputs.device)

    def check(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """Shapes agree and every counted target is a whole number, 0 or more."""
        super().check(outputs, targets, mask)
        counts = targets[self.kept(targets, mask)]
        wrong = counts[~((counts >= 0) & (counts == counts.round()))]
        if len(wrong):
            raise ValueError(f"targets of a poisson likelihood must be counts 0, 1, 2, ...; got {wrong[0].item()}.")

    def hessian_diagonal(self, outputs: Tensor) -> Tensor:
        """(B, ...): e^f. Autograd finds the same; the closed form is faster."""
        return promote(outputs).exp()
