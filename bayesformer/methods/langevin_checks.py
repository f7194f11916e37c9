"""What a sampler can say of its own chains: before they run, and from what they left behind."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesformer.core.doubts import Doubt
from bayesformer.core.seeds import generator
from bayesformer.inference.affine import Root
from bayesformer.inference.diagnostics import effective_sample_size
from bayesformer.inference.whitened import WhitenedState, configuration
from bayesformer.methods.pace import Pace
from bayesformer.train.coordinates import RISE, Coordinates, full_batch
from bayesformer.train.members import Fitted
from bayesformer.train.mode_doubts import of_prior

if TYPE_CHECKING:
    from bayesformer.methods.chain_run import ChainRun
    from bayesformer.train.recipe import SubsetStage

FEWEST = 10.0  # independent draws that a forecast must promise
SLOWEST = 3.0  # of them along the direction that the data determine least
WORTH = 8.0  # effective draws, median over weights: below, 83 % of slow chains and 2 % of good ones
HOT = 1.6  # configurational temperature: above, all chains that batches heated and no good one
WARM = 1.2  # above which gradients of all data decide, which measure the variance itself:
HOT_BY_ALL, ERRORS = 1.35, 3  # a limit for standard deviations 1.16 times too wide, or so many standard errors
LOOKS, MOST_LOOKS, NUMBERS = 24, 100, 400  # draws at which they are taken, one epoch each: more for few axes
LOOKED_AT = 256  # weights whose draws are looked at
COLD = 0.9  # of the variance, in the direction that a thermostat cools most
ENOUGH = 20  # kept draws of a chain below which they cannot tell


def before(run: ChainRun, found: Coordinates, pace: Pace, epochs: int) -> list[Doubt]:
    """What the forecast says before a chain runs: too short, or with directions that it cannot reach."""
    if run.method.temperature == 0 or run.method.cycles:
        return of_cycles(run)
    kept = (1 - run.method.burn_in) * epochs * run.chains
    typical = kept / pace.integrated()
    if found.regime == "network":
        return [_network(pace, kept, found.rise)]
    doubts = of_prior(found.heavy)
    if typical < FEWEST:
        needed = math.ceil(FEWEST * pace.integrated() / (1 - run.method.burn_in))
        doubts.append(
            Doubt(
                "length",
                f"{epochs * run.chains} epochs of sampling are worth about {typical:.1f} independent draws; "
                f"{needed} epochs would be worth {FEWEST:.0f}. Raise {run.name}.epochs"
                + ("." if run.method.epochs == "auto" else ", or leave it at 'auto'."),
                typical,
                FEWEST,
            )
        )
    slowest = None if found.smallest is None else kept / pace.integrated(found.smallest)
    if slowest is not None and slowest < SLOWEST <= typical:
        doubts.append(
            Doubt(
                "slow directions",
                "Directions the data determine weakly have not been explored: the slowest one gets about "
                f"{slowest:.2g} independent draws. Raise {run.name}.epochs"
                + ("." if run.name in {"sghmc", "baoab"} else ", or use Sghmc or Baoab, which follow such directions."),
                slowest,
                SLOWEST,
            )
        )
    return doubts


def of_cycles(run: ChainRun) -> list[Doubt]:
    """What draws from the ends of cycles are not."""
    if not run.method.cycles or run.method.temperature == 0:
        return []
    return [
        Doubt(
            "cycles",
            "Draws are kept at the ends of cycles, where steps are smallest, and so have the spread of these steps: "
            ".05 to .4 of the posterior's on linear regressions. Leave cycles at 0 for the posterior around a mode; "
            "for several modes use chains, or an Ensemble().",
        )
    ]


def coldest(found: Coordinates, pace: Pace, scatter: Tensor) -> float:
    """The variance that a thermostat leaves to the direction with the least batch noise, 1 being right.

    It takes the noise of the batches for the same everywhere, but that is h m s along a direction in which Wᵀ S W has
    the entry s, S (P, P) being the scatter of the examples' gradients: the temperature there is
    (2α + h m s) / (2α + h m s̄). A model that is right has s = 1 - d with d the prior's share, an eigenvalue of Wᵀ Π W;
    eigenvalues of S itself are too uncertain, so of it the diagonal is taken.
    """
    assert pace.friction is not None

    def within(matrix: Tensor) -> Tensor:
        once = found.root.times_root(matrix.to(found.center))  # rows of the matrix times W
        return found.root.times_root(once.mT).double()

    expected = 1 - torch.linalg.eigvalsh(within(torch.diag(found.prior_precision))).clamp(0, 1)
    measured = within(scatter).diagonal().clamp_min(0)
    noises = [pace.time * share for share in (expected, measured)]
    return min(float((2 * pace.friction + n.min()) / (2 * pace.friction + n.mean())) for n in noises)


def of_thermostat(run: ChainRun, found: Coordinates, pace: Pace) -> list[Doubt]:
    """Whether a sampler with one thermostat is too cold where the data say little."""
    if not run.method.REPLACEMENT or found.kind != "dense" or run.method.temperature != 1:
        return []
    left = coldest(found, pace, full_batch(run.part, run.method.prior).score_scatter(found.center))
    if left >= COLD:
        return []
    return [
        Doubt(
            "cold directions",
            "Directions with little batch noise, such as those that only the prior determines, have about "
            f"{left:.2f} of their variance: one thermostat cannot hold the temperature of directions with and without "
            "that noise. Use Sghmc or Baoab, which need none.",
            left,
            COLD,
        )
    ]


def _network(pace: Pace, kept: float, rise: float | None) -> Doubt:
    """In a network, known by its rise ρ or its size, every chain of this kind is short, by the prior's scale."""
    worth = kept * pace.time / 3 if pace.friction is not None else kept * pace.time / 2
    told = "less than 0.1" if worth < 0.1 else f"about {worth:.1f}"
    return Doubt(
        "regime",
        "This is a network: draws around its mode are not draws of its posterior, and this chain is worth "
        f"{told} independent ones: off the data its spread is far too small. "
        + ("Raise its epochs, or use an ensemble." if pace.friction else "Use Sghmc or Baoab instead."),
        rise,
        None if rise is None else RISE,
    )


