"""Figures of calibration, of uncertainty on inputs unlike the training data, and of predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from bayesformer.bench.report.axis import Scale
from bayesformer.bench.report.data import Report, TaskResults, floats, metric_of
from bayesformer.bench.report.markup import Html, tag
from bayesformer.bench.report.parts import figure, panel
from bayesformer.bench.report.plot import Plot, marker
from bayesformer.bench.report.wording import fixed, listing
from bayesformer.bench.statistics import Entry, finite, part

Recorded: TypeAlias = Mapping[str, Any]  # what a run recorded for a figure

SERIES, MANY = 2, 12  # series that are shown, and from how many methods on only one of them
LINE, BOX = "M0 6h22", "M0 2h22v8h-22z"  # samples of a line and of an area


def reliability(report: Report, task: TaskResults) -> Html | None:
    """The figure of accuracy against stated confidence, a panel per method."""

    def draw(plot: Plot, data: Recorded) -> None:
        confidence, accuracy, count = (floats(data.get(k)) for k in ("confidence", "accuracy", "count"))
        largest = max((c for c in count if c > 0), default=1.0)
        plot.line(confidence, accuracy, "thin")
        radii = [max(1.3, 5.5 * math.sqrt(n / largest)) if n > 0 else math.nan for n in count]
        plot.points(confidence, accuracy, radius=radii)

    panels = _diagonals(report, task, "reliability", draw, "Reliability", ("confidence", "accuracy"), "ece")
    caption = (
        "On the dashed line a stated confidence comes true as often as it says; below it the method is too "
        "sure of itself, above it too timid. The area of a dot is the number of predictions. "
    )
    return figure("Does confidence come true?", [panels], caption + task.seed_note("reliability"), "small")


def coverage(report: Report, task: TaskResults) -> Html | None:
    """The figure of interval coverage: the share of targets inside intervals of every level."""

    def draw(plot: Plot, data: Recorded) -> None:
        levels, inside = ([0.0, *floats(data.get(k)), 1.0] for k in ("levels", "coverage"))
        plot.band(levels, levels, inside)
        plot.line(levels, inside)
        plot.points(levels[1:-1], inside[1:-1], radius=1.8)

    axes = ("stated probability", "share inside")
    panels = _diagonals(report, task, "coverage", draw, "Interval coverage", axes, "coverage_90")
    caption = (
        "An interval that states 90 % should hold 90 % of the true values: then the curve lies on the dashed "
        "line. Below it the intervals are too narrow (too sure), above it too wide. "
    )
    return figure("Do intervals hold what they state?", [panels], caption + task.seed_note("coverage"), "small")


def _diagonals(
    report: Report,
    task: TaskResults,
    key: str,
    draw: Callable[[Plot, Recorded], None],
    what: str,
    axes: tuple[str, str],
    metric: str,
) -> list[Html]:
    """Panels of two probabilities that should agree, each with the number that belongs to it, of the same run."""
    panels = []
    for entry, run in task.pictured(key).items():
        plot = Plot(Scale.unit(), Scale.unit(), 190, 195, *axes, share=report.shared)
        plot.line([0, 1], [0, 1], "guide")
        draw(plot, run["figures"][key])
        value = finite(part(run, "metrics").get(metric))
        aside = "" if value is None else f"{metric_of(metric).label} {fixed(value, 3)}"
        panels.append(panel(report, entry, plot.render(what), aside))
    return panels


def entropy(report: Report, task: TaskResults) -> Html | None:
    """The figure of entropies: histograms on test inputs and on inputs unlike the training data."""
    runs = task.pictured("entropy").items()
    found: dict[Entry, Recorded] = {e: data for e, run in runs if (data := run["figures"]["entropy"]).get("sets")}
    if not found:
        return None
    names = list(dict.fromkeys(name for data in found.values() for name in data["sets"]))
    names.sort(key=lambda name: name != "test")
    shares = {e: {n: _shares(d["sets"].get(n)) for n in names} for e, d in found.items()}
    edges = {e: floats(d.get("edges")) for e, d in found.items()}
    x = Scale.over([v for values in edges.values() for v in values], pad=0, count=3)
    y = Scale.over([0.0, *(v for sets in shares.values() for s in sets.values() for v in s)], pad=0, count=3)
    panels = []
    for entry, sets in shares.items():
        plot = Plot(x, y, 190, 150, "entropy, nats", "share", share=report.shared)
        for i, name in enumerate(names):
            plot.histogram(edges[entry], sets[name], _set_style(i), closed=i == 0)
        panels.append(panel(report, entry, plot.render(f"Entropy on {listing(names)}")))
    key = [key_item(name, _set_style(i), LINE if i else BOX) for i, name in enumerate(names)]
    caption = (
        f"How unsure the method is on familiar inputs ({names[0]}, filled) and on inputs unlike the training "
        "data (lines): the further right of the filled area the lines lie, the better it notices what it "
        "does not know. All panels share their axes; a share is a fraction of its set. "
    )
    return figure("Does it know what it does not know?", [panels], caption + task.seed_note("entropy"), "small", key)


def _shares(counts: object) -> list[float]:
    values = floats(counts)
    total = math.fsum(v for v in values if v > 0) or 1.0
    return [v / total for v in values]


def _set_style(index: int) -> str:
    """Familiar inputs are a filled grey area, others lines that differ in colour and in dash."""
    if index == 0:
        return "m softer"
    return f"m{(1, 0, 3, 2)[(index - 1) % 4]} stroke " + ("", "dash", "dot")[(index - 1) % 3]


def key_item(name: str, class_: str, shape: str) -> Html:
    """One line of a figure's key: a sample of the mark, and what it means."""
    sample = tag("svg", tag("path", class_=class_, d=shape), viewBox="0 0 22 12", aria_hidden="true")
    return tag("li", sample, name)


