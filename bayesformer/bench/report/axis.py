"""Axes: round ticks, their labels, and the map from a value to its place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten, inside [low, high]."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"low and high must be finite with low < high; got {low}, {high}.")
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * min((m for m in (1, 2, 5, 10) if m * power >= raw * 0.999), default=10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high]; with fewer than two of them, 1-2-5 steps or simply the nice ticks."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for multiples in ((1,), (1, 3), (1, 2, 5)):
        candidates = [m * 10.0**e for e in exponents for m in multiples]
        ticks = [t for t in candidates if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]
        if len(ticks) >= 2:
            return ticks[:: math.ceil(len(ticks) / 5)]
    return nice_ticks(low, high, 3)


def tick_label(value: float) -> str:
    """A tick as a person writes it: 0.05, −2, 10k, 3M."""
    scaled, unit = value, ""
    for limit, divisor, name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            scaled, unit = value / divisor, name
            break
    return f"{0.0 if abs(scaled) < 1e-12 else scaled:.4g}{unit}".replace("-", "−")


def without_outliers(levels: Iterable[float]) -> list[float]:
    """Levels within ten times the spread of the better half, so that one failed run does not flatten the rest."""
    kept = sorted((v for v in levels if math.isfinite(v)), reverse=True)
    if not kept:
        return []
    half = kept[: max(2, len(kept) // 2)]
    floor = half[0] - 10 * (half[0] - half[-1])
    return [v for v in kept if v >= floor]


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [0, 1], linearly or in the logarithm, with the ticks to draw."""

    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], *, log: bool = False, pad: float = 0.06, count: int = 4) -> Scale:
        """A scale that shows all finite `values` (if `log`, the positive ones), with a margin each side."""
        kept = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        low, high = (math.log(min(kept)), math.log(max(kept))) if log else (min(kept), max(kept))
        if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):  # one value: make room around it
            room = 0.7 if log else 0.5 * abs(low) or 0.5
            low, high = low - room, high + room
        margin = pad * (high - low)
        low, high = low - margin, high + margin
        if log:
            low, high = math.exp(low), math.exp(high)
            return cls(low, high, log_ticks(low, high), log=True)
        return cls(low, high, nice_ticks(low, high, count))

    @classmethod
    def unit(cls) -> Scale:
        """[0, 1] with ticks at the halves: probabilities."""
        return cls(0.0, 1.0, (0.0, 0.5, 1.0))

    def __call__(self, value: float) -> float:
        """Position of a value; NaN where it has none."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return math.nan
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)