def of_draws(run: ChainRun, fitted: Fitted, pace: Pace | None = None) -> list[Doubt]:
    """Whether the draws of the weights are worth as many independent ones as they must be."""
    draws = fitted.draws  # (C, S, P)
    if draws is None or draws.shape[1] < ENOUGH or run.method.temperature == 0 or run.method.cycles:
        return []
    worth = median_worth(draws)
    if not worth < WORTH:
        return []
    expected = 0.0 if pace is None else _promised(run, fitted, pace)
    promised = f" where {expected:.0f} were to be expected" if expected > worth else ""
    return [
        Doubt(
            "effective draws",
            f"The draws are worth only {worth:.1f} independent ones for half of the weights{promised}: the chain moves "
            f"too slowly. Raise {run.name}.epochs"
            + (", or leave lr at 'auto'." if run.is_plain else ", or use Sghmc or Baoab."),
            worth,
            WORTH,
        )
    ]


def _promised(run: ChainRun, fitted: Fitted, pace: Pace) -> float:
    epochs = sum(fitted.facts["steps"]) / run.per_epoch
    return (1 - run.method.burn_in) * epochs / pace.integrated()


def median_worth(draws: Tensor) -> float:
    """The median over some weights of the effective number of draws (C, S, P), but for weights that stand still."""
    source = generator(0, "effective draws")
    chosen = torch.randperm(draws.shape[-1], generator=source, device="cpu")[:LOOKED_AT].to(draws.device)
    found = effective_sample_size(draws[..., chosen])
    found = found[~found.isnan()]
    return float(found.median()) if len(found) else math.nan


def temperature(run: ChainRun, fitted: Fitted) -> float | None:
    """The configurational temperature of all chains, in units of the one that was asked for; None at temperature 0."""
    asked = run.method.temperature / run.problem.num_data
    states = [state for state in fitted.states if isinstance(state, WhitenedState)]
    if not asked or not states or run.method.cycles:
        return None
    return float(torch.cat([configuration(state).reshape(-1) for state in states]).double().mean() / asked)


def judged_temperature(
    run: ChainRun, part: SubsetStage, fitted: Fitted, root: Root, shares: Tensor | None
) -> tuple[float | None, float]:
    """The same, and the limit it is held to; where it may be too high by gradients of all data at some draws.

    A chain has moved by the noise of batches that it meets again in the same epoch. Where that noise is large (targets
    scatter more than the likelihood says) the gradients of batches find it hotter than it is: 1.9 instead of 1.3.
    Gradients of all data measure the variance itself, in units of the posterior's, and can be held to less.

    Args:
        run: whose log joint it is.
        part: the weights that were sampled.
        fitted: the chains.
        root: W of their coordinates.
        shares: how much each axis of W counts; None: all alike.
    """
    heat, draws = temperature(run, fitted), fitted.draws
    if heat is None or not heat > WARM or draws is None or draws.shape[1] < ENOUGH:
        return heat, HOT
    size = draws.shape[-1]
    counted = torch.ones_like(draws[0, 0]) if shares is None else shares
    number = float(counted.sum()) ** 2 / float(counted.square().sum())  # of axes that count
    looks = int(min(MOST_LOOKS, max(LOOKS, NUMBERS / number)))
    inverse = None if shares is None else torch.linalg.inv(root.colour(torch.eye(size).to(draws)).mT.double())  # W⁻¹
    products, every = [], max(1, draws.shape[0] * draws.shape[1] // looks)
    for chain, own in enumerate(draws):  # (S, P)
        batch, mean = full_batch(part, run.method.prior, chain), own.mean(0)
        if not batch.is_objective:
            return heat, HOT
        for theta in own[::every]:
            away, slope = (theta - mean).double(), batch.slope(theta)[1]
            if inverse is None:
                products.append(float(away @ slope.double()) / size)
                continue
            weighed = counted.double() * (inverse @ away) * root.times_root(slope).double()
            products.append(float(weighed.sum() / counted.sum()))
    error = (2 / (len(products) * number)) ** 0.5  # of independent draws
    return sum(products) / (len(products) * run.method.temperature), max(HOT_BY_ALL, 1 + ERRORS * error)


def of_temperature(heat: float | None, limit: float) -> list[Doubt]:
    """Whether the noise of the batches has heated the chains."""
    if heat is None or not heat > limit:
        return []
    return [
        Doubt(
            "temperature",
            f"The chain ran at {heat:.1f} times its temperature, heated by the noise of its batches: its spread is too "
            "wide. Use larger batches (training.batch_size).",
            heat,
            limit,
        )
    ]
