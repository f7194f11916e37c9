"""How far one posterior is from another, seen in what they predict: pure functions of predictives.

The first argument is the approximation, the second the reference: a long Markov chain, or a posterior in closed form.
Weights are not compared, since a network has many that mean the same. Finite draws have a distance of their own: L
independent draws of the reference itself are about 1/√L standard deviations away from it in `wasserstein`.

Letters: L draws of the approximation, M of the reference, B inputs, K function values of an input.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.evaluate.checks import check_categorical, check_finite, check_gaussian, check_predictive
from bayesformer.likelihoods.categorical import centred
from bayesformer.likelihoods.predictive import CategoricalPredictive, GaussianPredictive, Predictive

QUANTILES = 400
"""Values that stand for a Gaussian over a function value, at equally spaced levels."""
CELLS = 400
"""Cells of the real line in which two predictive densities are compared."""
AT_ONCE = 2**23
"""Numbers in memory together while densities are compared."""


class Fidelity(NamedTuple):
    """Scores of a posterior against the reference at one set of inputs."""

    wasserstein: float  # mean over function values, in standard deviations of the reference
    mean_error: float  # root mean square distance of the means, in the same unit
    spread_ratio: float  # median ratio of the standard deviations
    rank_error: float  # 0 if the draws' ranks in the reference are uniform, .25 for a point at its median, at most .5
    agreement: float | None  # share of inputs with the same most probable class; None without classes
    total_variation: float  # mean over inputs, between the predictive distributions of a target


def fidelity(predictive: Predictive, reference: Predictive) -> Fidelity:
    """All scores of a predictive against the reference's at the same inputs."""
    ours, theirs = function_values(predictive), function_values(reference)
    shift, _ = mean_and_spread_gaps(ours, theirs)
    classes = isinstance(predictive, CategoricalPredictive)
    return Fidelity(
        wasserstein(ours, theirs).mean().item(),
        shift.square().mean().sqrt().item(),
        spread_ratio(ours, theirs).median().item(),
        rank_error(ours, theirs).mean().item(),
        agreement(predictive, reference) if classes else None,  # type: ignore[arg-type]
        total_variation(predictive, reference).mean().item(),
    )


def function_values(predictive: Predictive) -> Tensor:
    """(L, B, ..., K), float64: draws of the function behind a predictive.

    Of classes: logits, centred over the classes since softmax sees no more of them; of two classes the one log odds.
    Of real values: means. Where a component is itself a Gaussian over its mean (`spreads`), its `QUANTILES` quantiles.
    """
    check_predictive(predictive)
    if isinstance(predictive, CategoricalPredictive):
        logits = predictive.log_probs.detach().double()
        check_finite("predictive.log_probs", logits)
        if logits.shape[-1] == 2:
            return logits[..., 1:] - logits[..., :1]
        return centred(logits)
    check_gaussian(predictive)
    assert isinstance(predictive, GaussianPredictive)
    means = predictive.means.detach().double()
    if predictive.spreads is None:
        return means
    levels = (torch.arange(QUANTILES, dtype=torch.float64, device=means.device) + 0.5) / QUANTILES
    z = torch.special.ndtri(levels).view(-1, *[1] * means.dim())
    return (means + z * predictive.spreads.detach().double().sqrt()).flatten(0, 1)  # (QUANTILES · L, B, ..., K)


