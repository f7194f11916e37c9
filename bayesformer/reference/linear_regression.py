"""Bayesian linear regression, whose posterior is a Gaussian."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesformer.core.seeds import generator
from bayesformer.core.types import GaussianOutputs
from bayesformer.data import Data
from bayesformer.likelihoods import Gaussian, Likelihood
from bayesformer.reference.closed_form import LinearPosterior, weight_space
from bayesformer.reference.problem_kind import ProblemData, ReferenceProblem


@dataclass(frozen=True)
class LinearRegression(ReferenceProblem):
    """Linear regression with correlated inputs; the posterior is a Gaussian in closed form."""

    examples: int = 200
    """training examples N"""
    condition: float = 10.0
    """largest over smallest variance of the inputs, along their principal axes"""
    weights: int = 20
    """inputs, and weights"""
    noise: float = 1.0
    """standard deviation of the targets' noise, known"""
    asked: int = 60
    """inputs of each region"""

    @property
    def description(self) -> str:
        """One line about the problem, with its sizes."""
        return f"Linear regression, {self.weights} weights, N = {self.examples}, condition {self.condition:g}; exact."

    @property
    def likelihood(self) -> Likelihood:
        """Gaussian with the known noise."""
        return Gaussian(scale=self.noise)

    def data(self) -> ProblemData:
        """Inputs with the given condition; "out" are inputs with variance 1 along every axis."""
        source = generator(0, "linear regression", self.weights)
        rotation = torch.linalg.qr(torch.randn(self.weights, self.weights, generator=source, dtype=torch.float64))[0]
        scales = torch.logspace(0, -0.5, self.weights, base=self.condition, dtype=torch.float64)
        root = scales[:, None] * rotation  # rows of noise times this are inputs
        truth = torch.randn(self.weights, 1, generator=source, dtype=torch.float64)

        def rows(name: str, count: int) -> Tensor:
            own = generator(0, "linear regression", name, count)
            return torch.randn(count, self.weights, generator=own, dtype=torch.float64)

        inputs = rows("train", self.examples) @ root
        noise = torch.randn(
            self.examples, 1, generator=generator(0, "linear noise", self.examples), dtype=torch.float64
        )
        train = Data(inputs.float(), (inputs @ truth + self.noise * noise).float())
        return ProblemData(
            train, {"in": (rows("in", self.asked) @ root).float(), "out": rows("out", self.asked).float()}
        )

    def model(self) -> nn.Module:
        """One linear map without bias, from (B, F) to (B, 1)."""
        return nn.Linear(self.weights, 1, bias=False)

    def posterior(self, data: ProblemData) -> LinearPosterior:
        """The exact posterior of the weights."""
        assert isinstance(data.train.inputs, Tensor)
        return weight_space(data.train.inputs, data.train.targets, self.noise)

    def exact(self, data: ProblemData) -> dict[str, GaussianOutputs]:
        """The exact law of the outputs by region."""
        law = self.posterior(data)
        return {name: law.outputs(inputs) for name, inputs in data.regions.items()}
