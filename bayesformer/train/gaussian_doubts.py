"""What a Gaussian over weights, once fitted, is checked for: its mode, its regime, and whether it has arrived."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.core.doubts import Doubt
from bayesformer.inference.linear_algebra import power_iteration
from bayesformer.laws import Diagonal, GaussianLaw
from bayesformer.train.coordinates import POWER, RISE, Coordinates
from bayesformer.train.full_batch import FullBatch
from bayesformer.train.mode_doubts import of_prior

DECREMENT = 0.3  # δ above which the mode is not found: .04 at most seen for linear models, .5 to .9 for networks
PAIRS, NUMBERS = 4, 64  # draws ±ε on all data: at least 4 pairs, and 64 numbers ε in them for few weights
FAR = 2.0  # rise of U under draws, over that of a Gaussian: as for ρ
MOVES = 0.3  # standard deviations that the mean has to go
GROWS = 0.25  # that the logarithm of the standard deviations has to go, on average over the weights
ERRORS = 3  # standard errors that both are given
FEWEST = 0.1  # weights that the data determine, at least


class Arrival(NamedTuple):
    """Where a Gaussian q stands on U / τ, from pairs of draws over all data."""

    rise: float  # mean rise of the negative log-likelihood under draws of q, over that of a Gaussian posterior
    rise_error: float  # its standard error
    mean_step: float  # root mean square of q's root times E_q[∇U] / τ: how far the mean has to go, in sds of q
    growth: float  # mean over the weights of ½ ∂ELBO / ∂log σ, which is how far log σ has to go
    growth_error: float  # its standard error


def arrival(batch: FullBatch, law: GaussianLaw, prior_precision: Tensor, temperature: float, seed: int) -> Arrival:
    """Pairs of draws and the gradients there.

    At the optimum of the evidence lower bound of q = N(μ, L Lᵀ) with diagonal or dense L, E_q[∇U] = 0 and
    E_q[(θ - μ)ᵀ ∇U] = P τ (Opper & Archambeau 2009, section 3). The square of E_q[∇U] is estimated by products of
    different pairs, so that the noise of the draws is not in it. Under draws of the best Gaussian, of any form, the
    negative log-likelihood rises by ½ τ Σ_i (1 - Π_i Σ_ii / τ): half the number of weights that the data determine.
    The prior's share is left out, for it would hide a loss of likelihood where most weights are the prior's, and the
    data determine no more weights than they have targets.
    """

    def prior(theta: Tensor) -> float:
        return float(batch.prior.log_prob(theta).double())

    base, rises, works, steps = batch.potential(law.mean) + prior(law.mean), [], [], []
    pairs = max(PAIRS, -(-NUMBERS // law.size))
    for draw in range(pairs):
        away = law.row(draw, seed) - law.mean
        (above, uphill), (below, downhill) = (batch.slope(law.mean + side) for side in (away, -away))
        rises.append((above + below + prior(law.mean + away) + prior(law.mean - away)) / 2 - base)
        works.append(float(away.double() @ (uphill - downhill).double()) / 2)
        mean = (uphill + downhill) / 2
        white = [block.times_root(mean[place]) for place, block in zip(law.places, law.blocks, strict=True)]
        steps.append(torch.cat(white).double())
    rows, scale = torch.stack(steps), law.size * temperature
    products = rows.sum(0).square().sum() - rows.square().sum()
    determined = float((1 - prior_precision * law.variance() / temperature).clamp_min(0).double().sum())
    determined = min(determined, batch.targets)
    losses = torch.tensor(rises, dtype=torch.float64, device="cpu") * 2 / (temperature * max(determined, FEWEST))
    growths = 0.5 * (1 - torch.tensor(works, dtype=torch.float64, device="cpu") / scale)
    return Arrival(
        rise=float(losses.mean()),
        rise_error=float(losses.std()) / pairs**0.5,
        mean_step=math.sqrt(max(float(products) / (pairs * (pairs - 1) * law.size), 0.0)) / temperature,
        growth=float(growths.mean()),
        growth_error=float(growths.std()) / pairs**0.5,
    )


def mode_doubts(found: Coordinates) -> list[Doubt]:
    """Whether the mode was found at all, where that is known."""
    if not found.decrement > DECREMENT:
        return []
    sentence = (
        f"The mode was not found: the weights are still about {found.decrement:.2g} posterior standard deviations from "
        "it. Train for more epochs (training.epochs) before believing the mean or the spread."
    )
    return [Doubt("mode", sentence, found.decrement, DECREMENT)]


def regime_doubts(found: Coordinates, family: str) -> list[Doubt]:
    """A Gaussian around one mode where the posterior is a network's."""
    if found.regime == "gaussian":
        return []
    if found.rise is None:
        why, value = "This is a network, with too many weights or too much noise to test its posterior", None
    else:
        why, value = (
            f"This is a network: draws of the Gaussian at its mode raise the loss {found.rise:.2g} times as",
            1.0,
        )
        why, value = why + " much as they should", found.rise
    sentence = (
        f"{why}. A {family} Gaussian around one mode is not its posterior: usually too wide inside the data and too "
        "narrow elsewhere. Compare with Sghmc(), or with Laplace(predictive='linearised')."
    )
    return [Doubt("regime", sentence, value, RISE)]


