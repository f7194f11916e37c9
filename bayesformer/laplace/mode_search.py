"""The mode that a Laplace posterior is put around: Gauss-Newton steps after the training, and how far it still is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bayesformer.core.doubts import Doubt
from bayesformer.core.seeds import fold
from bayesformer.laplace import last_layer
from bayesformer.laws import GaussianLaw
from bayesformer.model.space import Space
from bayesformer.train.coordinates import RISE, RISE_DRAWS, full_batch, polished
from bayesformer.train.full_batch import FullBatch
from bayesformer.train.gaussian_doubts import of_mean, skewness
from bayesformer.train.linearity import linearised_spread, of_linearity
from bayesformer.train.mode_doubts import of_mode
from bayesformer.train.output_spread import compared_with_full
from bayesformer.train.prototype import Prototype, Start
from bayesformer.train.recipe import Modes, SubsetStage, earlier_law, subset_stage

if TYPE_CHECKING:
    from bayesformer.laplace.method import Laplace

SEPARATES = ("kron", "full", "block", "last_layer", "subnetwork")
"""structures whose draws tell a network from a linear model; diagonal ones do not"""
ONE_MODE = (
    "A Gaussian around one mode of a network is not its posterior: linearised, it had .5 to .8 of a small network's "
    "spread between and outside the data, and several times too much where the mode was not found. Where that matters "
    "compare with Sghmc() or Ensemble()."
)
FEW_AT_ONCE, MANY_WEIGHTS = 16, 10_000  # examples per pass below which, weights above which a model counts as large
FEW_EXAMPLES, SHARE_OF_LARGE = 8, 64  # of a large model's data, on which draws are tried: at least 8, and one in 64


class FoundMode(NamedTuple):
    """Weights and buffers of a mode, and the Newton decrement δ there; None where no step could be made."""

    start: Start
    decrement: float | None


def normal(precision: float) -> str:
    """The prior N(0, 1/precision) as a setting."""
    return f"normal(0, {precision**-0.5!r})"


def nearest_mode(method: Laplace, prototype: Prototype, start: Start, prior: str | None) -> FoundMode:
    """The mode under a prior, or an earlier posterior in its place, that Gauss-Newton steps find from trained weights.

    Only the weights that the posterior will be over are moved, where the outputs are linear in them or they are few.
    """
    part = _part(method, prototype, start)
    if prototype.problem.prior is not None and bool((earlier_law(prototype).variance()[part.place] == 0).any()):
        return FoundMode(start, None)  # single weights without spread stay where they are
    moved, decrement = polished(part, prior)
    if decrement is None:
        return FoundMode(start, None)
    theta = start.theta.clone()
    theta[part.place] = moved.starts[0].theta
    return FoundMode(Start(theta, start.buffers), decrement)


def inferred(method: Laplace, prototype: Prototype) -> Space:
    """The weights that the posterior will be over: those of an earlier one, where that is the prior."""
    if prototype.problem.prior is not None:
        return space_with_spread(prototype.space, earlier_law(prototype))
    if "last_layer" in (method.subset, method.structure):
        module = prototype.skeleton.shell(gradients=False).module.eval()
        return last_layer.space_of(module, prototype.space, prototype.trial_batch.inputs)
    return prototype.space.select(method.subset)


def space_with_spread(space: Space, law: GaussianLaw) -> Space:
    """The weights in which a law has any spread."""
    spread = space.views(law.variance())
    return space.select([name for name in space.names if bool((spread[name] > 0).any())])


def _part(method: Laplace, prototype: Prototype, start: Start) -> SubsetStage:
    modes = Modes(start.theta[None], {name: value[None] for name, value in start.buffers.items()}, None)
    return subset_stage(prototype, modes, inferred(method, prototype).names)


def mode_doubts(
    method: Laplace, prototype: Prototype, law: GaussianLaw, found: FoundMode, prior: str | None
) -> tuple[list[Doubt], dict[str, float]]:
    """How far the mean is from the mode, and, where weights are to be drawn, whether their U is that of a Gaussian."""
    part = _part(method, prototype, found.start)
    batch, own = full_batch(part, prior), part.starts[0].theta
    decrement = found.decrement
    if decrement is None:
        decrement = _decrement(law, part.place, batch.slope(own)[1])
    doubts, numbers = [], {"decrement": decrement}
    if prototype.validation is None:  # early stopping leaves the mode on purpose
        doubts += of_mode(decrement)
    if method.predictive == "sampled" and method.structure in SEPARATES:
        numbers["rise"] = _rise(law, part.place, own, batch)
        doubts += of_rise(numbers["rise"])
    elif method.predictive != "sampled" and not batch.is_linear():
        doubts.append(Doubt("regime", ONE_MODE))
        inner = _within(law, part.place)
        ratio = None if inner is None else linearised_spread(batch, inner, prototype.problem.seed)
        if ratio is not None:
            doubts, numbers = doubts + of_linearity(ratio), numbers | {"linearised_spread": ratio}
    return doubts, numbers


def output_numbers(
    method: Laplace, prototype: Prototype, law: GaussianLaw, start: Start, prior: str | None, temperature: float
) -> tuple[list[Doubt], dict[str, float]]:
    """The spread of outputs and weights beside the full curvature with this prior, and how far mean and mode are apart.

    Both where the outputs are linear in the weights.
    """
    part = _part(method, prototype, start)
    inner = _within(law, part.place)
    if inner is None:
        return [], {}
    batch = full_batch(part, prior)
    doubts, numbers = compared_with_full(batch, part.starts[0].theta, inner, temperature=temperature)
    shift = skewness(batch, inner, temperature, prototype.problem.seed)
    if shift is not None:
        doubts, numbers = doubts + of_mean(shift), numbers | {"mean_shift": shift}
    return doubts, numbers


def _within(law: GaussianLaw, place: slice | Tensor) -> GaussianLaw | None:
    """The law over the weights at `place` alone; None if others have a spread, too."""
    every = torch.arange(law.size, device=law.mean.device)
    chosen = every[place]
    where = torch.full_like(every, -1)
    where[chosen] = torch.arange(len(chosen), device=chosen.device)
    places = tuple(where[every[own]] for own in law.places)
    if any(bool((own < 0).any()) for own in places):
        return None
    return replace(law, mean=law.mean[place], places=places, buffers={})


def of_rise(rise: float) -> list[Doubt]:
    """Whether draws of the weights lie where the posterior does, by the mean rise of U over half their number."""
    if rise <= RISE:
        return []
    return [
        Doubt(
            "regime",
            f"Draws of the weights raise the negative log joint {rise:.3g} times as much as a Gaussian's own: "
            "this one is far too wide for the model. Use predictive='linearised', or Sghmc.",
            rise,
            RISE,
        )
    ]


def _decrement(law: GaussianLaw, place: slice | Tensor, gradient: Tensor) -> float:
    """√(∇Uᵀ Σ ∇U / P) with the covariance that was found, over the weights that have one."""
    whole = torch.zeros_like(law.mean)
    whole[place] = gradient
    squared, count = 0.0, 0
    for own, block in zip(law.places, law.blocks, strict=True):
        squared += float(block.times(whole[own]).double() @ whole[own].double())
        count += block.size
    return (squared / max(count, 1)) ** 0.5


def _rise(law: GaussianLaw, place: slice | Tensor, mode: Tensor, batch: FullBatch) -> float:
    """ρ, the mean rise of U under the law's own draws over half the number of weights.

    Of a large model U is that of a few examples, scaled up: on all of them this check would cost more than the fit. The
    gradient of n of N examples adds an error of √(N / (n P)) / 2 to ρ, which is small for many weights.
    """
    centred, seed = replace(law, mean=torch.zeros_like(law.mean)), fold(0, "regime")
    count = sum(block.size for block in law.blocks)
    large = batch.chunk < FEW_AT_ONCE or count > MANY_WEIGHTS
    some = max(FEW_EXAMPLES, batch.prototype.problem.num_data // SHARE_OF_LARGE) if large else None
    base = batch.potential(mode, some)
    rises = [batch.potential(mode + centred.row(draw, seed)[place], some) - base for draw in range(RISE_DRAWS)]
    return 2 * sum(rises) / (RISE_DRAWS * count)
