"""Whether a mode was found, in the words that a user reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bayesformer.core.doubts import Doubt, recorded

FAR = 0.3  # posterior standard deviations from the mode


def of_mode(decrement: float | None) -> list[Doubt]:
    """A doubt where the weights are more than .3 posterior standard deviations from the mode; None was not measured."""
    if decrement is None or not decrement > FAR:
        return []
    return [
        Doubt(
            "mode",
            f"The mode was not found: the weights are {decrement:.1f} posterior standard deviations away from it. "
            "Train longer, or with a larger training.lr; a model that was trained elsewhere needs the prior there, as "
            "weight decay.",
            decrement,
            FAR,
        )
    ]


def of_prior(heavy: float) -> list[Doubt]:
    """A doubt where a prior with heavy tails decides some weights: the curvature at the mode does not know their width.

    `heavy` is their share.
    """
    if not heavy > 0:
        return []
    return [
        Doubt(
            "prior",
            f"A prior with heavy tails (Student's t, Cauchy) says more than the data about {heavy:.0%} of the weights: "
            "their posterior is wider than its curvature at the mode, which this method takes its scale from. Use "
            "Nuts(), or a normal prior.",
            heavy,
            0.0,
        )
    ]


def of_training(converged: Sequence[bool | None]) -> list[Doubt]:
    """A doubt where the objective of some networks still rose when their training ended, or nobody can tell (None)."""
    unsettled, unknown = (sum(settled is verdict for settled in converged) for verdict in (False, None))
    if not unsettled + unknown:
        return []
    members = len(converged)
    who = "The network has" if members == 1 else f"{unsettled or unknown} of {members} networks have"
    found = (
        "not been trained to the end: the objective still rose when training stopped. Raise"
        if unsettled
        else "been trained for too few steps (fewer than 20, or than training.warmup) to tell whether the objective "
        "still rises. Raise"
    )
    return [Doubt("training", f"{who} {found} training.epochs or training.lr.", unsettled + unknown, 0)]


def with_training(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts of a fit whose training is all that was checked, with the doubt that this leaves, if any."""
    doubts = of_training(facts["converged"])
    return facts | recorded(doubts) if doubts else facts  # none is no finding
