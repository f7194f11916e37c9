"""The No-U-Turn Sampler with full-batch gradients: trajectories that are doubled until they turn back."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

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


class Tree(NamedTuple):
    """A stretch of a trajectory of 2^depth points, in the order of time, and one point drawn from it."""

    left: Phase
    right: Phase
    momenta: Tensor  # (P,), ρ, the sum of the momenta of all points
    chosen: Phase  # drawn with probability proportional to exp(-H)
    log_weight: float  # log Σ exp(H₀ - H)
    acceptance: float  # Σ min(1, exp(H₀ - H))
    points: int
    turning: bool  # it, or a part of it, turns back on itself
    divergent: bool


def build(
    log_joint: LogJoint,
    temperature: float,
    *,
    warm_up: int = 1000,
    metric: Metric = "diagonal",
    target: float = 0.8,
    step_size: float | None = None,
    max_depth: int = 10,
) -> Transform:
    """The No-U-Turn Sampler, with points of a trajectory drawn in proportion to exp(-H).

    Hoffman & Gelman (2014) with what Betancourt (2017) and Stan changed: a trajectory is doubled forwards or backwards
    in time until it turns, and the next state is drawn from all its points. The new half is preferred over the old one
    with probability min(1, w_new / w_old) (biased progressive sampling), within a half points are drawn in proportion
    to their weights. A stretch with ends p⁻, p⁺ and sum of momenta ρ turns when

        ρᵀ M⁻¹ p⁻ ≤ 0   or   ρᵀ M⁻¹ p⁺ ≤ 0

    (Betancourt 2017, appendix A.4.2), asked of every stretch and, as in Stan, of each half with the first point of the
    other. Leaves exp(u(θ)/T) exactly invariant once the warm-up is over.

    Args:
        log_joint: over {"theta": (P,)}, the same full batch in every update.
        temperature: T, 1/N for the posterior.
        warm_up: transitions that adapt ε and M.
        metric: "diagonal" or "dense" mass matrix.
        target: mean acceptance statistic that ε is adapted to.
        step_size: the first ε; None finds one. Without warm-up it stays.
        max_depth: doublings at most: 2^max_depth - 1 gradient evaluations.
    """
    if max_depth < 1:
        raise ValueError(f"max_depth must be at least 1; got {max_depth}.")
    trajectory = partial(transition, max_depth=max_depth)
    return build_chain(
        log_joint, trajectory, temperature, warm_up=warm_up, metric=metric, target=target, step_size=step_size
    )


def transition(
    start: Phase, step_size: float, mass: MassMatrix, density: Density, *, max_depth: int
) -> tuple[Phase, Statistics]:
    """A point of the trajectory through `start`, doubled until it turns, diverges or is `max_depth` deep."""
    tree = Tree(start, start, start.momentum, start, 0.0, 0.0, 1, False, False)
    grow = _Growth(step_size, mass, density, start.energy)
    depth, acceptance, leapfrogs, divergent = 0, 0.0, 0, False
    while depth < max_depth and not tree.turning:
        forwards = _uniform(start.theta) < 0.5
        new = grow(tree.right if forwards else tree.left, depth, forwards)
        acceptance, leapfrogs, divergent = acceptance + new.acceptance, leapfrogs + new.points, new.divergent
        depth += 1
        if new.turning or new.divergent:
            break
        taken = math.exp(min(0.0, new.log_weight - tree.log_weight))
        tree = _joined(tree, new, forwards, new.chosen if _uniform(start.theta) < taken else tree.chosen)
    found = statistics_of(acceptance / leapfrogs, depth, leapfrogs, divergent, tree.chosen.energy, step_size)
    return tree.chosen, found


class _Growth(NamedTuple):
    """How a trajectory goes on: one leapfrog, or a stretch of 2^depth of them."""

    step_size: float
    mass: MassMatrix
    density: Density
    energy: float  # H₀

    def __call__(self, end: Phase, depth: int, forwards: bool) -> Tree:
        """The stretch of 2^depth points beyond `end`; it ends early where it turns or diverges."""
        if depth == 0:
            return self._leaf(end, forwards)
        first = self(end, depth - 1, forwards)
        if first.turning or first.divergent:
            return first
        second = self(first.right if forwards else first.left, depth - 1, forwards)
        if second.turning or second.divergent:
            acceptance, points = first.acceptance + second.acceptance, first.points + second.points
            return second._replace(acceptance=acceptance, points=points)
        share = math.exp(second.log_weight - _log_add(first.log_weight, second.log_weight))
        chosen = second.chosen if _uniform(end.theta) < share else first.chosen
        return _joined(first, second, forwards, chosen)

    def _leaf(self, end: Phase, forwards: bool) -> Tree:
        point = leapfrog(end, self.step_size if forwards else -self.step_size, self.mass, self.density)
        gain = self.energy - point.energy  # -inf where the energy is not finite
        acceptance = math.exp(min(0.0, gain))
        return Tree(point, point, point.momentum, point, gain, acceptance, 1, False, -gain > DIVERGENCE)


def _joined(first: Tree, second: Tree, forwards: bool, chosen: Phase) -> Tree:
    """Two neighbouring stretches as one, `second` after `first` in the direction of growth."""
    left, right = (first, second) if forwards else (second, first)
    momenta = left.momenta + right.momenta
    turning = (
        _turns(left.left, right.right, momenta)
        or _turns(left.left, right.left, left.momenta + right.left.momentum)
        or _turns(left.right, right.right, right.momenta + left.right.momentum)
    )
    return Tree(
        left=left.left,
        right=right.right,
        momenta=momenta,
        chosen=chosen,
        log_weight=_log_add(first.log_weight, second.log_weight),
        acceptance=first.acceptance + second.acceptance,
        points=first.points + second.points,
        turning=turning,
        divergent=False,
    )


def _turns(left: Phase, right: Phase, momenta: Tensor) -> bool:
    """Whether the ends of a stretch no longer move apart, given the sum of its momenta."""
    return torch.dot(left.velocity, momenta).item() <= 0 or torch.dot(right.velocity, momenta).item() <= 0


def _log_add(a: float, b: float) -> float:
    high = max(a, b)
    return high if math.isinf(high) else high + math.log(math.exp(a - high) + math.exp(b - high))


def _uniform(like: Tensor) -> float:
    """A number of (0, 1) from the generator in force, which is on the device of the weights."""
    return uniform_like(like.new_empty(())).item()
