"""Whether training has come to rest, told from the history of its objective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WINDOW = 0.2  # share of the epochs, at the end, in which the objective should no longer rise
ENOUGH = 10  # epochs below which nothing can be told
SHARE = 0.02  # of the whole rise that may still be gained in the window


def has_converged(history: Sequence[Mapping[str, list[float]]], member: int, stopped: bool) -> bool | None:
    """Whether a member's training has come to rest; None where the run is too short to tell.

    A run that ended because validation data stopped improving has. Otherwise the mean of the log joint over the last
    tenth of the epochs must not exceed that over the tenth before by more than 2 % of its whole rise, or by more than
    two standard errors of its scatter there.
    """
    if stopped:
        return True
    values = [epoch["log_joint"][member] for epoch in history]
    if len(values) < ENOUGH:
        return None
    half = max(2, round(len(values) * WINDOW / 2))
    before, last = values[-2 * half : -half], values[-half:]
    gain = _mean(last) - _mean(before)
    error = math.sqrt((_variance(before) + _variance(last)) / half)
    return gain <= SHARE * (max(values) - values[0]) or gain <= 2 * error


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    centre = _mean(values)
    return sum((value - centre) ** 2 for value in values) / (len(values) - 1)
