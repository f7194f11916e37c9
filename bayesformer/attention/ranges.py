"""Refusals that parts of attention share."""

from __future__ import annotations


def check_positive(**values: int) -> None:
    """Raise ValueError for sizes below 1, given by name."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}.")


def check_rate(name: str, rate: float) -> None:
    """Raise ValueError for a dropout rate that is no probability, or drops everything."""
    if not 0 <= rate < 1:
        raise ValueError(f"{name} must lie in [0, 1); got {rate}.")


def check_above_zero(**values: float) -> None:
    """Raise ValueError for numbers that are not positive and finite, given by name."""
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite; got {value}.")
