"""Which states of a chain are kept."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Collect:
    """The steps, counted from 1, after which the state of a chain is kept."""

    steps: tuple[int, ...]

    @classmethod
    def spread(cls, total: int, burn_in: int, count: int) -> Collect:
        """`count` states after the burn-in of a chain of `total` steps, widely spaced, the last at its end."""
        every = (total - burn_in) // count if count >= 1 else 0
        if burn_in < 0 or every < 1:
            raise ValueError(
                f"draws must fit after the burn-in; got {count} draws in {total} steps of which {burn_in} are burn-in."
            )
        return cls(tuple(total - every * i for i in reversed(range(count))))

    @classmethod
    def cyclical(cls, total: int, cycles: int, count: int, exploration: float) -> Collect:
        """`count` states from the last part of each cycle, where the temperature is on."""
        length = -(-total // cycles)
        per_cycle = -(-count // cycles)
        steps: list[int] = []
        for cycle in range(cycles):
            first, last = cycle * length, min((cycle + 1) * length, total)
            inner = cls.spread(last - first, round(exploration * length), per_cycle)
            steps += [first + step for step in inner.steps]
        return cls(tuple(steps[-count:]))

    @classmethod
    def by_time(cls, times: Sequence[float], burn_in: int, count: int) -> Collect:
        """`count` states evenly spaced in time after the burn-in, for steps that get shorter; the last at the end.

        Equal weights for these states are the weights by step size that Welling & Teh (2011), eq. 11, give to all.
        """
        reached, total = list(accumulate(times)), len(times)
        begin = reached[burn_in - 1] if burn_in else 0.0
        every = (reached[-1] - begin) / count if count else 0.0
        marks = [begin + every * (i + 1) for i in range(count)]
        steps = sorted({min(bisect_left(reached, mark * (1 - 1e-9)) + 1, total) for mark in marks})
        if burn_in < 0 or len(steps) < count:
            raise ValueError(
                f"draws must fit after the burn-in; got {count} draws in {total} steps of which {burn_in} are burn-in."
            )
        return cls(tuple(steps))
