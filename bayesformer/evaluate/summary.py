"""Every scalar metric that a predictive and its targets allow, by the names of the catalogue."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from bayesformer.evaluate.calibration import ece, ece_adaptive, ece_classwise, interval_coverage
from bayesformer.evaluate.checks import check_predictive
from bayesformer.evaluate.scores import F1_AVERAGES, accuracy, brier, crps, f1, log_likelihood, rmse
from bayesformer.evaluate.selective import aurc, pavpu
from bayesformer.likelihoods.predictive import CategoricalPredictive, GaussianPredictive, Predictive, aligned

P = TypeVar("P", bound=Predictive)


def classification(
    predictive: CategoricalPredictive, targets: Tensor, mask: Tensor | None = None, bins: int = 15
) -> dict[str, float]:
    """All scores of class probabilities; AURC ranks by total entropy and counts errors.

    Predictions of next tokens take the labels as they were given for training.
    """
    predictive, targets, mask = aligned(predictive, targets, mask)
    scores = {"log_likelihood": mean_log_likelihood(predictive, targets, mask)}
    counted, answers = _counted(predictive, targets, mask)
    scores["accuracy"] = accuracy(counted, answers)
    scores |= {f"f1_{average}": f1(counted, answers, average) for average in F1_AVERAGES}
    scores["ece"] = ece(counted, answers, bins)
    scores["ece_classwise"] = ece_classwise(counted, answers, bins)
    scores["ece_adaptive"] = ece_adaptive(counted, answers, bins)
    scores["brier"] = brier(counted, answers)
    wrong = (counted.labels != answers).double()
    scores["aurc"] = aurc(counted.total.flatten(), wrong.flatten())
    if len(predictive.log_probs) > 1:
        scores["pavpu"] = pavpu(counted, answers)
    scores["epistemic_share"] = epistemic_share(counted)
    return scores


def regression(predictive: GaussianPredictive, targets: Tensor, mask: Tensor | None = None) -> dict[str, float]:
    """All scores of Gaussian mixtures; AURC ranks by total variance and counts squared errors."""
    scores = {"log_likelihood": mean_log_likelihood(predictive, targets, mask)}
    counted, answers = _counted(predictive, targets, mask)
    scores["crps"] = crps(counted, answers)
    scores["rmse"] = rmse(counted, answers)
    scores["coverage_90"] = interval_coverage(counted, answers, 0.9)
    scores["coverage_error_90"] = abs(scores["coverage_90"] - 0.9)
    squared_error = (counted.mean.double() - answers).square().mean(-1)
    scores["aurc"] = aurc(counted.total.flatten(), squared_error.flatten())
    scores["epistemic_share"] = epistemic_share(counted)
    return scores


def mean_log_likelihood(predictive: Predictive, targets: Tensor, mask: Tensor | None = None) -> float:
    """Mean over the examples with a counted position; the others are no examples, not examples of 0 nats."""
    predictive, targets, mask = aligned(predictive, targets, mask)
    values = log_likelihood(predictive, targets, mask)
    if mask is not None:
        values = values[mask.reshape(len(mask), -1).any(-1)]
    return values.double().mean().item()


def epistemic_share(predictive: Predictive) -> float:
    """Σ epistemic / Σ total uncertainty: a ratio of sums, since single totals may be 0. 0 if all are."""
    check_predictive(predictive)
    total, epistemic = predictive.total.double().sum().item(), predictive.epistemic.double().sum().item()
    return epistemic / total if total > 0 else 0.0


def _counted(predictive: P, targets: Tensor, mask: Tensor | None) -> tuple[P, Tensor]:
    """Predictions and targets where the mask is True, flattened."""
    return (predictive, targets) if mask is None else (predictive.select(mask), targets[mask])
