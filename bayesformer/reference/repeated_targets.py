"""Problems with many independent targets at the same inputs: N is large for a method, and small for the reference.

With Gaussian noise of known standard deviation σ the R targets of an input enter the likelihood by their mean alone,
which has the noise σ/√R: the posterior is exactly that of the means. A method that takes minibatches sees all N = 100 R
examples; the reference is made from the 100 means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesformer.core.seeds import generator
from bayesformer.data import Data
from bayesformer.likelihoods import Gaussian, Likelihood
from bayesformer.reference.causal_series import CausalSeries
from bayesformer.reference.gap_network import GapNetwork, gap_data
from bayesformer.reference.problem_kind import ProblemData


def repeated(data: ProblemData, mean: Tensor, noise: float, repeats: int) -> ProblemData:
    """The inputs of the data, each with `repeats` targets drawn around the mean of its own."""
    inputs = data.train.inputs
    assert isinstance(inputs, Tensor)
    source = generator(0, "repeated targets")
    many = mean.repeat_interleave(repeats, 0)
    targets = many + noise * torch.randn(many.shape, generator=source)
    return ProblemData(Data(inputs.repeat_interleave(repeats, 0), targets), data.regions)


def condensed(data: ProblemData, noise: float, repeats: int) -> tuple[ProblemData, Likelihood]:
    """One example per distinct input with the mean of its targets, and the likelihood of means."""
    inputs, targets = data.train.inputs, data.train.targets
    assert isinstance(inputs, Tensor)
    means = targets.unflatten(0, (-1, repeats)).mean(1)
    return ProblemData(Data(inputs[::repeats], means), data.regions), Gaussian(scale=noise / repeats**0.5)


@dataclass(frozen=True)
class RepeatedGapNetwork(GapNetwork):
    """An MLP 1-50-1 with tanh on 1-d data with a gap, ten targets at each of 100 inputs; long HMC."""

    noise: float = 0.3
    """standard deviation of the targets' noise, known"""
    repeats: int = 10
    """targets at each input"""

    def data(self) -> ProblemData:
        """Two clusters of inputs with a gap between them, every input several times."""
        plain = gap_data(self.examples, self.noise)
        x = plain.train.inputs
        assert isinstance(x, Tensor)
        return repeated(plain, (2 * x).sin() + 0.3 * x, self.noise, self.repeats)

    def condensed(self, data: ProblemData) -> tuple[ProblemData, Likelihood]:
        """The means of the targets at every input."""
        return condensed(data, self.noise, self.repeats)


@dataclass(frozen=True)
class RepeatedCausalSeries(CausalSeries):
    """A causal transformer of about two thousand weights, ten sets of targets for each of 100 series; long HMC."""

    examples: int = 100
    """training series that differ"""
    repeats: int = 10
    """sets of targets for each series"""

    def data(self) -> ProblemData:
        """Series of M1, each with several draws of the values that follow its positions."""
        plain = super().data()
        inputs = plain.train.inputs
        assert isinstance(inputs, Tensor)
        return repeated(plain, self.process.conditional(inputs).mean, self.process.noise**0.5, self.repeats)

    def condensed(self, data: ProblemData) -> tuple[ProblemData, Likelihood]:
        """The means of the targets of every series."""
        return condensed(data, self.process.noise**0.5, self.repeats)
