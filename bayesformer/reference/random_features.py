"""A Gaussian process as a network: random cosine features with a linear read-out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesformer.core.seeds import generator
from bayesformer.core.types import GaussianOutputs
from bayesformer.likelihoods import Gaussian, Likelihood
from bayesformer.reference.closed_form import function_space
from bayesformer.reference.gap_network import gap_data
from bayesformer.reference.problem_kind import ProblemData, ReferenceProblem


class CosineFeatures(nn.Module):
    """f(x) = Σ_j w_j √(2/F) cos(ω_j x + b_j) with F fixed random frequencies and phases; only w is learned.

    With w_j ~ N(0, 1) it is a Gaussian process whose kernel tends to exp(-(x - x')² / 2ℓ²) as F grows: Rahimi & Recht
    (2007), "Random features for large-scale kernel machines", section 3.
    """

    frequencies: Tensor
    phases: Tensor

    def __init__(self, features: int, length_scale: float) -> None:
        super().__init__()
        source = generator(0, "cosine features", features)
        self.register_buffer("frequencies", torch.randn(features, generator=source) / length_scale)
        self.register_buffer("phases", 2 * math.pi * torch.rand(features, generator=source))
        self.read_out = nn.Linear(features, 1, bias=False)

    def features(self, inputs: Tensor) -> Tensor:
        """The features (B, F) of inputs (B, 1)."""
        return math.sqrt(2 / len(self.phases)) * (inputs * self.frequencies + self.phases).cos()

    def forward(self, inputs: Tensor) -> Tensor:
        """The read-out of the features, from (B, 1) to (B, 1)."""
        return self.read_out(self.features(inputs))


@dataclass(frozen=True)
class RandomFeatures(ReferenceProblem):
    """Bayesian linear regression on 300 random cosine features, from 1-d data with a gap in the inputs.

    This is a Gaussian process, whose exact posterior comes from the kernel ΦΦᵀ of these features, not from its limit.
    """

    width: int = 300
    """features F, and weights: more than there are data"""
    length_scale: float = 0.7
    """of the kernel in the limit of many features"""
    noise: float = 0.1
    """standard deviation of the targets' noise, known"""

    @property
    def likelihood(self) -> Likelihood:
        """Gaussian with the known noise."""
        return Gaussian(scale=self.noise)

    def data(self) -> ProblemData:
        """The data of the gap problem, N = 100."""
        return gap_data(100, self.noise)

    def model(self) -> CosineFeatures:
        """The features, always the same, under a fresh read-out."""
        return CosineFeatures(self.width, self.length_scale)

    def exact(self, data: ProblemData) -> dict[str, GaussianOutputs]:
        """By the kernel ΦΦᵀ of the finite network, in function space."""
        model, inputs = self.model(), data.train.inputs
        assert isinstance(inputs, Tensor)
        rows = model.features(inputs).double()
        found = {}
        for name, asked in data.regions.items():
            at = model.features(asked).double()
            moments = function_space(at @ rows.T, rows @ rows.T, at.square().sum(-1), data.train.targets, self.noise)
            found[name] = GaussianOutputs(*moments)
        return found
