"""Answering only when sure: what is left of the error when the uncertain questions are passed on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.evaluate.checks import check_classes, check_fraction, check_same_shape, check_vector
from bayesformer.likelihoods.predictive import CategoricalPredictive


class RiskCoverage(NamedTuple):
    """Risk among the most certain questions, by the share of questions answered."""

    coverage: Tensor  # (n,): 1/n, 2/n, ..., 1
    risk: Tensor  # (n,): mean loss of that many most certain questions


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    """Mean loss of the k most certain questions, for every k (Geifman & El-Yaniv 2017).

    Equally uncertain questions come in no order: each counts the mean loss of its group, which is the
    expectation over their random order.
    """
    check_vector("uncertainty", uncertainty)
    check_vector("loss", loss)
    check_same_shape("loss", loss, "uncertainty", uncertainty)
    _, group, size = uncertainty.unique(return_inverse=True, return_counts=True)
    group_loss = torch.bincount(group, loss.detach().double()) / size
    answered = torch.arange(1, len(loss) + 1, device=loss.device)
    risk = group_loss.repeat_interleave(size).cumsum(0) / answered  # most certain first
    return RiskCoverage(answered.double() / len(loss), risk)


def aurc(uncertainty: Tensor, loss: Tensor) -> float:
    """Area under the risk-coverage curve, 1/n Σ_k risk_k."""
    return risk_coverage(uncertainty, loss).risk.mean().item()


def eaurc(uncertainty: Tensor, loss: Tensor) -> float:
    """AURC above that of the best order, which answers questions by rising loss.

    0 iff the uncertainty ranks the losses perfectly, whatever the accuracy. The best area is computed, not
    approximated as in Geifman et al. (2019).
    """
    return aurc(uncertainty, loss) - aurc(loss, loss)


def pavpu(predictive: CategoricalPredictive, targets: Tensor, threshold: float = 0.05) -> float:
    """Patch accuracy versus patch uncertainty: (n_accurate,certain + n_inaccurate,uncertain) / n.

    A question is certain iff a t-test between the L draws' probabilities of its two top classes has
    p < threshold (Fan et al. 2020, after Mukhoti & Gal 2018). More draws make every question more certain:
    compare it only at equal L.
    """
    check_classes(predictive, targets)
    check_fraction("threshold", threshold)
    draws, classes = len(predictive.log_probs), predictive.log_probs.shape[-1]
    if draws < 2:
        raise ValueError(f"predictive must have at least 2 draws, PAvPU is undefined otherwise; got {draws}.")
    if classes < 2:
        raise ValueError(f"predictive must have at least 2 classes to compare; got {classes}.")
    certain = _top_two_p_values(predictive) < threshold
    return (certain == (predictive.labels == targets)).double().mean().item()


def _top_two_p_values(predictive: CategoricalPredictive) -> Tensor:
    """(B, ...): p-value of Welch's two-sample t-test between the draws of the two most probable classes.

    A draw is known up to rounding, so every variance gets that of its dtype. Identical draws are then
    certain, unless the two classes differ by no more than rounding.
    """
    from scipy.stats import ttest_ind_from_stats

    log_probs = predictive.log_probs.detach()
    top = predictive.log_mean.detach().topk(2, -1).indices  # (B, ..., 2)
    probs = log_probs.gather(-1, top.expand(len(log_probs), *top.shape)).double().exp()  # (L, B, ..., 2)
    rounding = torch.finfo(log_probs.dtype).eps
    mean = probs.mean(0).cpu().numpy()
    sd = (probs.var(0) + rounding**2).sqrt().cpu().numpy()
    n = len(probs)
    test = ttest_ind_from_stats(mean[..., 0], sd[..., 0], n, mean[..., 1], sd[..., 1], n, equal_var=False)
    return torch.as_tensor(test.pvalue, device=log_probs.device)
