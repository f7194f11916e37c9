"""A small causal transformer on series whose next value is linear in the last one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from bayesformer.attention.multi_head import Linear
from bayesformer.core.seeds import generator
from bayesformer.data import Data
from bayesformer.datasets import toy
from bayesformer.likelihoods import Gaussian, Likelihood
from bayesformer.methods import Hmc, Method
from bayesformer.models.transformer import Encoder
from bayesformer.reference.problem_kind import ProblemData, ReferenceProblem
from bayesformer.train.training import Training


class NextMean(nn.Module):
    """Real series (B, T, 1) in, the mean of the next value at every position out, (B, T, 1)."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.embedding, self.encoder = Linear(1, encoder.dim), encoder
        self.projection = Linear(encoder.dim, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """The mean of every next value; the output layer is scaled by 1/√D, so that N(0, 1) weights give values of
        size 1."""
        return self.projection(self.encoder(self.embedding(inputs)) / math.sqrt(self.encoder.dim))


@dataclass(frozen=True)
class CausalSeries(ReferenceProblem):
    """A causal transformer of about two thousand weights on the toy series M1; long HMC."""

    examples: int = 30
    """training series"""
    length: int = 8
    """predicted steps of a series"""
    dim: int = 16
    """width of the transformer"""
    heads: int = 1
    """attention heads"""
    mlp_ratio: int = 2
    """hidden width of the MLP over that of the transformer"""
    asked: int = 16
    """series of each region"""

    @property
    def process(self) -> toy.Series:
        """The series M1, linear in the last value."""
        return toy.SERIES["m1"]

    @property
    def likelihood(self) -> Likelihood:
        """Gaussian with the noise of the process."""
        return Gaussian(scale=math.sqrt(self.process.noise))

    def data(self) -> ProblemData:
        """Series of M1; "out" are series three times as large."""

        def part(name: str, count: int) -> Data:
            return toy.generate(self.process, count, generator(0, "reference series", name), self.length)

        train, inside, outside = part("train", self.examples), part("in", self.asked), part("out", self.asked)
        assert isinstance(inside.inputs, Tensor)
        assert isinstance(outside.inputs, Tensor)
        assert train.mask is not None
        assert bool(train.mask.all())  # M1 needs one value of the past, so that every position counts
        return ProblemData(Data(train.inputs, train.targets), {"in": inside.inputs, "out": 3 * outside.inputs})

    def model(self) -> nn.Module:
        """One causal block that predicts the mean of the next value."""
        return NextMean(Encoder(self.dim, 1, self.heads, mlp_ratio=self.mlp_ratio, causal=True, max_length=self.length))

    @property
    def training(self) -> Training:
        """The learning rate of the toy series, falling to 0."""
        return Training(lr=1e-2, schedule="cosine")

    @property
    def sampler(self) -> Method:
        """Trajectories about as long as the prior is wide, which the stiffest directions cut into many steps."""
        return Hmc(length=2.0, metric="diagonal", draws=300, thin=1, warm_up=100)
