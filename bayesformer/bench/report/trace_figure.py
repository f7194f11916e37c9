"""The figure of chains: predictions and weights along the draws."""

from __future__ import annotations

from typing import Any

from bayesformer.bench.report.axis import Scale
from bayesformer.bench.report.data import Report, TaskResults, floats
from bayesformer.bench.report.markup import Html, tag
from bayesformer.bench.report.parts import figure, panel, small
from bayesformer.bench.report.plot import Plot
from bayesformer.bench.report.wording import fixed
from bayesformer.bench.statistics import finite, part

DASHES = ("", " dash", " dot")  # tell chains apart without colour


def traces(report: Report, task: TaskResults) -> Html | None:
    """The figure of traces: a panel per sampler, a chart per quantity, a line per chain."""
    panels = []
    for entry, run in task.pictured("traces").items():
        recorded = run["figures"]["traces"]
        metrics = part(run, "metrics")
        rhat, ess = finite(metrics.get("rhat")), finite(metrics.get("ess"))
        aside = "" if rhat is None or ess is None else f"R-hat {fixed(rhat, 2)}, effective draws {fixed(ess, 0)}"
        plots = [_plot(report, quantity) for quantity in recorded]
        panels.append(panel(report, entry, plots, aside))
    caption = (
        "Predictions and single weights along the chain, in the order of the draws; every line is a chain. Chains that "
        "have settled look alike and drift nowhere: R-hat is near 1. Weights may wander where predictions stand still. "
    )
    return figure("Have the chains settled?", [panels], caption + task.seed_note("traces"), "wide")


def _plot(report: Report, quantity: dict[str, Any]) -> Html:
    chains = [floats(values) for values in quantity["chains"]]
    longest = max(map(len, chains), default=0)
    x = Scale.over([1.0, float(max(longest, 2))], pad=0.02)
    plot = Plot(x, Scale.over([v for values in chains for v in values], count=2), 420, 86, share=report.shared)
    for i, values in enumerate(chains):
        plot.line(range(1, len(values) + 1), values, "thin" + DASHES[i % len(DASHES)])
    name = str(quantity["name"])
    return tag("div", small(name), plot.render(f"Trace of {name}"))
