"""What Hamiltonian Monte Carlo and the No-U-Turn Sampler share: dynamics, energy, adaptation, and the state of a chain.

    H(θ, p) = -log p(θ, D) + ½ pᵀ M⁻¹ p

A log joint u(θ) over N, as everywhere in this library, at temperature T: log p(θ, D) is u(θ) / T, with T = 1/N for the
posterior. Gradients are of ALL data: every `update` of a chain must be given the same batch, or an object that stands
for all data, which the log joint understands. With minibatches the acceptance step is wrong: use SGHMC or BAOAB.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bayesformer.core.errors import unknown_name
from bayesformer.core.types import LogJoint, Params, Transform
from bayesformer.core.vectors import THETA, blank, is_matrix, value_and_grad
from bayesformer.inference import dual_averaging, mass_matrix
from bayesformer.inference.dual_averaging import DualAveraging
from bayesformer.inference.mass_matrix import METRICS, MassMatrix, Metric, Moments

DIVERGENCE = 1000.0  # nats of energy error above which a trajectory counts as lost
DOUBLINGS = 60  # of the first step size, at most, up or down


class Phase(NamedTuple):
    """A point of a trajectory. Tensors are never written into, so that points may share them."""

    theta: Tensor  # (P,)
    momentum: Tensor  # (P,)
    velocity: Tensor  # (P,), M⁻¹ p
    gradient: Tensor  # (P,), of log p(θ, D)
    log_density: float  # log p(θ, D), up to a constant
    energy: float  # H; inf where it is not a number


class Statistics(NamedTuple):
    """What is worth knowing of a transition; all (), float64, on the CPU."""

    acceptance: Tensor  # mean acceptance statistic of the trajectory
    depth: Tensor  # doublings of a NUTS trajectory; 0 for HMC
    leapfrogs: Tensor  # gradient evaluations
    divergent: Tensor  # 1 if the energy error was above 1000 nats, else 0
    energy: Tensor  # H of the state that was chosen, with the momentum that it had there
    step_size: Tensor  # ε of the transition


class HamiltonianState(NamedTuple):
    """State of a chain: what the next transition needs."""

    params: Params  # {"theta": (P,)}, the current draw
    gradient: Tensor  # (P,), of log p(θ, D) there
    step: Tensor  # (), int64, transitions made
    log_joint: Tensor  # (), of the current draw
    search: DualAveraging  # of the step size
    mass: MassMatrix
    moments: Moments  # of the window of the warm-up that is going on
    statistics: Statistics  # of the last transition


Density = Callable[[Tensor], tuple[float, Tensor]]
"""θ (P,) -> log p(θ, D) and its gradient (P,), in memory of its own."""


class Trajectory(Protocol):
    """One transition from a point with a fresh momentum: the new point and what happened on the way."""

    def __call__(self, start: Phase, step_size: float, mass: MassMatrix, density: Density) -> tuple[Phase, Statistics]:
        """The point chosen, and the statistics of the trajectory."""
        ...


def build_chain(
    log_joint: LogJoint,
    trajectory: Trajectory,
    temperature: float,
    *,
    warm_up: int,
    metric: Metric,
    target: float,
    step_size: float | None,
) -> Transform:
    """A transform whose update is one transition; the first `warm_up` of them adapt the step size and the mass.

    Args:
        log_joint: over {"theta": (P,)}, see above.
        trajectory: what HMC and NUTS differ in.
        temperature: T, 1/N for the posterior.
        warm_up: transitions that adapt; their draws are not draws of the posterior.
        metric: "diagonal" or "dense" mass matrix.
        target: acceptance statistic wanted.
        step_size: the first step; None finds one.
    """
    if metric not in METRICS:
        raise unknown_name("metric", metric, METRICS)
    for name, value, holds in (
        ("temperature", temperature, temperature > 0),
        ("warm_up", warm_up, warm_up >= 0),
        ("target", target, 0 < target < 1),
        ("step_size", step_size, step_size is None or step_size > 0),
    ):
        if not holds:
            rule = {"warm_up": "at least 0", "target": "strictly between 0 and 1"}.get(name, "greater than 0")
            raise ValueError(f"{name} must be {rule}; got {value}.")
    settings: dict[str, Any] = {"warm_up": warm_up, "target": target, "step_size": step_size}
    adapt = partial(_adapt, warm_up=warm_up, ends=frozenset(mass_matrix.window_ends(warm_up)))
    step = partial(update, log_joint=log_joint, trajectory=trajectory, temperature=temperature, adapt=adapt, **settings)
    return Transform(partial(init, metric=metric, step_size=step_size), step)


def init(params: Params, *, metric: Metric, step_size: float | None = None) -> HamiltonianState:
    """The state at `params`, {"theta": (P,)}, with unit mass; the first update evaluates the log joint."""
    if list(params) != [THETA] or is_matrix(params):
        raise ValueError("params must be one vector {'theta': (P,)}: trajectories of chains differ in length.")
    theta = params[THETA]
    return HamiltonianState(
        params=params,
        gradient=torch.zeros_like(theta),
        step=torch.zeros((), dtype=torch.int64, device="cpu"),
        log_joint=blank(params),
        search=dual_averaging.begin(step_size or 1.0),
        mass=mass_matrix.unit(theta, metric),
        moments=mass_matrix.no_moments(theta, metric),
        statistics=statistics_of(math.nan, 0, 0, False, math.nan, step_size or 1.0),
    )


def update(
    state: HamiltonianState,
    batch: Any,
    inplace: bool = False,
    *,
    log_joint: LogJoint,
    trajectory: Trajectory,
    temperature: float,
    adapt: Callable[[HamiltonianState, Phase, Density], HamiltonianState],
    warm_up: int,
    target: float,
    step_size: float | None,
) -> tuple[HamiltonianState, Statistics]:
    """One transition; the second value is what happened on the way."""
    density = _density(log_joint, batch, temperature)
    # A copy: a shell's vector, which may be the state's own, is overwritten by every evaluation of the log joint.
    theta, mass = state.params[THETA].clone(), state.mass
    search, gradient = state.search, state.gradient
    log_density = state.log_joint.item() / temperature
    if int(state.step) == 0:
        log_density, gradient = density(theta)
        check_start(log_density)
        if step_size is None:
            search = dual_averaging.begin(first_step(theta, log_density, gradient, mass, density))
    adapting = int(state.step) < warm_up
    epsilon = math.exp(search.log_step if adapting or warm_up == 0 else search.log_average)
    start = phase(theta, mass.draw(), gradient, log_density, mass)
    end, statistics = trajectory(start, epsilon, mass, density)
    if adapting:
        search = dual_averaging.learn(search, statistics.acceptance.item(), target)
    value = state.log_joint.new_tensor(end.log_density * temperature)
    after = state._replace(
        gradient=end.gradient, step=state.step + 1, log_joint=value, search=search, statistics=statistics
    )
    if adapting:
        after = adapt(after, end, density)
    # Last of all: an evaluation of the log joint may overwrite the state's own vector.
    params = {THETA: state.params[THETA].copy_(end.theta) if inplace else end.theta.clone()}
    return after._replace(params=params), statistics


def _adapt(
    state: HamiltonianState, end: Phase, density: Density, *, warm_up: int, ends: frozenset[int]
) -> HamiltonianState:
    """Count the draw in its window; at the end of a window set the mass, and look for its step size anew."""
    made = int(state.step)
    if not mass_matrix.first_of_windows(warm_up) < made <= max(ends, default=0):
        return state
    moments = mass_matrix.add(state.moments, end.theta)
    if made not in ends:
        return state._replace(moments=moments)
    mass = mass_matrix.estimate(moments)
    metric: Metric = "diagonal" if mass.inverse.dim() == 1 else "dense"
    step = first_step(end.theta, end.log_density, end.gradient, mass, density, math.exp(state.search.log_step))
    fresh = mass_matrix.no_moments(end.theta, metric)
    return state._replace(mass=mass, moments=fresh, search=dual_averaging.begin(step))


def _density(log_joint: LogJoint, batch: Any, temperature: float) -> Density:
    evaluate = value_and_grad(log_joint)

    def density(theta: Tensor) -> tuple[float, Tensor]:
        value, _, grads = evaluate({THETA: theta}, batch)
        return value.item() / temperature, grads[THETA] / temperature

    return density


def check_start(log_density: float) -> None:
    """Refuse a start of density 0, from which no trajectory can come."""
    if not math.isfinite(log_density):
        raise ValueError(
            f"the log joint must be finite where a chain starts; got {log_density}. Check the scale of inputs, targets "
            "and starting weights."
        )


def phase(theta: Tensor, momentum: Tensor, gradient: Tensor, log_density: float, mass: MassMatrix) -> Phase:
    """A point with its velocity and energy."""
    velocity = mass.velocity(momentum)
    energy = 0.5 * torch.dot(momentum, velocity).item() - log_density
    return Phase(theta, momentum, velocity, gradient, log_density, energy if math.isfinite(energy) else math.inf)


def leapfrog(point: Phase, step: float, mass: MassMatrix, density: Density) -> Phase:
    """Half a kick, a drift, half a kick: reversible (by -step) and volume-preserving."""
    half = torch.add(point.momentum, point.gradient, alpha=step / 2)
    theta = torch.add(point.theta, mass.velocity(half), alpha=step)
    log_density, gradient = density(theta)
    return phase(theta, half.add_(gradient, alpha=step / 2), gradient, log_density, mass)


def first_step(
    theta: Tensor, log_density: float, gradient: Tensor, mass: MassMatrix, density: Density, guess: float = 1.0
) -> float:
    """A step size of the right order: doubled or halved until the acceptance of one leapfrog crosses 0.8.

    Hoffman & Gelman (2014), algorithm 4, with a new momentum for every trial and Stan's 0.8 in the place of 1/2.
    """
    step, direction = guess, 0
    for _ in range(DOUBLINGS):
        start = phase(theta, mass.draw(), gradient, log_density, mass)
        error = start.energy - leapfrog(start, step, mass, density).energy
        wanted = 1 if error > math.log(0.8) else -1
        if direction and wanted != direction:
            break
        direction = wanted
        step *= 2.0**direction
    return step


def statistics_of(
    acceptance: float, depth: int, leapfrogs: int, divergent: bool, energy: float, step_size: float
) -> Statistics:
    """The numbers as tensors, which a state is made of."""
    values = (acceptance, depth, leapfrogs, divergent, energy, step_size)
    return Statistics(*torch.tensor(values, dtype=torch.float64, device="cpu"))
