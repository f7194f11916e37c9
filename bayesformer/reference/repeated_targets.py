"""Problems with many independent targets at the same inputs: N is large for a method, and small for the reference.

With Gaussian noise of known standard deviation σ the R targets of an input enter the likelihood by their mean alone,
which has the noise σ/√R: the posterior is exactly that of the means. A method that takes minibatches sees all N = 100 R
examples; the reference is made from the 100 means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayesformer.core.seeds import generator
from bayesformer.data import Data
from bayesformer.likelihoods import Gaussian, Likelihood
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
