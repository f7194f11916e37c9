"""Results as Markdown, for documents: one row per method, one column per task."""

from __future__ import annotations

import statistics as stats
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from bayesformer.bench.statistics import Standing, finite, part, standings
from bayesformer.core.errors import unknown_name
from bayesformer.evaluate.catalogue import describe

SIGNS = {"better": " ▲", "worse": " ▼"}


def comparison(results: Sequence[dict[str, Any]], metric: str | None = None) -> str:
    """Mean ± standard deviation over seeds; ▲ ▼ significantly better or worse than the MLE of the same task.

    The metric is the gap to the oracle where there is one, else each task's primary metric. Rows are ordered by
    their mean over the tasks, the best first, those that were not run on all of them last.
    """
    tasks = sorted({r["task"] for r in results})
    columns = {task: _column([r for r in results if r["task"] == task], task, metric) for task in tasks}
    rows = sorted({name for column in columns.values() for name in column})
    most = max((s.summary.n for column in columns.values() for s in column.values() if s.summary), default=0)

    signs = {task: -1 if _direction(results, task, metric) == "higher" else 1 for task in tasks}

    def place(name: str) -> tuple[bool, float]:
        found = [signs[t] * s.summary.mean for t, c in columns.items() if (s := c.get(name)) and s.summary]
        return len(found) < len(tasks), stats.fmean(found) if found else 0.0

    lines = [f"| method | {' | '.join(tasks)} |", "|---|" + "---|" * len(tasks)]
    for name in sorted(rows, key=place):
        cells = [_cell(columns[task].get(name), most) for task in tasks]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _metric(results: Sequence[dict[str, Any]], metric: str | None) -> str:
    """The metric asked for, or the gap to the oracle, or the primary one of these results, which are of one task."""
    known = {name for r in results for name in r["metrics"]}
    name = metric or ("oracle_gap" if "oracle_gap" in known else results[0].get("primary", "log_likelihood"))
    if name not in known:
        raise unknown_name("metric", name, known)
    return name


def _direction(results: Sequence[dict[str, Any]], task: str, metric: str | None) -> str:
    """Which way the metric of a task improves; as "higher" where it ranks nobody."""
    better = describe(_metric([r for r in results if r["task"] == task], metric)).better
    return "lower" if better == "lower" else "higher"


def _column(results: Sequence[dict[str, Any]], task: str, metric: str | None) -> dict[str, Standing]:
    name = _metric(results, metric)
    # The tables of priors are named after their task; as a row they are one method.
    short = task.rpartition("/")[2]
    found = standings(results, name, describe(name).better)
    return {_label(s.entry.label, short): s for s in found}


def _label(label: str, short: str) -> str:
    return label.replace(f"improved/{short}", "improved").replace("encoder.blocks.*.attention.*", "attention")


def _cell(standing: Standing | None, most: int) -> str:
    if standing is None or standing.summary is None:
        return "–"
    mean, sd, n = standing.summary
    text = f"{mean:.3f}" if sd is None else f"{mean:.3f} ± {sd:.3f}"
    few = "" if n == most else f" ({n})"
    return f"{text}{few}{SIGNS.get(standing.verdict, '')}"


def choices(results: Sequence[dict[str, Any]], setting: str) -> dict[str, dict[Any, float]]:
    """Method -> value of a setting -> mean validation log-likelihood over the tasks and seeds all values share.

    Methods whose runs all have one value are left out: there was no choice.
    """
    groups: dict[str, dict[Any, dict[tuple[str, int], float]]] = defaultdict(lambda: defaultdict(dict))
    for result in results:
        method: Mapping[str, Any] = part(part(result, "settings"), "method")
        if setting in method and finite(result.get("validation")) is not None:
            cell = result["task"], int(result["seed"])
            value = method[setting] if isinstance(method[setting], Hashable) else str(method[setting])
            groups[_family(result, setting)][value][cell] = result["validation"]
    found = {}
    for name, values in groups.items():
        shared = set.intersection(*(set(cells) for cells in values.values()))
        if len(values) > 1 and shared:
            found[name] = {v: stats.fmean(cells[c] for c in shared) for v, cells in sorted(values.items(), key=_rank)}
    return found


def _rank(item: tuple[Any, object]) -> tuple[str, Any]:
    """Numbers by size, then texts, then what cannot be compared by its text."""
    value = item[0]
    return ("", value) if isinstance(value, int | float) else (type(value).__name__, str(value))


def _family(result: Mapping[str, Any], setting: str) -> str:
    """The method's label without the setting."""
    kept = [p for p in str(result.get("variant") or "").split(", ") if p and not p.startswith(f"{setting}=")]
    # Settings such as normal(0, 1) hold a comma themselves: what was split is put together again.
    label = f"{result['method']} ({', '.join(kept)})" if kept else str(result["method"])
    return _label(label, str(result["task"]).rpartition("/")[2])


def choice_table(results: Sequence[dict[str, Any]], setting: str) -> str:
    """Every choice as a table, the chosen value in bold."""
    found = choices(results, setting)
    if not found:
        known = {name for r in results for name in part(part(r, "settings"), "method")}
        if setting not in known:
            raise unknown_name("setting of the methods in these results", setting, known)
        raise ValueError(f"setting {setting!r} must have several values in the runs of one method; got one of each.")
    values = [v for v, _ in sorted({v: 0 for scores in found.values() for v in scores}.items(), key=_rank)]
    lines = [f"| validation log-likelihood at {setting} | {' | '.join(map(str, values))} |"]
    lines.append("|---|" + "---|" * len(values))
    for name, scores in sorted(found.items()):
        best = max(scores, key=scores.__getitem__)
        cells = ["–" if v not in scores else f"{'**' * (v == best)}{scores[v]:.3f}{'**' * (v == best)}" for v in values]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
