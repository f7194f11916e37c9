"""Distance to the posterior against gradient evaluations: what each approximation loses, and what it costs.

Reads stored results of the tasks fidelity/* and runs nothing. Cost is counted in epochs, the gradients of N examples,
over all chains and members with the search for a mode; distance is the mean Wasserstein-2 distance of function values
to the reference posterior, in standard deviations of that one, as the mean over the regions of inputs.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from bayesformer.bench.report.axis import Scale
from bayesformer.bench.report.plot import Plot
from bayesformer.bench.report.standalone import Key, write_figure
from bayesformer.bench.statistics import Entry, Result, Summary, finite, summarise

PREFIX, LINEAR = "fidelity/", "linear-"
REGIONS = ("in", "gap", "out")
COLUMNS = 3  # panels side by side
MARKERS = 5
COLOURS = 8


def by_problem(results: Sequence[Result]) -> dict[str, dict[Entry, list[Result]]]:
    """Results by problem and by method with its variant, problems and methods in the order of their names."""
    found: dict[str, dict[Entry, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        task = str(result["task"])
        if task.startswith(PREFIX):
            entry = Entry(str(result["method"]), str(result.get("variant", "")))
            found[task.removeprefix(PREFIX)][entry].append(result)
    if not found:
        raise ValueError(f"results must hold a task {PREFIX}*; got none. `bayesformer run '{PREFIX}*'` makes them.")
    return {name: dict(sorted(found[name].items())) for name in sorted(found)}


def over_seeds(results: Sequence[Result], metric: str) -> Summary | None:
    """Mean and spread of a metric over seeds; None if no seed has it."""
    values = [finite(r["metrics"].get(metric)) for r in results]
    return summarise(v for v in values if v is not None)


def epochs(results: Sequence[Result]) -> float | None:
    """Mean cost over seeds in epochs of gradient evaluations; None if it was not counted."""
    found = summarise(v for r in results if (v := finite(r["cost"].get("gradient_epochs"))) is not None)
    return None if found is None else found.mean


def overview(results: Sequence[Result]) -> str:
    """Markdown, one row per method: distance and, in brackets, the ratio of spreads by region, on every problem.

    One table of the problems whose names begin alike, "linear", and one of the others; methods in the order of their
    median distance over the problems that they were run on.
    """
    problems = by_problem(results)
    linear = {name: found for name, found in problems.items() if name.startswith(LINEAR)}
    others = {name: found for name, found in problems.items() if name not in linear}
    return "\n\n".join(_overview(part) for part in (linear, others) if part)


def _overview(problems: Mapping[str, Mapping[Entry, Sequence[Result]]]) -> str:
    entries = {entry for found in problems.values() for entry in found}

    def place(entry: Entry) -> tuple[float, Entry]:
        return statistics.median(_distance(found[entry]) for found in problems.values() if entry in found), entry

    lines = [f"| distance, sd (spread ratio) | {' | '.join(problems)} |", "|---|" + "---|" * len(problems)]
    for entry in sorted(entries, key=place):
        cells = [_brief(found.get(entry, [])) for found in problems.values()]
        lines.append(f"| {entry.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _brief(results: Sequence[Result]) -> str:
    distance = over_seeds(results, "wasserstein")
    if distance is None:
        return "–"
    found = [over_seeds(results, f"spread_ratio/{region}") for region in REGIONS]
    return f"{_short(distance.mean)} ({' / '.join(_one(ratio) for ratio in found if ratio is not None)})"


def table(results: Sequence[Result]) -> str:
    """Markdown, one table per problem: distance, error of the mean, ratio of spreads by region, predictive, cost."""
    return "\n\n".join(_problem_table(name, entries) for name, entries in by_problem(results).items())


def _problem_table(name: str, entries: Mapping[Entry, Sequence[Result]]) -> str:
    regions = [
        r for r in REGIONS if any(f"wasserstein/{r}" in one["metrics"] for found in entries.values() for one in found)
    ]
    words = "/".join(regions)
    lines = [
        f"| {name} | distance, sd | distance {words} | spread ratio {words} | error of mean {words} | rank error "
        "| total variation | epochs | seconds | seeds |",
        "|---|" + "---|" * 9,
    ]
    ordered = sorted(entries.items(), key=lambda pair: _distance(pair[1]))
    return "\n".join([*lines, *(_row(entry, found, regions) for entry, found in ordered)])


def _distance(results: Sequence[Result]) -> float:
    found = over_seeds(results, "wasserstein")
    return float("inf") if found is None else found.mean


def _row(entry: Entry, results: Sequence[Result], regions: Sequence[str]) -> str:
    distance = over_seeds(results, "wasserstein")
    spread = "" if distance is None or distance.sd is None else f" ± {_short(distance.sd)}"
    parts = [
        entry.label,
        "–" if distance is None else _short(distance.mean) + spread,
        *(_regions(results, metric, regions) for metric in ("wasserstein", "spread_ratio", "mean_error")),
        *(_one(over_seeds(results, metric)) for metric in ("rank_error", "total_variation")),
        "–" if (cost := epochs(results)) is None else f"{cost:,.0f}",
        _one(summarise(float(r["cost"]["fit_seconds"]) for r in results)),
        str(len(results)),
    ]
    return f"| {' | '.join(parts)} |"


def _regions(results: Sequence[Result], metric: str, regions: Sequence[str]) -> str:
    return " / ".join(_one(over_seeds(results, f"{metric}/{region}")) for region in regions)


def _one(summary: Summary | None) -> str:
    return "–" if summary is None else _short(summary.mean)


def _short(value: float) -> str:
    """Two digits after the point below 10, none above."""
    return f"{value:.2f}" if abs(value) < 10 else f"{value:,.0f}"


def figure(results: Sequence[Result], path: Path) -> Path:
    """One panel per problem: distance to the posterior against gradient evaluations, both on logarithmic axes."""
    problems = by_problem(results)
    entries = sorted({entry for found in problems.values() for entry in found})
    styles = {entry: (f"m{i % COLOURS}", i // COLOURS % MARKERS) for i, entry in enumerate(entries)}
    panels = [(name, plot) for name, found in problems.items() if (plot := _panel(found, styles)) is not None]
    if not panels:
        raise ValueError("results must say what they cost in gradient evaluations; none of them does.")
    key = [Key(entry.label, *styles[entry]) for entry in entries]
    return write_figure(path, panels, key, COLUMNS)


def _panel(entries: Mapping[Entry, Sequence[Result]], styles: Mapping[Entry, tuple[str, int]]) -> Plot | None:
    places = {}
    for entry, results in entries.items():
        distance, cost = over_seeds(results, "wasserstein"), epochs(results)
        if distance is not None and cost and distance.mean > 0:
            places[entry] = cost, distance
    if not places:
        return None
    x = Scale.over([cost for cost, _ in places.values()], log=True, pad=0.08)
    y = Scale.over([d.mean for _, d in places.values()] + [1.0], log=True, pad=0.08)
    plot = Plot(x, y, 330, 250, "gradient evaluations, epochs", "distance to the posterior, sd", clip=True)
    plot.line([x.low, x.high], [1.0, 1.0], "guide")  # a point at the posterior's mean
    for entry, (cost, distance) in places.items():
        style, shape = styles[entry]
        low, high = max(y.low, distance.mean - (distance.sd or 0)), distance.mean + (distance.sd or 0)
        plot.line([cost, cost], [low, high], f"thin {style}")
        plot.point(cost, distance.mean, f"fill {style}", radius=4, shape=shape)
    return plot