def arrival_doubts(found: Arrival, largest: float, variational: bool = True, network: bool = False) -> list[Doubt]:
    """Whether draws of q are as good as its mean promises and, of a variational law, whether its bound still rises.

    `largest` is the largest curvature in units of q's: a mean step over its root is at most the distance that is left,
    in standard deviations of the posterior.
    """
    if not found.rise - ERRORS * found.rise_error <= FAR:
        sentence = (
            f"Draws of this Gaussian score far below its mean: they raise the loss {found.rise:.2g} times as much as "
            "those of a Gaussian posterior would. Its spread is too wide to be sampled: use predictive='linearised'"
            f"{', a temperature below 1,' if variational else ''} or Sghmc()."
        )
        return [Doubt("draws", sentence, found.rise, FAR)]
    far, grows = found.mean_step / max(largest, 1.0) ** 0.5, abs(found.growth) - ERRORS * found.growth_error
    if not variational:
        return [] if network else of_mean(far)
    if far <= MOVES and grows <= GROWS:
        return []
    sentence = (
        f"The evidence lower bound still rises: the mean has at least {far:.2g} standard deviations to go, and their "
        f"size a factor of about {math.exp(min(found.growth, 50.0)):.2g}. "
    )
    wider = "With more epochs it will be wider, which on networks often predicts worse."
    sentence += wider if network else "Give it more epochs."
    value, threshold = (far, MOVES) if far > MOVES else (found.growth, GROWS)
    return [Doubt("elbo", sentence, value, threshold)]


def of_mean(far: float) -> list[Doubt]:
    """A doubt where the mean of a skewed posterior is more than .3 standard deviations from the mode."""
    if not far > MOVES:
        return []
    sentence = (
        f"The posterior is skewed: its mean is about {far:.2g} standard deviations from its mode, where this Gaussian "
        "stands. Where the mean matters use Vi(), Vi(kind='dense') or Sghmc(), which find it."
    )
    return [Doubt("mean", sentence, far, MOVES)]


def skewness(batch: FullBatch, law: GaussianLaw, temperature: float, seed: int) -> float | None:
    """How far the mean of the posterior is from the mode that the law is around, in standard deviations.

    Of models whose outputs are linear in their weights, where gradients of all data are cheap; None for others. The
    standard deviations of a diagonal law are narrower than the posterior's, by at most the root of the largest
    curvature in their units.
    """
    if not (temperature > 0 and law.blocks and batch.is_objective and batch.is_cheap and batch.is_linear()):
        return None
    found, largest = arrival(batch, law, batch.prior.precision(law.mean), temperature, seed), 1.0
    if all(isinstance(block, Diagonal) for block in law.blocks):
        times = batch.hessian(law.mean)
        largest = power_iteration(lambda v: law.sd * times(law.sd * v), law.mean, iterations=POWER).value / temperature
    return found.mean_step / max(largest, 1.0) ** 0.5


def gaussian_doubts(
    found: Coordinates,
    batch: FullBatch,
    law: GaussianLaw,
    *,
    temperature: float,
    family: str,
    seed: int,
    variational: bool = True,
) -> Sequence[Doubt]:
    """All of them, for a law over the inferred weights."""
    doubts = [*mode_doubts(found), *regime_doubts(found, family), *of_prior(found.heavy)]
    if temperature > 0 and law.blocks:
        where = arrival(batch, law, found.prior_precision, temperature, seed)
        rising = variational and batch.is_objective  # the bound that is ascended under dropout is another one
        doubts += arrival_doubts(where, found.largest, rising, found.regime == "network")
    return doubts
