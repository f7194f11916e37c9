"""Conformal prediction: sets, intervals and refusals whose error rate holds for any model, given exchangeable data.

Pure functions of probabilities, uncertainties and calibration targets. Guarantees are marginal: over a draw of the
calibration data and of one new example from the same source.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesformer.evaluate.checks import check_fraction, check_same_shape

PENALTY, FREE = 0.01, 5  # of regularised sets: what each class beyond the first few costs


def rank_of_quantile(count: int, level: float) -> int:
    """⌈(n + 1) level⌉: a new score is above the calibration score of this rank with probability at most 1 - level."""
    check_fraction("level", level)
    rank = math.ceil(round((count + 1) * level, 9))
    if rank > count:
        least = math.ceil(round(level / (1 - level), 9))
        raise ValueError(f"calibration data must have at least {least} examples for level={level}; got {count}.")
    return rank


def conformal_quantile(scores: Tensor, level: float) -> Tensor:
    """(...): the ⌈(n + 1) level⌉-th smallest of the calibration scores (n, ...), Vovk et al. (2005)."""
    return scores.double().sort(0).values[rank_of_quantile(len(scores), level) - 1]


def class_scores(probs: Tensor, uniforms: Tensor, penalty: float = PENALTY, free: int = FREE) -> Tensor:
    """(M, C): how unusual each class would be as the answer; regularised adaptive scores.

        s(y) = Σ_{more probable classes} p + u p(y) + penalty (rank(y) - free)₊,    u ~ U(0, 1)

    Romano, Sesia & Candès (2020), eq. 3, with the penalty of Angelopoulos et al. (2021), algorithm 2, which keeps long
    tails of improbable classes out of the sets. The uniform number of a question makes coverage exact.

    Args:
        probs: (M, C), averaged probabilities.
        uniforms: (M,), one random number per question.
        penalty: added for every rank beyond `free`.
        free: classes that cost nothing.
    """
    ordered, order = probs.double().sort(-1, descending=True)
    ranks = torch.arange(1, probs.shape[-1] + 1, dtype=torch.float64, device=probs.device)
    before = ordered.cumsum(-1) - ordered  # mass of the more probable classes
    values = before + uniforms.double().unsqueeze(-1) * ordered + penalty * (ranks - free).clamp_min(0)
    return torch.empty_like(values).scatter(-1, order, values)


def residual_scores(means: Tensor, variances: Tensor, targets: Tensor) -> Tensor:
    """(M, D): |y - mean| / sd of the predictive, for intervals that are wider where it is less certain."""
    check_same_shape("targets", targets, "means", means)
    return (targets.double() - means.double()).abs() / variances.double().sqrt()


def answer_threshold(uncertainty: Tensor, wrong: Tensor, limit: float) -> float:
    """The largest τ such that answering where uncertainty < τ is wrong with probability at most `limit`.

    Conformal risk control (Angelopoulos et al. 2024, theorem 1) for the loss "answered, and wrong", which can only
    grow with τ: with n calibration examples at most ⌊(n + 1) limit⌋ - 1 of them may be answered wrongly.

    Args:
        uncertainty: (n,), of the calibration examples.
        wrong: (n,), boolean: whether the answer to each would be wrong.
        limit: share of all questions, answered or not, that may be answered wrongly.
    """
    check_fraction("limit", limit)
    check_same_shape("wrong", wrong, "uncertainty", uncertainty)
    allowed = math.floor(round((len(wrong) + 1) * limit, 9)) - 1
    if allowed < 0:
        least = math.ceil(round(1 / limit, 9)) - 1
        raise ValueError(f"calibration data must have at least {least} examples for limit={limit}; got {len(wrong)}.")
    errors = uncertainty[wrong].double().sort().values
    return errors[allowed].item() if allowed < len(errors) else math.inf
