"""Quality against the cost of a prediction: draws of the weights, Gaussian outputs, an ensemble, one network.

Reads stored results and runs nothing. Cost is the time of one prediction as a multiple of the MLE's on the same task;
quality is the gap to the oracle where the truth is known, else the task's primary metric.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from bayesformer.bench.report.axis import Scale, without_outliers
from bayesformer.bench.report.plot import Plot
from bayesformer.bench.report.standalone import Key, write_figure
from bayesformer.bench.statistics import BASELINE, Result, Summary, summarise
from bayesformer.evaluate.catalogue import describe
from bayesformer.methods import METHODS

WAYS = ("sampled", "linearised", "streamlined", "one_pass")  # a marker each
GAP = "oracle_gap"
COLUMNS = 4  # panels side by side


class CostEntry(NamedTuple):
    """One place in the figure: a method with its settings, how it predicts, and from how many draws."""

    family: str
    way: str | None = None  # None: there is one way only
    draws: int | None = None  # of the weights

    @property
    def label(self) -> str:
        """The family, the way of predicting and the number of draws as one text."""
        draws = f", {self.draws} draw{'s' if self.draws != 1 else ''}" if self.draws else ""
        return f"{self.family}, {self.way}{draws}" if self.way else self.family


class Place(NamedTuple):
    """The cost and the quality of an entry, each as mean and spread over seeds."""

    cost: Summary  # multiples of the MLE's
    quality: Summary


def entry_of(result: Result) -> CostEntry:
    """The entry of a result; a family is named by the method and the settings that differ from its defaults."""
    method, settings = str(result["method"]), result["settings"]["method"]
    defaults = asdict(METHODS[method]())
    changed = {k: v for k, v in settings.items() if v != defaults.get(k) and k not in {"draws", "predictive"}}
    words = ", ".join(f"{name}={value}" for name, value in changed.items())
    family = f"{method} ({words})" if words else method
    if "predictive" not in defaults:
        return CostEntry(family)
    way = settings.get("predictive", "sampled")  # results of before there was a choice
    return CostEntry(family, way, settings["draws"] if way == "sampled" else None)


def places(results: Sequence[Result]) -> dict[CostEntry, Place]:
    """Cost and quality of every entry of one task, the MLE first, then by name, way and draws."""
    metric = metric_of(results)
    groups: dict[CostEntry, list[Result]] = defaultdict(list)
    for result in results:
        groups[entry_of(result)].append(result)
    base = summarise(r["cost"]["predict_ms"] for r in groups.get(CostEntry(BASELINE), []))
    if base is None or base.mean <= 0:
        raise ValueError(f"results of {results[0]['task']} must hold an MLE with its cost, to compare with; got none.")
    found = {}
    for entry in sorted(groups, key=_order):
        cost = summarise(r["cost"]["predict_ms"] / base.mean for r in groups[entry])
        quality = summarise(r["metrics"].get(metric) for r in groups[entry])
        if cost is not None and quality is not None:
            found[entry] = Place(cost, quality)
    return found


def _order(entry: CostEntry) -> tuple[bool, str, int, int]:
    return entry.family != BASELINE, entry.family, WAYS.index(entry.way) if entry.way else 0, entry.draws or 0


def metric_of(results: Sequence[Result]) -> str:
    """The name of the metric for these results: the gap to the oracle, or else the task's primary metric."""
    return GAP if all(GAP in r["metrics"] for r in results) else str(results[0]["primary"])


