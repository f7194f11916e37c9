"""A network with one hidden layer on 1-d data with a gap: the picture of Bayesian deep learning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from bayesformer.core.seeds import generator
from bayesformer.data import Data
from bayesformer.likelihoods import Gaussian, Likelihood
from bayesformer.methods import Hmc, Method
from bayesformer.models.tabular import FeatureTransformer
from bayesformer.models.transformer import Encoder
from bayesformer.reference.problem_kind import ProblemData, ReferenceProblem


def gap_data(examples: int, noise: float) -> ProblemData:
    """sin(2x) + .3x with noise, x in [-2, -1] and [1, 2]; asked about there, in between, and out to ±4."""
    source = generator(0, "gap", examples)
    x = 1 + torch.rand(examples, 1, generator=source)
    x[: examples // 2] *= -1
    y = (2 * x).sin() + 0.3 * x + noise * torch.randn(examples, 1, generator=source)

    def line(low: float, high: float, count: int) -> torch.Tensor:
        return torch.linspace(low, high, count)[:, None]

    regions = {
        "in": torch.cat([line(-2, -1, 20), line(1, 2, 20)]),
        "gap": line(-0.8, 0.8, 40),
        "out": torch.cat([line(-4, -2.25, 20), line(2.25, 4, 20)]),
    }
    return ProblemData(Data(x, y), regions)


@dataclass(frozen=True)
class GapNetwork(ReferenceProblem):
    """An MLP 1-50-1 with tanh on 1-d data with a gap; long HMC."""

    examples: int = 100
    """training examples N"""
    hidden: int = 50
    """hidden units"""
    noise: float = 0.1
    """standard deviation of the targets' noise, known"""

    @property
    def likelihood(self) -> Likelihood:
        """Gaussian with the known noise."""
        return Gaussian(scale=self.noise)

    def data(self) -> ProblemData:
        """Two clusters of inputs with a gap between them."""
        return gap_data(self.examples, self.noise)

    def model(self) -> nn.Module:
        """One hidden layer of tanh, from (B, 1) to (B, 1)."""
        return nn.Sequential(nn.Linear(1, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1))

    def attentive(self) -> nn.Module:
        """A transformer whose tokens are a class token and the input, from (B, 1) to (B, 1)."""
        return FeatureTransformer(Encoder(16, 1, 2, mlp_ratio=2, max_length=2), features=1, scales=False)

    @property
    def sampler(self) -> Method:
        """Trajectories about as long as the prior is wide, which the stiffest directions cut into many steps."""
        return Hmc(length=2.0, max_leapfrogs=1500, metric="diagonal", draws=150, thin=1, warm_up=60)
