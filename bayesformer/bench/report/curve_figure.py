"""Functions of one variable with the bands of every method beside those of the true posterior: the page's opening."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bayesformer.bench.report.axis import Scale
from bayesformer.bench.report.data import Report, TaskResults, floats, metric_of
from bayesformer.bench.report.figures import BOX, LINE, Recorded, key_item
from bayesformer.bench.report.markup import Html, tag
from bayesformer.bench.report.parts import figure, panel
from bayesformer.bench.report.plot import Plot, marker
from bayesformer.bench.report.wording import duration, fixed
from bayesformer.bench.statistics import Entry, Result, finite, part

CURVE, DISTANCE = "curve", "wasserstein"
SENTENCE = (
    "Where there are no dots, nobody knows the curve: an honest method says so by a band as wide as the dashed lines, "
    "which are the right answer, and a method whose band is narrower claims to know what the data do not tell."
)


def opening(report: Report) -> Html | None:
    """The figure of the first task that has one, under a sentence for newcomers."""
    task = _opened(report)
    return (
        None if task is None else tag("div", tag("p", SENTENCE, class_="answer"), _figure(report, task), id="opening")
    )


def curves(report: Report, task: TaskResults) -> Html | None:
    """The same figure in the section of every other task that has one."""
    return None if task is _opened(report) else _figure(report, task)


def _opened(report: Report) -> TaskResults | None:
    return next((task for task in report.tasks if _drawn(task)), None)


def _drawn(task: TaskResults) -> dict[Entry, Result]:
    """The first run of every method that recorded its curve, nearest to the posterior first."""
    return {e: run for e, run in task.pictured(CURVE).items() if floats(part(run["figures"], CURVE).get("x"))}


def _figure(report: Report, task: TaskResults) -> Html | None:
    found = _drawn(task)
    if not found:
        return None
    data: list[Recorded] = [run["figures"][CURVE] for run in found.values()]
    y = _scale(data)
    panels = [_reference(report, data[0], y)]
    for entry, run in found.items():
        panels.append(panel(report, entry, _plot(report, run["figures"][CURVE], y, entry.label), _aside(run)))
    key = [
        key_item("data", "inkfill", marker(11, 6, 2)),
        key_item("mean", "stroke", LINE),
        key_item("what the method leaves open (± 2 sd)", "soft", BOX),
        key_item("what is really open: the posterior", "ink dash", LINE),
    ]
    caption = (
        f"{task.name}: the network's function under every method's posterior, nearest to the true one first; noise of "
        "the data is not part of the bands. The distance is in standard deviations of the true posterior, as a mean "
        f"over inputs: 0 is right. {task.seed_note(CURVE)}"
    )
    return figure("What does each method say where there are no data?", [panels], caption, "curves", key)


def _aside(run: Result) -> str:
    """Distance and cost of a run, and that its network is not the one of the posterior, where it is not."""
    distance, seconds = finite(part(run, "metrics").get(DISTANCE)), finite(part(run, "cost").get("fit_seconds"))
    words = [] if distance is None else [f"{metric_of(DISTANCE).label.lower()} {fixed(distance, 2)}"]
    words += [] if seconds is None else [f"fitted in {duration(seconds)}"]
    other = part(run["figures"], CURVE).get("network")
    return "; ".join([*words, *([str(other)] if other else [])])


def _scale(data: Sequence[Recorded]) -> Scale:
    """Room for the data and the true posterior: a method that leaves the frame is far from both."""
    shown = [v for k in ("observed_y", "reference_low", "reference_high") for v in floats(data[0].get(k))]
    return Scale.over([v for v in shown if math.isfinite(v)] or [0.0])


def _reference(report: Report, data: Recorded, y: Scale) -> Html:
    """The true posterior alone, in grey."""
    own = {k.removeprefix("reference_"): v for k, v in data.items() if k.startswith("reference_")}
    shown = {**own, **{k: data.get(k) for k in ("x", "observed_x", "observed_y")}}
    aside = ", ".join([*([str(data["reference"])] if data.get("reference") else []), "the right answer"])
    name = tag("p", tag("strong", "the posterior"), tag("small", aside), class_="panel-name")
    return tag("div", name, _plot(report, shown, y, "The posterior"), class_="panel m")


def _plot(report: Report, data: Recorded, y: Scale, title: str) -> Html:
    def get(key: str) -> list[float]:
        return floats(data.get(key))

    x = get("x")
    plot = Plot(Scale.over(x, pad=0.01, count=8), y, 320, 200, clip=True, share=report.shared)
    plot.band(x, get("low"), get("high"), "soft")
    with plot.common():
        for key in ("reference_low", "reference_high"):
            plot.line(x, get(key), "ink dash")
    plot.line(x, get("mean"))
    with plot.common():
        plot.points(get("observed_x"), get("observed_y"), "inkfill", radius=1.5)
    return plot.render(f"Bands of {title}")
