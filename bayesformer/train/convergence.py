"""Whether training has come to rest, told from the history of its objective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WINDOW = 0.4  # share of the epochs, at the end, through which a line is laid
AHEAD = 0.2  # share of the epochs over which its rise is looked at
ENOUGH = 10  # epochs below which nothing can be told
SHARE = 0.02  # of the whole rise that may still be gained


def has_converged(history: Sequence[Mapping[str, list[float]]], member: int, stopped: bool) -> bool | None:
    """Whether the training of one member has converged; None after fewer than 10 epochs, when nothing can be told.

    True if validation data stopped improving (`stopped`). Otherwise a line is fitted by least squares to the log
    joints of the last two fifths of the epochs. The run has converged if the line gains, over a fifth of the epochs,
    at most 2 % of the rise from the first epoch to the best, or if its slope is at most two standard errors, or
    negative.
    """
    if stopped:
        return True
    values = [epoch["log_joint"][member] for epoch in history]
    if len(values) < ENOUGH:
        return None
    slope, error = _line(values[-max(4, round(WINDOW * len(values))) :])
    gain = slope * AHEAD * len(values)
    return gain <= SHARE * (max(values) - values[0]) or slope <= 2 * error


def _line(values: Sequence[float]) -> tuple[float, float]:
    """The slope of the least-squares line through equally spaced values, and its standard error."""
    count = len(values)
    middle, mean = (count - 1) / 2, sum(values) / count
    spread = sum((t - middle) ** 2 for t in range(count))
    slope = sum((t - middle) * (value - mean) for t, value in enumerate(values)) / spread
    rest = sum((value - mean - slope * (t - middle)) ** 2 for t, value in enumerate(values))
    return slope, math.sqrt(rest / (count - 2) / spread)