def by_task(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The results by task, tasks in the order of their names."""
    found: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        found[str(result["task"])].append(result)
    if not found:
        raise ValueError("results must hold at least one result; got none.")
    return dict(sorted(found.items()))


def drawn(entries: Iterable[CostEntry]) -> list[CostEntry]:
    """What the figure shows: families sampled with several numbers of draws, in all their ways, and what has no draws
    and no settings of its own. The table has everything."""
    counts: dict[str, set[int]] = defaultdict(set)
    for entry in entries:
        counts[entry.family].update([entry.draws] if entry.draws else [])
    plain = [e for e in entries if e.way is None and "(" not in e.family]
    return plain + [e for e in entries if len(counts[e.family]) > 1]


def figure(results: Sequence[Result], path: Path) -> Path:
    """One panel per task: quality with its spread over seeds against cost, draws of one family joined by a line."""
    tasks = {name: places(found) for name, found in by_task(results).items()}
    shown = sorted({entry for found in tasks.values() for entry in drawn(list(found))}, key=_order)
    families = list(dict.fromkeys(entry.family for entry in shown if entry.family != BASELINE))
    styles = {BASELINE: "m", **{family: f"m{i}" for i, family in enumerate(families)}}
    panels = []
    for name, found in tasks.items():
        metric = describe(metric_of([r for r in results if r["task"] == name])).label
        panels.append((name, _panel({e: p for e, p in found.items() if e in shown}, styles, metric)))
    labels = {(e.family, e.way): e for e in shown}  # one line of the key for all draws
    key = [Key(_key_label(e), styles[e.family], _shape(e)) for e in labels.values()]
    return write_figure(path, panels, key, COLUMNS)


def _key_label(entry: CostEntry) -> str:
    name = "MLE" if entry.family == BASELINE else entry.family
    return f"{name}, {entry.way}" if entry.way else name


def _shape(entry: CostEntry) -> int:
    return min(WAYS.index(entry.way), 2) if entry.way else 3 + (entry.family == BASELINE)  # five markers there are


def _panel(found: Mapping[CostEntry, Place], styles: Mapping[str, str], label: str) -> Plot:
    ends = [q.mean + k * (q.sd or 0) for _, q in found.values() for k in (-1, 1)]
    x = Scale.over([c.mean for c, _ in found.values()], log=True, pad=0.08)
    y = Scale.over(without_outliers(ends), pad=0.1)
    plot = Plot(x, y, 330, 250, "cost of a prediction, MLE = 1", label, clip=True)
    if CostEntry(BASELINE) in found:
        level = found[CostEntry(BASELINE)].quality.mean
        plot.line([x.low, x.high], [level, level], "guide")
    for i, (family, style) in enumerate(styles.items()):
        line = [(e.draws, place) for e, place in found.items() if e.family == family and e.draws]
        plot.line([c.mean for _, (c, _) in line], [q.mean for _, (_, q) in line], f"stroke {style}")
        for draws, (c, q) in [line[0], line[-1]] if len(line) > 1 else []:
            px, py = plot.at(c.mean, q.mean)
            plot.text(px, py - 7 if i % 2 else py + 14, str(draws), "halo middle")  # lines often end together
    for entry, (c, q) in found.items():
        style = styles[entry.family]
        plot.line([c.mean, c.mean], [q.mean - (q.sd or 0), q.mean + (q.sd or 0)], f"thin {style}")
        plot.point(c.mean, q.mean, f"fill {style}", radius=4, shape=_shape(entry))
    return plot


def table(results: Sequence[Result]) -> str:
    """Markdown: quality ± its standard deviation over seeds, and the cost, of every entry on every task."""
    tasks: dict[str, Any] = {name: places(found) for name, found in by_task(results).items()}
    entries = sorted({entry for found in tasks.values() for entry in found}, key=_order)
    rows = [f"| method | {' | '.join(tasks)} |", "|---|" + "---|" * len(tasks)]
    for entry in entries:
        cells = [_cell(found.get(entry)) for found in tasks.values()]
        rows.append(f"| {entry.label} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(place: Place | None) -> str:
    if place is None:
        return "–"
    cost, (mean, sd, _) = place
    times = f"{cost.mean:.1f}" if cost.mean < 10 else f"{cost.mean:.0f}"
    return f"{mean:.3f} (× {times})" if sd is None else f"{mean:.3f} ± {sd:.3f} (× {times})"
