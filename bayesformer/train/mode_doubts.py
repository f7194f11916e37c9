"""Whether a mode was found, in the words that a user reads."""

from __future__ import annotations

from bayesformer.core.doubts import Doubt

FAR = 0.3  # posterior standard deviations from the mode


def of_mode(decrement: float | None) -> list[Doubt]:
    """A doubt where the weights are more than .3 posterior standard deviations from the mode; None was not measured."""
    if decrement is None or not decrement > FAR:
        return []
    return [
        Doubt(
            "mode",
            f"The mode was not found: the weights are {decrement:.1f} posterior standard deviations away from it. "
            "Train longer, or with a larger training.lr.",
            decrement,
            FAR,
        )
    ]