def bands(report: Report, task: TaskResults) -> Html | None:
    """The figure of predictions for the first test series: mean, bands and the truth, a row per series."""
    runs = task.pictured("bands").items()
    most = SERIES if len(runs) < MANY else 1
    found = {e: [s for s in run["figures"]["bands"] if s.get("time")][:most] for e, run in runs}
    number = max(map(len, found.values()), default=0)
    rows = []
    for i in range(number):
        shown = {e: series[i] for e, series in found.items() if len(series) > i}
        y = _band_scale(list(shown.values()))
        title = f"Predictions for series {i + 1}"
        rows.append([panel(report, e, _band_plot(report, s, y, title)) for e, s in shown.items()])
    has_oracle = any(s.get("oracle_mean") for series in found.values() for s in series)
    key = [
        key_item("observed", "inkfill", marker(11, 6, 2)),
        key_item("predicted mean", "stroke", LINE),
        key_item("total uncertainty", "soft", BOX),
        key_item("of it, noise in the data (aleatoric)", "softer", BOX),
        key_item("true mean (oracle)", "ink dash", LINE) if has_oracle else None,
        key_item("its band", "ink dot", LINE) if has_oracle else None,
    ]
    which = "the first test series" if number == 1 else f"the first {number} test series, one per row"
    match = ", and the band should match that of the oracle, the best that any method can do"
    caption = (
        f"Predictions for {which}, not chosen for looks: most dots should lie inside the coloured band"
        f"{match if has_oracle else ''}. What lies outside the inner band is doubt of the method itself. "
        f"{task.seed_note('bands')}"
    )
    return figure("What do predictions look like?", rows, caption, "series", key)


def _band_scale(series: Sequence[Recorded]) -> Scale:
    """Room for the data and the oracle, and for bands up to one data range beyond: a diverged method must not
    flatten the others."""
    solid = [v for s in series for k in ("observed", "oracle_low", "oracle_high") for v in floats(s.get(k))]
    bands = [v for s in series for k in ("mean", "low", "high") for v in floats(s.get(k))]
    solid = [v for v in solid if math.isfinite(v)] or [v for v in bands if math.isfinite(v)] or [0.0]
    low, high = min(solid), max(solid)
    near = [v for v in bands if low - (high - low) <= v <= high + (high - low)]
    return Scale.over(solid + near)


def _band_plot(report: Report, series: Recorded, y: Scale, title: str) -> Html:
    def get(key: str) -> list[float]:
        return floats(series.get(key))

    time = get("time")
    plot = Plot(Scale.over(time, pad=0.01), y, 240, 170, "time", clip=True, share=report.shared)
    plot.band(time, get("low"), get("high"), "soft")
    plot.band(time, get("aleatoric_low"), get("aleatoric_high"), "softer")
    with plot.common():
        for key in ("oracle_low", "oracle_high"):
            plot.line(time, get(key), "ink dot")
        plot.line(time, get("oracle_mean"), "ink dash")
    plot.line(time, get("mean"))
    with plot.common():
        plot.points(time, get("observed"), "inkfill", radius=1.5)
    return plot.render(title)
