"""Comparison with a process whose law is known.

No model can beat the true conditional in expected log-likelihood, so a score significantly above it means
that the future leaked into the prediction.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from bayesformer.core.errors import OracleBeatenError
from bayesformer.evaluate.checks import check_finite, check_gaussian, check_same_shape, check_vector
from bayesformer.likelihoods.predictive import GaussianPredictive

ROUNDING = 1e-3  # nats per sequence: float32 sums of tens of steps agree to about 1e-5


class Gap(NamedTuple):
    """Model minus oracle, in nats per sequence; at most 0 up to noise."""

    mean: float
    standard_error: float  # of the paired difference; infinite for one sequence, which says nothing
    z: float  # mean / standard error


def process_mse(predictive: GaussianPredictive, process_mean: Tensor, process_variance: Tensor) -> float:
    """E[(Y - X)²] of a model sample Y against an independent process sample X, given the same past.

        (E Y - E X)² + Var Y + Var X

    averaged over questions and values: in closed form, so without the noise of samples. A perfect model has
    2 Var X, not 0.
    """
    check_gaussian(predictive)
    _check_moment("process_mean", process_mean, predictive)
    _check_variance(process_variance, predictive)
    bias = (predictive.mean.double() - process_mean).square()
    return (bias + predictive.variance + process_variance).mean().item()


def variance_mse(predictive: GaussianPredictive, process_variance: Tensor) -> float:
    """E[(Var Y - Var X)²]: how far the predictive variance is from that of the process; perfect is 0."""
    check_gaussian(predictive)
    _check_variance(process_variance, predictive)
    return (predictive.variance.double() - process_variance).square().mean().item()


def oracle_gap(log_likelihood: Tensor, oracle_log_likelihood: Tensor) -> Gap:
    """Mean difference to the true conditional over the same sequences, both (B,).

    Paired: the sequences differ among themselves by far more than model and oracle differ on one of them.
    """
    check_vector("log_likelihood", log_likelihood)
    check_vector("oracle_log_likelihood", oracle_log_likelihood)
    check_same_shape("oracle_log_likelihood", oracle_log_likelihood, "log_likelihood", log_likelihood)
    difference = log_likelihood.detach().double() - oracle_log_likelihood.detach().double()
    mean = difference.mean().item()
    if len(difference) == 1:
        return Gap(mean, math.inf, 0.0)
    error = difference.std().item() / math.sqrt(len(difference))
    if error == 0:
        return Gap(mean, 0.0, math.copysign(math.inf, mean) if mean else 0.0)
    return Gap(mean, error, mean / error)


def check_not_above(gap: Gap, threshold: float = 4.0, label: str = "the model") -> None:
    """Raise `OracleBeatenError` when the gap is more than `threshold` standard errors above 0.

    A gap below `ROUNDING` is never raised: a model that is the oracle differs from it by rounding, whose
    standard error is as small.
    """
    if math.isnan(gap.mean) or math.isnan(gap.standard_error):
        raise ValueError(f"gap must not be NaN; got mean={gap.mean}, standard_error={gap.standard_error}.")
    if gap.mean > max(threshold * gap.standard_error, ROUNDING):
        raise OracleBeatenError(
            f"{label} scores {gap.mean:.4g} nats per sequence above the true process, "
            f"{gap.z:.1f} standard errors of {gap.standard_error:.2g} (allowed: {threshold:g}). "
            "Only a leak can do that: check that no prediction sees its own target."
        )


def _check_variance(process_variance: Tensor, predictive: GaussianPredictive) -> None:
    _check_moment("process_variance", process_variance, predictive)
    if bool((process_variance < 0).any()):
        raise ValueError(f"process_variance must not be negative; got {process_variance.min().item()}.")


def _check_moment(name: str, moment: Tensor, predictive: GaussianPredictive) -> None:
    check_same_shape(name, moment, "predictive.mean", predictive.mean)
    check_finite(name, moment)
