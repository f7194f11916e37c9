"""The cells of `bayesformer demo`: four methods on small data with short training."""

from __future__ import annotations

from collections.abc import Sequence

from bayesformer.bench.planning import Cell, plan

NOTE = (
    "Demo settings: short training (20 epochs on the series, 30 on the digits), 3 ensemble members, 10 dropout "
    "passes and 1000 test sequences, where a benchmark uses 100, 80, 10, 30 and 4000. Read it as a tour, not as "
    "a verdict."
)
METHODS = ("mle", "map", "ensemble", "mc_dropout")


def cells(seeds: Sequence[int]) -> list[Cell]:
    """All cells that the demo runs, with these training seeds."""
    methods = {"ensemble": {"members": 3}, "mc_dropout": {"draws": 10}}
    toy = {"training": {"epochs": 20}, "toy/*": {"test": 1000}, **methods}
    digits = {"training": {"epochs": 30}, **methods}
    return plan(["toy/*"], METHODS, seeds, toy) + plan(["digits"], METHODS, seeds, digits)