def wasserstein(draws: Tensor, reference: Tensor) -> Tensor:
    """(...): the Wasserstein-2 distance of two sets of draws (L, ...) and (M, ...), one function value at a time, over
    the reference's standard deviation:

        √ ∫₀¹ (F⁻¹(u) - G⁻¹(u))² du / sd_G

    exact for empirical distributions of any two sizes. NaN or infinite where the reference does not vary.
    """
    _check_draws(draws, reference)
    ours, theirs = draws.double().sort(0).values, reference.double().sort(0).values
    count, other = len(ours), len(theirs)
    device = ours.device
    # where a quantile function jumps, in units of 1 / (L M)
    jumps = torch.arange(1, count + 1, device=device) * other, torch.arange(1, other + 1, device=device) * count
    ends = torch.cat(jumps).unique()
    widths = ends.diff(prepend=ends.new_zeros(1)).double() / (count * other)
    squares = (ours[(ends - 1) // other] - theirs[(ends - 1) // count]).square()  # (L + M at most, ...)
    squared = (widths.view(-1, *[1] * (ours.dim() - 1)) * squares).sum(0)
    return squared.sqrt() / theirs.std(0, correction=0)


def mean_and_spread_gaps(draws: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Differences of mean and of standard deviation, each (...), in standard deviations of the reference.

    By squares they are at most the square of `wasserstein`, and equal to it between Gaussians.
    """
    _check_draws(draws, reference)
    ours, theirs = draws.double(), reference.double()
    scale = theirs.std(0, correction=0)
    return (ours.mean(0) - theirs.mean(0)) / scale, (ours.std(0, correction=0) - scale) / scale


def spread_ratio(draws: Tensor, reference: Tensor) -> Tensor:
    """(...): standard deviation of the draws over that of the reference; 1 is right, below 1 too sure."""
    return 1 + mean_and_spread_gaps(draws, reference)[1]


def ranks(draws: Tensor, reference: Tensor) -> Tensor:
    """(L, ...): share of the reference's draws below each draw, ties counted half; uniform if the laws are equal."""
    _check_draws(draws, reference)
    ours = draws.double().flatten(1).T.contiguous()  # (Q, L)
    theirs = reference.double().flatten(1).T.contiguous().sort(-1).values  # (Q, M)
    below = torch.searchsorted(theirs, ours) + torch.searchsorted(theirs, ours, right=True)
    return (below.double() / (2 * len(reference))).T.view(draws.shape)


def rank_error(draws: Tensor, reference: Tensor) -> Tensor:
    """(...): area between the distribution function of the ranks and the diagonal, ∫ |F(t) - t| dt.

    0 for equal laws, .25 for a point at the reference's median, .5 for draws that all lie outside of it.
    """
    levels = ranks(draws, reference).sort(0).values  # (L, ...)
    count = len(levels)
    steps = torch.arange(count + 1, dtype=torch.float64, device=levels.device).view(-1, *[1] * (levels.dim() - 1))
    low, high = steps[:-1] / count, steps[1:] / count
    # ∫ |level - t| dt over (low, high): whole on one side of the level, or both sides of it
    left, right = (levels - low).clamp(0, 1 / count), (high - levels).clamp(0, 1 / count)
    outside = torch.where(levels < low, low - levels, torch.where(levels > high, levels - high, 0.0))
    return (outside / count + (left.square() + right.square()) / 2).sum(0)


def rank_histogram(draws: Tensor, reference: Tensor, bins: int = 10) -> Tensor:
    """(bins,): share of all ranks in bins of equal width; a hump in the middle is a spread too small, a valley one too
    large, a slope a shifted mean."""
    if bins < 1:
        raise ValueError(f"bins must be a whole number, at least 1; got {bins}.")
    where = (ranks(draws, reference).flatten() * bins).long().clamp_max(bins - 1)
    return torch.bincount(where, minlength=bins).double() / len(where)


def agreement(predictive: CategoricalPredictive, reference: CategoricalPredictive) -> float:
    """Share of inputs whose most probable class is the same; Izmailov et al. (2021), section 3."""
    _check_same_questions(predictive, reference)
    return (predictive.labels == reference.labels).double().mean().item()


def total_variation(predictive: Predictive, reference: Predictive) -> Tensor:
    """(B, ...): ½ Σ |p - q| of the predictive distributions of a target; Izmailov et al. (2021), section 3.

    Of real values ½ ∫ |p - q|, by the probabilities of `CELLS` equal cells: from below, and exact as they become fine;
    of several values of one question the mean over them.
    """
    _check_same_questions(predictive, reference)
    if isinstance(predictive, CategoricalPredictive) and isinstance(reference, CategoricalPredictive):
        return 0.5 * (predictive.probs.double() - reference.probs.double()).abs().sum(-1)
    assert isinstance(predictive, GaussianPredictive)
    assert isinstance(reference, GaussianPredictive)
    low = torch.minimum(_ends(predictive, -1), _ends(reference, -1))  # (Q,)
    high = torch.maximum(_ends(predictive, 1), _ends(reference, 1))
    steps = torch.linspace(0, 1, CELLS + 1, dtype=torch.float64, device=low.device)
    edges = low + steps[:, None] * (high - low)  # (CELLS + 1, Q)
    difference = _distribution(predictive, edges).diff(dim=0) - _distribution(reference, edges).diff(dim=0)
    return 0.5 * difference.abs().sum(0).view(predictive.mean.shape).mean(-1)


def _ends(predictive: GaussianPredictive, side: int) -> Tensor:
    """(Q,): six standard deviations beyond every component, to one side."""
    ends = predictive.means.double() + side * 6 * predictive.widths.double().sqrt()
    return (ends.amax(0) if side > 0 else ends.amin(0)).flatten()


def _distribution(predictive: GaussianPredictive, edges: Tensor) -> Tensor:
    """(E, Q): distribution function of the mixture at E edges of every function value, some values at a time."""
    means, scales = predictive.means.double().flatten(1), predictive.widths.double().sqrt().flatten(1)  # (L, Q)
    size = max(1, AT_ONCE // (len(means) * len(edges)))
    parts = zip(means.split(size, 1), scales.split(size, 1), edges.split(size, 1), strict=True)
    return torch.cat([torch.special.ndtr((e[:, None] - m) / s).mean(1) for m, s, e in parts], 1)


def _check_draws(draws: Tensor, reference: Tensor) -> None:
    if draws.dim() < 1 or reference.dim() < 1 or not len(draws) or not len(reference):
        got = f"shapes {tuple(draws.shape)} and {tuple(reference.shape)}"
        raise ValueError(f"draws and reference must hold at least one draw each, (L, ...) and (M, ...); got {got}.")
    if draws.shape[1:] != reference.shape[1:]:
        raise ValueError(
            f"draws must be of the reference's function values, (L, ...) with ... = {tuple(reference.shape[1:])}; "
            f"got {tuple(draws.shape)}."
        )
    check_finite("draws", draws)
    check_finite("reference", reference)


def _check_same_questions(predictive: Predictive, reference: Predictive) -> None:
    if type(predictive) is not type(reference):
        kinds = f"{type(predictive).__name__} and {type(reference).__name__}"
        raise ValueError(f"predictive and reference must be of one kind; got {kinds}.")
    check = check_categorical if isinstance(predictive, CategoricalPredictive) else check_gaussian
    check(predictive)
    check(reference)
    if predictive.shape != reference.shape:
        shapes = f"{tuple(predictive.shape)} and {tuple(reference.shape)}"
        raise ValueError(f"predictive and reference must be about the same questions; got shapes {shapes}.")
