"""Logistic regression with correlated inputs: not Gaussian, but nearly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesformer.core.seeds import generator
from bayesformer.data import Data
from bayesformer.likelihoods import Bernoulli, Likelihood
from bayesformer.reference.problem_kind import ProblemData, ReferenceProblem


class LogOdds(nn.Linear):
    """One logit per row, (B, F) -> (B,)."""

    def __init__(self, features: int, bias: bool = True) -> None:
        super().__init__(features, 1, bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B,): one logit per row, in the shape of the targets."""
        return super().forward(inputs).squeeze(-1)


@dataclass(frozen=True)
class LogisticRegression(ReferenceProblem):
    """Logistic regression, 20 correlated inputs; long HMC."""

    examples: int = 500
    """training examples N"""
    weights: int = 20
    """inputs, and weights"""
    correlation: float = 0.8
    """of neighbouring inputs, falling geometrically with the distance"""
    asked: int = 60
    """inputs of each region"""

    @property
    def likelihood(self) -> Likelihood:
        """Bernoulli; nothing but the logit is unknown."""
        return Bernoulli()

    def data(self) -> ProblemData:
        """Correlated inputs of variance 1; "out" are inputs three times as far away."""
        place = torch.arange(self.weights, dtype=torch.float64)
        root = torch.linalg.cholesky(self.correlation ** (place[:, None] - place).abs())
        source = generator(0, "logistic regression", self.examples)

        def rows(count: int) -> Tensor:
            return torch.randn(count, self.weights, generator=source, dtype=torch.float64) @ root.T

        truth = torch.randn(self.weights, generator=source, dtype=torch.float64)
        inputs = rows(self.examples)
        chance = torch.rand(self.examples, generator=source, dtype=torch.float64)
        targets = (chance < torch.sigmoid(inputs @ truth)).float()
        return ProblemData(
            Data(inputs.float(), targets), {"in": rows(self.asked).float(), "out": 3 * rows(self.asked).float()}
        )

    def model(self) -> nn.Module:
        """One linear map without bias to a logit."""
        return LogOdds(self.weights, bias=False)
