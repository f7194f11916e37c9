"""Whether training has come to rest, told from the history of its objective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

WINDOW = 0.4  # share of the epochs, at the end, through which a line is laid
AHEAD = 0.2  # share of the epochs over which its rise is looked at
ENOUGH = 3  # epochs below which parts of them are looked at
PARTS = 20  # of an epoch
ENOUGH_STEPS = 20  # below which nothing can be told; of parts of epochs as well
SHARE = 0.02  # of the whole rise that may still be gained


def has_converged(
    history: Sequence[Mapping[str, list[Any]]], steps: int, member: int, stopped: bool, warm_up: int = 0
) -> bool | None:
    """Whether the training of one member has converged; None if nothing can be told.

    That is of fewer than 20 steps, or of no more than those in which the rate still rose (`warm_up`).

    True if validation data stopped improving (`stopped`). Otherwise a line is fitted by least squares to the last two
    fifths of the log joints: of epochs (three at least), or of parts of epochs where there are one or two. The run has
    converged if the line gains, over a fifth of the run, at most 2 % of the rise from the first value to the best, or
    if its slope is at most two standard errors, or negative. (Three values have risen if each is above the last.)
    """
    if stopped:
        return True
    if steps < ENOUGH_STEPS or steps <= warm_up:
        return None
    values = [epoch["log_joint"][member] for epoch in history]
    if len(values) < ENOUGH:
        values = [value for epoch in history for value in epoch.get("parts", [[]] * (member + 1))[member]]
        if len(values) < ENOUGH_STEPS:
            return None
    last = values[-max(3, round(WINDOW * len(values))) :]
    slope, error = _line(last)
    small = slope * AHEAD * len(values) <= SHARE * (max(values) - values[0])
    return small or (slope <= 2 * error if len(last) > 3 else last != sorted(last))


def parts_of(values: Tensor) -> list[list[float]]:
    """Per member, the means of up to 20 equal parts of an epoch; `values` (steps, L)."""
    count = min(PARTS, len(values))
    return torch.stack([part.mean(0) for part in values.tensor_split(count)], -1).tolist()


def _line(values: Sequence[float]) -> tuple[float, float]:
    """The slope of the least-squares line through equally spaced values, and its standard error."""
    count = len(values)
    middle, mean = (count - 1) / 2, sum(values) / count
    spread = sum((t - middle) ** 2 for t in range(count))
    slope = sum((t - middle) * (value - mean) for t, value in enumerate(values)) / spread
    rest = sum((value - mean - slope * (t - middle)) ** 2 for t, value in enumerate(values))
    return slope, math.sqrt(rest / (count - 2) / spread)
