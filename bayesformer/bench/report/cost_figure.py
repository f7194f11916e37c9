"""Costs of the methods: a table, and quality against time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bayesformer.bench.report.axis import Scale
from bayesformer.bench.report.data import Report, TaskResults
from bayesformer.bench.report.markup import Child, Html, tag
from bayesformer.bench.report.parts import cell, entry_name, figure, plus_minus, row, small, table
from bayesformer.bench.report.plot import Plot
from bayesformer.bench.report.wording import DASH, decimals, spread
from bayesformer.bench.statistics import Entry, Summary

Box = tuple[float, float, float, float]  # left, top, right, bottom


def cost(report: Report, task: TaskResults) -> list[Html | None]:
    """Charts of quality against training and prediction time, and the table of costs."""
    fit, predict, parameters, memory = map(task.costs, ("fit_seconds", "predict_ms", "parameters", "peak_mib"))
    rows = []
    for entry in task.order:
        times = [_time(costs, entry, task.baseline) for costs in (fit, predict)]
        sizes = [_whole(costs[entry]) for costs in (parameters, memory)]
        rows.append(row(entry_name(report, entry), map(cell, [*times, *sizes])))
    head = ["Method", "Training, s", "Prediction, ms per example", "Stored numbers", "Peak memory, MiB"]
    numbers = table(f"{task.name}: cost", head, rows, "cost")
    axes = {"training, s": fit, "prediction, ms per example": predict}
    plots = [plot for label, costs in axes.items() if (plot := _scatter(report, task, costs, label))]
    title = "What does it cost?"
    if len(plots) < len(axes):
        return [tag("h3", title), numbers]
    side = {"higher": ", best is upper left", "lower": ", best is lower left", "none": ""}[task.primary.better]
    caption = f"Quality ({task.quality}) against price on a logarithmic axis{side}. {spread([task])}"
    return [figure(title, [plots], caption, "pair"), numbers]


def _time(costs: Mapping[Entry, Summary | None], entry: Entry, baseline: Entry | None) -> list[Child]:
    """A time with its spread, and as a multiple of the MLE's."""
    value, base = costs[entry], costs[baseline] if baseline else None
    text = plus_minus(value, decimals([value]))
    if value is None or base is None or base.mean <= 0 or entry == baseline:
        return text
    ratio = value.mean / base.mean
    return [*text, small(f"{ratio:.1f} × MLE" if ratio < 10 else f"{ratio:.0f} × MLE", "times")]


def _whole(summary: Summary | None) -> str:
    return f"{summary.mean:,.0f}".replace(",", "\u202f") if summary else DASH


def _scatter(report: Report, task: TaskResults, costs: Mapping[Entry, Summary | None], label: str) -> Html | None:
    quality = task.summaries(task.primary.name)
    shown = [(e, c, q) for e in task.order if (c := costs[e]) and (q := quality[e]) and c.mean > 0]
    if not shown:
        return None
    ends = [q.mean + k * (q.sd or 0) for _, _, q in shown for k in (-1, 1)]
    x, y = Scale.over([c.mean for _, c, _ in shown], log=True, pad=0.16), Scale.over(ends, pad=0.12)
    plot = Plot(x, y, 360, 240, label, task.primary.label)
    for entry, c, q in shown:
        style = report.style(entry)
        if q.sd is not None:
            plot.line([c.mean, c.mean], [q.mean - q.sd, q.mean + q.sd], f"thin {style}")
        plot.point(c.mean, q.mean, f"fill {style}", radius=4.5, shape=report.shape(entry))
    _label_points(plot, [(*plot.at(c.mean, q.mean), e.label) for e, c, q in shown])
    return tag("div", plot.render(f"{task.primary.label} against {label}"), class_="panel")


def _label_points(plot: Plot, points: Sequence[tuple[float, float, str]]) -> None:
    """Names beside their points, each at the first of six places where it covers nothing."""
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y, _ in points]

    def free(box: Box) -> bool:
        return box[0] > -4 and box[2] < plot.inner_width and not any(_overlap(box, other) for other in taken)

    for x, y, label in points:
        text = label if len(label) <= 24 else label[:23] + "…"
        width = 5.7 * len(text)
        places = [  # anchor, its position, left end of the text
            ("", x + 8, y + 3.5, x + 8),
            ("end", x - 8, y + 3.5, x - 8 - width),
            ("middle", x, y - 9, x - width / 2),
            ("middle", x, y + 16, x - width / 2),
            ("", x + 6, y - 7, x + 6),
            ("", x + 6, y + 14, x + 6),
        ]
        boxes = [(left, py - 9, left + width, py + 2) for _, _, py, left in places]
        choice = next((i for i, box in enumerate(boxes) if free(box)), 0)
        anchor, px, py, _ = places[choice]
        taken.append(boxes[choice])
        plot.text(px, py, text, f"halo {anchor}".strip())


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
