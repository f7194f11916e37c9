"""The cells of `bayesformer demo`: what the library is for, in a few minutes.

A curve with a gap in the data, where the true posterior is known and every method's band can be seen beside it; digits
with images that are none; a series whose best possible prediction is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bayesformer.bench.planning import Cell, plan

NOTE = (
    "Demo settings: short training (20 epochs on the series, 30 on the digits), 5 ensemble members, 10 draws of "
    "dropout, a last-layer Laplace approximation and 1000 test sequences, where a benchmark uses 100, 80, 10, 30, all "
    "layers and 4000. Priors are N(0, 1), never tuned: a truer posterior under "
    "such a prior may predict worse. The curve is fitted for 1000 epochs by a network with one hidden layer, which has "
    "neither attention nor dropout: stochastic attention is shown there in a small transformer on the same data, whose "
    "own posterior is another one. Read it as a tour, not as a verdict."
)
CURVE, SERIES, IMAGES = "fidelity/gap-mlp", "toy/m1", "digits"
# Long ones first, so that no core waits for the last of them.
ON_CURVE = ("sghmc", "ensemble", "vi", "laplace", "mle")
METHODS = ("sghmc", "ensemble", "laplace", "attention", "mc_dropout", "mle")
SETTINGS: dict[str, dict[str, Any]] = {
    "ensemble": {"members": 5},
    "mc_dropout": {"draws": 10},
    "laplace": {"structure": "last_layer", "prior_precision": 1.0},  # the prior of the other methods, N(0, 1)
}


def cells(seeds: Sequence[int]) -> list[Cell]:
    """All cells that the demo runs, with these training seeds."""
    curve = {"training": {"epochs": 1000}, **SETTINGS, "laplace": {"prior_precision": 1.0}}
    digits = {"training": {"epochs": 30}, **SETTINGS}
    series = {"training": {"epochs": 20}, SERIES: {"test": 1000}, **SETTINGS}
    attentive = {**curve, CURVE: {"network": "attention"}}
    plans = [
        (IMAGES, METHODS, digits),
        (SERIES, METHODS, series),
        (CURVE, ON_CURVE, curve),
        (CURVE, ("attention",), attentive),
    ]
    return [cell for task, methods, settings in plans for cell in plan([task], methods, seeds, settings)]
