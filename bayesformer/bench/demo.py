"""The cells of `bayesformer demo`: seven methods on small data with short training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bayesformer.bench.planning import Cell, plan

NOTE = (
    "Demo settings: short training (20 epochs on the series, 30 on the digits), 3 ensemble members, 10 draws of "
    "dropout and of stochastic attention, a last-layer Laplace approximation and 1000 test sequences, where a "
    "benchmark uses 100, 80, 10, 30, all layers and 4000. Read it as a tour, not as a verdict."
)
METHODS = ("mle", "map", "ensemble", "mc_dropout", "attention", "laplace", "sghmc")
SETTINGS: dict[str, dict[str, Any]] = {
    "ensemble": {"members": 3},
    "mc_dropout": {"draws": 10},
    "attention": {"draws": 10},
    "laplace": {"structure": "last_layer"},
}


def cells(seeds: Sequence[int]) -> list[Cell]:
    """All cells that the demo runs, with these training seeds."""
    toy = {"training": {"epochs": 20}, "toy/*": {"test": 1000}, **SETTINGS}
    digits = {"training": {"epochs": 30}, **SETTINGS}
    return plan(["toy/*"], METHODS, seeds, toy) + plan(["digits"], METHODS, seeds, digits)
