"""Dual averaging: a step size that gives a wanted acceptance statistic, found while a chain runs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

GAMMA, T0, KAPPA = 0.05, 10.0, 0.75  # Hoffman & Gelman (2014), section 3.2.1
CENTER = 10.0  # steps are drawn towards this multiple of the first one: too large is cheaper than too small


class DualAveraging(NamedTuple):
    """State of the search for log ε; all (), float64, on the CPU."""

    log_step: Tensor  # log ε of the next transition
    log_average: Tensor  # log ε̄, for use once the search has ended
    error: Tensor  # H̄, the running mean of (target - acceptance)
    center: Tensor  # μ, where log ε is drawn to
    seen: Tensor  # transitions so far


def begin(step_size: float) -> DualAveraging:
    """The state before the first transition, around a step size of the right order."""

    def number(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64, device="cpu")

    log_step = math.log(step_size)
    return DualAveraging(
        number(log_step), number(log_step), number(0.0), number(math.log(CENTER) + log_step), number(0.0)
    )


def learn(state: DualAveraging, acceptance: float, target: float) -> DualAveraging:
    """The state after a transition with this mean acceptance statistic.

        H̄ ← (1 - 1/(t + t₀)) H̄ + (δ - α) / (t + t₀)
        log ε ← μ - √t / γ · H̄
        log ε̄ ← t^-κ log ε + (1 - t^-κ) log ε̄

    Hoffman & Gelman (2014), equations 6 and 7, with their constants.
    """
    seen = state.seen + 1
    weight = 1 / (seen + T0)
    error = (1 - weight) * state.error + weight * (target - acceptance)
    log_step = state.center - seen.sqrt() / GAMMA * error
    share = seen**-KAPPA
    return DualAveraging(log_step, share * log_step + (1 - share) * state.log_average, error, state.center, seen)
