"""One factor on the variance of a Gaussian over outputs, fitted on data that were not trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from bayesformer.core.types import GaussianOutputs
from bayesformer.likelihoods import Likelihood

BOUNDS = (-10.0, 10.0)  # of log c


@dataclass(frozen=True)
class ScaleFit:
    """The factor c that covariances are divided by, and what it gained: mean negative log predictive at 1 and at c."""

    c: float
    before: float
    after: float

    def apply(self, outputs: GaussianOutputs) -> GaussianOutputs:
        """Outputs with the covariance divided by c."""
        return scaled_outputs(outputs, self.c)


def scaled_outputs(outputs: GaussianOutputs, c: float) -> GaussianOutputs:
    """The same means, covariances over c."""
    factor = None if outputs.factor is None else outputs.factor / math.sqrt(c)
    return GaussianOutputs(outputs.mean, outputs.diagonal / c, factor)


def mean_negative_log_predictive(
    outputs: GaussianOutputs, targets: Tensor, likelihood: Likelihood, mask: Tensor | None = None
) -> float:
    """-log p(y | x) averaged over the targets that count."""
    predictive, answers = likelihood.pairs(likelihood.predictive(outputs), targets, mask)
    return -float(predictive.log_prob(answers).double().mean())


def fit_scale(
    outputs: GaussianOutputs, targets: Tensor, likelihood: Likelihood, mask: Tensor | None = None
) -> ScaleFit:
    """Minimise the mean negative log predictive over log c, on validation data.

    Li et al. (2025) divide the variance by one such factor. It works for any Gaussian over outputs, so that ways of
    getting one can be compared fairly. c stays 1 where no other value is better.
    """

    def loss(log_c: float) -> float:
        return mean_negative_log_predictive(scaled_outputs(outputs, math.exp(log_c)), targets, likelihood, mask)

    from scipy.optimize import minimize_scalar

    before = loss(0.0)
    found = minimize_scalar(loss, bounds=BOUNDS, method="bounded", options={"xatol": 1e-3})
    best = (math.exp(found.x), float(found.fun)) if found.fun < before else (1.0, before)
    return ScaleFit(best[0], before, best[1])
