"""Whether a stated probability happens as often as it says.

Bins are half open, (low, high], and edges belong to the bin below. ECE is biased upwards: n questions of a
perfectly calibrated predictive still give about √(2 v / πn) in every bin, v the variance of one answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.evaluate.checks import check_classes, check_fraction, check_values
from bayesformer.likelihoods.predictive import CategoricalPredictive, GaussianPredictive

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


def ece(predictive: CategoricalPredictive, targets: Tensor, bins: int = 15) -> float:
    """Expected calibration error of the top label: Σ_b n_b/N |accuracy_b - confidence_b|.

    Bins of equal width (Guo et al. 2017, eq. 3).
    """
    confidence, correct = _top_label(predictive, targets)
    where = torch.bucketize(confidence, _even_edges(bins))
    return _mean_gap(where, confidence - correct)


def ece_adaptive(predictive: CategoricalPredictive, targets: Tensor, bins: int = 15) -> float:
    """ECE of the top label with as many questions in every bin (Nguyen & O'Connor 2015).

    Confidence crowds near 1, where bins of equal width see only one bin. Equal confidences share a bin, so
    that the order of the questions cannot matter.
    """
    confidence, correct = _top_label(predictive, targets)
    _check_bins(bins)
    last = (torch.arange(1, bins) * len(confidence) - 1) // bins  # of each bin but the top one
    edges = confidence.sort().values[last]
    where = torch.bucketize(confidence, edges)
    return _mean_gap(where, confidence - correct)


def ece_classwise(predictive: CategoricalPredictive, targets: Tensor, bins: int = 15) -> float:
    """ECE of every class's probability, not only the top one, averaged over the C classes.

    1/C Σ_c Σ_b n_cb/N |frequency_cb - probability_cb|: Kull et al. (2019), eq. 3. With many classes most
    probabilities are near 0 and so is this number: compare it only at equal C.
    """
    check_classes(predictive, targets)
    probs = predictive.probs.detach().double().flatten(0, -2)  # (N, C)
    classes = probs.shape[-1]
    truth = F.one_hot(targets.long().flatten(), classes)
    bin_of = torch.bucketize(probs, _even_edges(bins).to(probs.device))
    where = bin_of + bins * torch.arange(classes, device=probs.device)  # each class has bins of its own
    return _mean_gap(where.flatten(), (probs - truth).flatten())


def reliability(predictive: CategoricalPredictive, targets: Tensor, bins: int = 15) -> dict[str, list[float]]:
    """The reliability diagram: mean confidence, accuracy and number of questions of every non-empty bin."""
    confidence, correct = _top_label(predictive, targets)
    where = torch.bucketize(confidence, _even_edges(bins))
    count = torch.bincount(where, minlength=bins)
    kept = count > 0
    means = {
        name: (torch.bincount(where, values, minlength=bins) / count)[kept].tolist()
        for name, values in (("confidence", confidence), ("accuracy", correct))
    }
    return {**means, "count": count[kept].tolist()}


def interval_coverage(predictive: GaussianPredictive, targets: Tensor, level: float) -> float:
    """Share of targets inside the central interval that holds `level` of the predictive mass.

    Through the probability integral transform: y lies inside iff |F(y) - ½| ≤ level/2, F the mixture's CDF.
    """
    check_fraction("level", level)
    return _share_inside(_distance_from_median(predictive, targets), level)


def coverage_curve(
    predictive: GaussianPredictive, targets: Tensor, levels: Sequence[float] = LEVELS
) -> dict[str, list[float]]:
    """Coverage of central intervals at every level; calibrated is the diagonal."""
    if not levels:
        raise ValueError("levels must hold at least one level; got none.")
    for level in levels:
        check_fraction("levels", level)
    distance = _distance_from_median(predictive, targets)
    return {"levels": list(levels), "coverage": [_share_inside(distance, level) for level in levels]}


def _distance_from_median(predictive: GaussianPredictive, targets: Tensor) -> Tensor:
    check_values(predictive, targets)
    return (predictive.cdf(targets).double() - 0.5).abs()


def _share_inside(distance: Tensor, level: float) -> float:
    return (distance <= level / 2).double().mean().item()


def _top_label(predictive: CategoricalPredictive, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) probability of the most probable class, and (N,) whether it is the target."""
    check_classes(predictive, targets)
    confidence = predictive.probs.detach().double().amax(-1).flatten()
    return confidence.cpu(), (predictive.labels == targets).double().flatten().cpu()


def _mean_gap(where: Tensor, difference: Tensor) -> float:
    """Σ_b |Σ_{i in b} difference_i| / N, which is Σ_b n_b/N |mean difference of bin b|."""
    return (torch.bincount(where, difference).abs().sum() / len(where)).item()


def _even_edges(bins: int) -> Tensor:
    """The inner edges of `bins` bins of equal width: rounding above 1 or below 0 stays in the outer bins."""
    _check_bins(bins)
    return torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]


def _check_bins(bins: int) -> None:
    if bins < 1 or bins % 1:
        raise ValueError(f"bins must be a whole number, at least 1; got {bins}.")
