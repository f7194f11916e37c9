"""Hamiltonian Monte Carlo with full-batch gradients: trajectories of one length, accepted or refused at their end."""

from __future__ import annotations

import math
from functools import partial

from bayesformer.core.draws import uniform_like
from bayesformer.core.types import LogJoint, Transform
from bayesformer.inference.hamiltonian import (
    DIVERGENCE,
    Density,
    Phase,
    Statistics,
    build_chain,
    leapfrog,
    statistics_of,
)
from bayesformer.inference.mass_matrix import MassMatrix, Metric

JITTER = 0.2  # relative half-width of the random factor of a trajectory's step size


def build(
    log_joint: LogJoint,
    temperature: float,
    *,
    warm_up: int = 1000,
    length: float = math.pi / 2,
    metric: Metric = "diagonal",
    target: float = 0.8,
    step_size: float | None = None,
    max_leapfrogs: int = 1000,
) -> Transform:
    """Hamiltonian Monte Carlo: L leapfrog steps of size ε from a fresh momentum, then a Metropolis test.

        p ~ N(0, M),   (θ', p') = leapfrog^L(θ, p),   θ ← θ' with probability min(1, exp(H(θ, p) - H(θ', p')))

    Duane et al. (1987); Neal (2011). L = length / ε, at most `max_leapfrogs`. ε is multiplied by a uniform number of
    [.8, 1.2] in every transition, so that no direction of a Gaussian target has a period that the trajectory hits
    (Mackenzie 1989). Where the mass is right, all directions have the period 2π, and length π/2 gives draws of a
    Gaussian that are nearly independent. Leaves exp(u(θ)/T) exactly invariant once the warm-up is over.

    Args:
        log_joint: over {"theta": (P,)}, the same full batch in every update.
        temperature: T, 1/N for the posterior.
        warm_up: transitions that adapt ε and M.
        length: integration time of a trajectory, in units of the mass.
        metric: "diagonal" or "dense" mass matrix.
        target: mean acceptance probability that ε is adapted to.
        step_size: the first ε; None finds one. Without warm-up it stays.
        max_leapfrogs: gradient evaluations of a transition, at most.
    """
    if length <= 0 or max_leapfrogs < 1:
        raise ValueError(f"length must be above 0 and max_leapfrogs at least 1; got {length} and {max_leapfrogs}.")
    trajectory = partial(transition, length=length, max_leapfrogs=max_leapfrogs)
    return build_chain(
        log_joint, trajectory, temperature, warm_up=warm_up, metric=metric, target=target, step_size=step_size
    )


def transition(
    start: Phase, step_size: float, mass: MassMatrix, density: Density, *, length: float, max_leapfrogs: int
) -> tuple[Phase, Statistics]:
    """The end of one trajectory, or its start where the end is refused."""
    jitter, test = uniform_like(start.theta.new_empty(2)).tolist()
    steps = min(max(1, math.ceil(length / step_size)), max_leapfrogs)
    epsilon, end, made = step_size * (1 + JITTER * (2 * jitter - 1)), start, 0
    while made < steps and end.energy - start.energy <= DIVERGENCE:
        end = leapfrog(end, epsilon, mass, density)
        made += 1
    error = end.energy - start.energy
    acceptance = math.exp(min(0.0, -error))
    chosen = end if test < acceptance else start
    return chosen, statistics_of(acceptance, 0, made, error > DIVERGENCE, chosen.energy, epsilon)
