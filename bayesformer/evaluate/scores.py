"""How good a predictive is, as one number: proper scores, and the ones people ask for beside them.

A score of many questions is their mean, as a Python float; only `log_likelihood` answers per example,
since it is compared with the true process example by example.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.core.errors import unknown_name
from bayesformer.evaluate.checks import check_answers, check_classes, check_mask, check_values
from bayesformer.likelihoods.predictive import CategoricalPredictive, GaussianPredictive, Predictive, aligned

F1_AVERAGES = ("macro", "micro", "weighted")
PAIRS_AT_ONCE = 2**19  # (i, j) of `crps` at once: half of them are held, 2 MB a tensor, to stay in the cache


def log_likelihood(predictive: Predictive, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B,): log p(y_n | x_n), averaged over draws as a probability, summed over an example's positions.

    Positions outside the mask are never looked at: padding may hold any label, or NaN. An example with no
    counted position has log-likelihood 0. Predictions of next tokens take the labels as they were given for training.
    """
    predictive, targets, mask = aligned(predictive, targets, mask)
    if mask is None:
        check_answers(predictive, targets)
        log_prob = predictive.log_prob(targets)
    else:
        check_mask(mask, predictive.shape)
        counted, answers = predictive.select(mask), _counted_targets(targets, mask)
        check_answers(counted, answers)
        values = counted.log_prob(answers)  # (M,)
        log_prob = values.new_zeros(mask.shape).index_put((mask,), values)
    return log_prob.reshape(len(log_prob), -1).sum(-1)


def _counted_targets(targets: Tensor, mask: Tensor) -> Tensor:
    if targets.shape[: mask.dim()] != mask.shape:
        raise ValueError(f"targets must start with shape {tuple(mask.shape)}; got {tuple(targets.shape)}.")
    return targets[mask]


def accuracy(predictive: CategoricalPredictive, targets: Tensor) -> float:
    """Share of questions whose most probable class is the target."""
    check_classes(predictive, targets)
    return (predictive.labels == targets).double().mean().item()


def f1(predictive: CategoricalPredictive, targets: Tensor, average: str = "macro") -> float:
    """2 TP / (2 TP + FP + FN) of the most probable class, averaged over classes.

    "macro": every class alike; "weighted": by its number of targets; "micro": counts pooled first, which
    for one label per question is the accuracy. A class that is neither a target nor a prediction is left
    out: its F1 would be 0/0.
    """
    from sklearn.metrics import f1_score

    check_classes(predictive, targets)
    if average not in F1_AVERAGES:
        raise unknown_name("average", average, F1_AVERAGES)
    truth, labels = targets.long().flatten().cpu().numpy(), predictive.labels.flatten().cpu().numpy()
    return float(f1_score(truth, labels, average=average))


def brier(predictive: CategoricalPredictive, targets: Tensor) -> float:
    """Σ_c (p_c - 1[y = c])², from 0 to 2; proper, and unlike the log-likelihood bounded (Brier 1950)."""
    check_classes(predictive, targets)
    truth = F.one_hot(targets.long(), predictive.probs.shape[-1])
    return (predictive.probs.double() - truth).square().sum(-1).mean().item()


def mse(predictive: GaussianPredictive, targets: Tensor) -> float:
    """Squared error of the mixture's mean, averaged over questions and their values."""
    check_values(predictive, targets)
    return (predictive.mean.double() - targets).square().mean().item()


def rmse(predictive: GaussianPredictive, targets: Tensor) -> float:
    """Root of the mean squared error, in the units of the targets."""
    return math.sqrt(mse(predictive, targets))


def crps(predictive: GaussianPredictive, targets: Tensor) -> float:
    """Continuous ranked probability score: ∫ (F(x) - 1[y ≤ x])² dx = E|X - y| - ½ E|X - X'|.

    Exact for an equal mixture of L Gaussians (Grimit et al. 2006), with A(m, s²) = E|N(m, s²)|:

        1/L Σ_i A(y - μ_i, σ_i²)  -  1/(2L²) Σ_ij A(μ_i - μ_j, σ_i² + σ_j²)

    In the units of the targets; each of a question's D values is scored on its own, then averaged. The pairs
    are taken a few questions at a time: L = 100 draws of 10⁵ questions would be 10⁹ of them.
    """
    check_values(predictive, targets)
    draws = len(predictive.means)
    step = max(1, PAIRS_AT_ONCE // (draws * draws))
    parts = zip(
        predictive.means.detach().reshape(draws, -1).split(step, 1),  # (L, m) each
        predictive.widths.detach().reshape(draws, -1).split(step, 1),
        targets.reshape(-1).split(step),
        strict=True,
    )
    sums = [_mixture_crps(m.double(), w.double(), y.double()).sum().item() for m, w, y in parts]
    return sum(sums) / targets.numel()


def _mixture_crps(means: Tensor, widths: Tensor, targets: Tensor) -> Tensor:
    """(m,): CRPS of the mixtures (L, m). The double sum is twice its i < j, plus i = j: A(0, 2σ²) = 2σ/√π."""
    draws = len(means)
    i, j = torch.triu_indices(draws, draws, offset=1, device=means.device)
    between = 2 * _mean_abs(means[i] - means[j], widths[i] + widths[j]).sum(0)
    within = 2 / math.sqrt(math.pi) * widths.sqrt().sum(0)
    return _mean_abs(targets - means, widths).mean(0) - (between + within) / (2 * draws * draws)


def _mean_abs(mean: Tensor, variance: Tensor) -> Tensor:
    """E|N(m, s²)| = m (2Φ(m/s) - 1) + 2 s φ(m/s)."""
    sd = variance.sqrt()
    z = mean / sd
    return mean * torch.erf(z * math.sqrt(0.5)) + sd * (math.sqrt(2 / math.pi) * torch.exp(-0.5 * z * z))
