"""Langevin dynamics for the posterior of a network: variance reduced gradients, friction in stiff directions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesformer.core.types import Batch, Params, Transform, WholeLogJoint
from bayesformer.core.vectors import THETA, blank, normal_like
from bayesformer.inference import svrg
from bayesformer.inference.stiff_friction import StiffDirections, no_directions, relax, stiff_directions

FIRST_PRODUCTS = 3  # of the power iteration before the first step, from the stiffest direction of the scores
SHORTEST = 5  # steps between gradients over all data
BURSTING = 3.0  # mean of p² in one step that no stable chain reaches; it is 1, and fluctuates by √(2/P)
VIOLENT = 30.0  # times that: the step leads to where no draw is, and is undone
STIFFER, MUCH_STIFFER = 1.1, 2.0  # factors of λ after such steps
HOT, COLD = 1.15, 1.05  # kinetic temperatures above and below which that period becomes shorter and longer
SHRINK, GROW = 0.7, 1.15
ENOUGH = 150  # weights whose mean p² over one period is looked at; of fewer, that over several periods
PRODUCT_COST = 3  # gradients of a batch that a curvature product takes


class Control(NamedTuple):
    """What the chain adjusts on its way; numbers on the CPU, so that no step waits for a device."""

    period: Tensor  # (), float64, K
    largest: Tensor  # (), float64, λ
    power: Tensor  # (P,), the vector of the power iteration
    heat: Tensor  # (), Σ of mean p² since K was last looked at
    summed: Tensor  # (), int64, how many are in the sum


class Measured(NamedTuple):
    """What is reported: sums over the steps after the burn-in, unless said otherwise."""

    steps: Tensor  # (), int64
    kinetic: Tensor  # (), Σ mean p²
    stiff: Tensor  # (), Σ mean (u_iᵀp)² over the stiff directions, before and after O
    period: Tensor  # (), Σ K
    first_largest: Tensor  # (), λ at the start
    largest: Tensor  # (), the largest λ of all steps
    time: Tensor  # (), Σ h of all steps
    examples: Tensor  # (), gradients of single examples of all steps


class StiffState(NamedTuple):
    """State of the chain: what the next step needs, and what is reported."""

    params: Params  # the current draw of θ
    momenta: Params  # p, in units of the metric: N(0, I) if the chain is right
    snapshot: svrg.Snapshot
    stiff: StiffDirections
    control: Control
    measured: Measured
    step: Tensor  # (), int64
    log_joint: Tensor  # (), where the gradient was taken, estimated for all data


@dataclass(frozen=True)
class StiffSettings:
    """Numbers of the chain; those of a network's posterior by default."""

    temperature: float
    """T, in the log joint's units: 1/N is the posterior"""
    longest: float
    """steps between gradients over all data, at most"""
    friction: float = 0.3
    """γ, along directions that are not stiff"""
    rows: int = 50
    """S, scores that the stiff directions are found from"""
    every: int = 10
    """steps between looks at the curvature"""
    decay: float = 0.002
    """of the running maximum of the curvature, per look"""
    burn_in: int = 0
    """steps that are not measured"""

    def __post_init__(self) -> None:
        for name in ("temperature", "friction", "longest"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite; got {value}.")
        for name, least in (("rows", 1), ("every", 1), ("burn_in", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}.")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1; got {self.decay}.")


def build(log_joint: WholeLogJoint, scale: Tensor, settings: StiffSettings) -> Transform:
    """Underdamped Langevin dynamics of φ = θ / scale, split as B A O A, with gradients g of `svrg.estimate`:

        B:  p ← p + h/T scale ∘ g(θ)
        A:  θ ← θ + h/2 scale ∘ p
        O:  p ← e^{-Γh} p + (1 - e^{-2Γh})^½ z,    z ~ N(0, I),   `stiff_friction.relax`
        A:  θ ← θ + h/2 scale ∘ p

    The target is exp(U/T), U the log joint over N. With the standard deviations of a Gaussian prior as `scale`, that
    prior is N(0, I) in φ (at T = 1/N). Every `every` steps the curvature is looked at: λ, a running maximum of a power
    iteration on the current batch and of the largest λ_i, gives the step h = 1/√λ; the stiff directions and their
    friction γ_i = 2√λ_i come from scores at outputs that the model draws. That friction takes away the heat of the
    gradients' noise, which is proportional to the curvature, and leaves the target as it is. A step after which the
    mean of p² is beyond 3 was too long: momenta are drawn anew, λ grows by a tenth, the next gradient is over all data.
    Where it is beyond 90, the step is undone and λ is doubled.

    Every K steps the gradient is that over all data. The kinetic temperature, the mean of p² since the last one, moves
    K: above 1.15 it is multiplied by 0.7 (5 at least), below 1.05 by 1.15 (`longest` at most); it starts at half of
    that. Fewer than 150 weights, whose p² fluctuates more, are looked at over 150/P periods at a time.
    The temperature is the mean of that before and after O. Both are 1 exactly for a Gaussian target without gradient
    noise; noise shows before O twice as strongly as in the variance of θ, and after O hardly.

    Known exactly: for U = -½ φᵀ Λ φ and gradients over all data (K = 1, or batches of all examples) the variance of φ
    is T/Λ whatever friction and stiff directions are, for h² Λ < 4. Without stiff directions it is BAOA. Directions
    that are kept for `every` steps depend on weights of before, and are exact only as far as these have not moved.

    Args:
        log_joint: with gradients over all data, curvature and scores.
        scale: (P,), positive: the metric.
        settings: see there.
    """
    if not bool((scale > 0).all()):
        raise ValueError(f"scale must be positive; got {scale.min().item()}.")
    return Transform(partial(init, settings=settings), partial(update, log_joint=log_joint, scale=scale, s=settings))


def init(params: Params, *, settings: StiffSettings) -> StiffState:
    """The state at `params`, which are copied; momenta are drawn in the first step."""
    if list(params) != [THETA] or params[THETA].dim() != 1:
        shapes = {name: tuple(p.shape) for name, p in params.items()}
        raise ValueError(f"params must be one vector {{'theta': (P,)}}; got {shapes}.")
    theta = params[THETA]

    def number(value: float = 0.0) -> Tensor:
        return torch.full((), value, dtype=torch.float64, device="cpu")

    def count() -> Tensor:
        return torch.zeros((), dtype=torch.int64, device="cpu")

    longest = max(settings.longest / 2, min(SHORTEST, settings.longest))
    control = Control(number(longest), number(), torch.zeros_like(theta), theta.new_zeros(()), count())
    sums = theta.new_zeros((), dtype=torch.float64)
    measured = Measured(count(), sums, sums.clone(), number(), number(), number(), number(), number())
    return StiffState(
        {THETA: theta.clone()},  # a copy: the log joint writes other weights over what it is given
        {THETA: torch.zeros_like(theta)},
        svrg.blank_snapshot(params),
        no_directions(theta, settings.rows),
        control,
        measured,
        count(),
        blank(params),
    )


def update(
    state: StiffState, batch: Batch, inplace: bool = False, *, log_joint: WholeLogJoint, scale: Tensor, s: StiffSettings
) -> tuple[StiffState, Tensor]:
    """One step; the second value is the outputs of the batch, empty where the gradient is that over all data."""
    if not inplace:
        state = copied(state)
    theta, p, step = state.params[THETA], state.momenta[THETA], int(state.step)
    if step == 0:
        p.copy_(normal_like(p))
    if step % s.every == 0:
        _look(state, batch, log_joint, scale, s)
    value, outputs, gradient = _gradient(state, batch, log_joint, s)
    state.log_joint.copy_(value)
    h = 1 / math.sqrt(float(state.control.largest))
    before = theta.clone()
    p.add_(gradient.mul_(scale), alpha=h / s.temperature)
    heat = torch.dot(p, p)
    theta.addcmul_(scale, p, value=h / 2)
    along = relax(p, normal_like(p), state.stiff, s.friction, h)
    heat = (heat + torch.dot(p, p)) / (2 * len(p))
    theta.addcmul_(scale, p, value=h / 2)
    state.step.add_(1)
    stable = BURSTING + 10 * math.sqrt(2 / len(p))
    violent = not float(heat) <= VIOLENT * stable  # or not a number
    if violent:
        theta.copy_(before)
    else:
        _note(state, heat, along, h, step >= s.burn_in)
    if violent or float(heat) > stable:
        _calm(state, MUCH_STIFFER if violent else STIFFER)
    return state, outputs


def _calm(state: StiffState, stiffer: float) -> None:
    """After a step that was too long for a curvature that has grown: new momenta, a shorter step, a new snapshot."""
    state.momenta[THETA].copy_(normal_like(state.momenta[THETA]))
    state.control.largest.mul_(stiffer)
    state.snapshot.age.fill_(-1)


def _look(state: StiffState, batch: Batch, log_joint: WholeLogJoint, scale: Tensor, s: StiffSettings) -> None:
    """Stiff directions and the largest curvature at the current weights."""
    scores = log_joint.scores(state.params, batch, s.rows)
    found = stiff_directions(scores.mul_(scale).mul_((len(scores) * s.temperature) ** -0.5))
    state.stiff.curvature.zero_()
    state.stiff.rows[: len(scores)].copy_(found.rows)
    state.stiff.curvature[: len(scores)].copy_(found.curvature)
    control, first = state.control, int(state.step) == 0
    if first:
        control.power.copy_(normal_like(control.power)).div_(control.power.norm())
        if float(found.curvature[-1]) > 1:
            control.power.copy_(found.rows[-1])
    for _ in range(FIRST_PRODUCTS if first else 1):
        product = log_joint.curvature_times(state.params, batch, scale * control.power).mul_(scale)
        length = product.norm()
        control.power.copy_(product / length)
    largest = max(float(length) / s.temperature, float(found.curvature[-1]))  # scores see a growth at once
    control.largest.mul_(1 - s.decay).clamp_min_(largest)
    state.measured.examples.add_(len(scores) + PRODUCT_COST * len(batch.targets))
    if first:
        state.measured.first_largest.copy_(control.largest)
    state.measured.largest.clamp_min_(float(control.largest))


def _gradient(
    state: StiffState, batch: Batch, log_joint: WholeLogJoint, s: StiffSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Value, outputs and gradient (P,): over all data every K steps, else from the batch and the snapshot."""
    if not svrg.is_due(state.snapshot, round(float(state.control.period))):
        state.measured.examples.add_(2 * len(batch.targets))
        return svrg.estimate(log_joint, state.params, batch, state.snapshot)
    _adjust(state.control, s, len(state.params[THETA]))
    state.measured.examples.add_(log_joint.num_data)
    value, gradient = svrg.take(log_joint, state.params, state.snapshot)
    return value, value.new_zeros(0), gradient


def _adjust(control: Control, s: StiffSettings, weights: int) -> None:
    """The next K, from the kinetic temperature since K was last looked at."""
    if int(control.summed) * min(1, weights / ENOUGH) < round(float(control.period)):
        return
    temperature = float(control.heat) / int(control.summed)
    if temperature > HOT:
        control.period.mul_(SHRINK).clamp_min_(min(SHORTEST, s.longest))
    elif temperature < COLD:
        control.period.mul_(GROW).clamp_max_(s.longest)
    control.heat.zero_()
    control.summed.zero_()


def _note(state: StiffState, heat: Tensor, along: Tensor, h: float, measured: bool) -> None:
    """Add a step to what is summed up."""
    state.control.heat.add_(heat)
    state.control.summed.add_(1)
    state.measured.time.add_(h)
    if measured:
        stiff = state.stiff.curvature > 1
        state.measured.steps.add_(1)
        state.measured.kinetic.add_(heat)
        state.measured.stiff.add_(along[stiff].square().mean() if bool(stiff.any()) else 1.0)
        state.measured.period.add_(state.control.period)


def copied(state: Any) -> Any:
    """The same state with tensors of its own."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {name: copied(value) for name, value in state.items()}
    return type(state)(*(copied(value) for value in state))
