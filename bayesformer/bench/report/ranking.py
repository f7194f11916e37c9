"""The main table of a task: scores, difference to the MLE with its picture and verdict, gap to the oracle."""

from __future__ import annotations

from collections.abc import Sequence

from bayesformer.bench.report.data import Report, TaskResults, metric_of
from bayesformer.bench.report.markup import Child, Html, short, tag
from bayesformer.bench.report.parts import (
    cell,
    difference_text,
    entry_name,
    heading,
    plus_minus,
    row,
    scores,
    small,
    table,
)
from bayesformer.bench.report.plot import marker
from bayesformer.bench.report.wording import DASH, FEW, SYMBOLS, count, decimals, p_text, score_decimals
from bayesformer.bench.statistics import RISING, Difference, Entry, Standing, Summary, part, summarise

SHOWN = (
    *("log_likelihood", "accuracy", "ece", "auroc", "crps", "rmse", "coverage_error_90"),
    *("brier", "f1_macro", "aurc", "process_mse"),
)
"""Metrics after the primary one, in this order; the rest is in the full table."""
COLUMNS = 5  # most metrics, the gap to the oracle included


def ranking(report: Report, task: TaskResults) -> Html:
    """The table of a task's methods by rank, with their main scores."""
    shown = [m for m in map(metric_of, task.metrics) if m != task.primary and _family(m.name) in SHOWN]
    shown.sort(key=lambda m: SHOWN.index(_family(m.name)))
    room = COLUMNS - 1 - any(r.get("oracle") for r in task.results)  # the gap is a column, too
    primary, *others = (scores(task, m) for m in (task.primary, *shown[:room]))
    head: list[Child] = ["Method", heading(task.primary)]
    head += ["Difference to MLE", "Verdict"] if task.compared else []
    gaps = _gaps(task)
    head += ["Gap to oracle, nats"] if gaps else []
    reach = _reach(task.standings)
    rows = []
    for standing in task.standings:
        entry = standing.entry
        cells = [
            primary[entry],
            _comparison(report, task, standing, reach) if task.compared else None,
            cell(_gap_text(gaps.get(entry), decimals(gaps.values()))) if gaps else None,
            [column[entry] for column in others],
        ]
        rows.append(row(_ranked_name(report, task, standing), cells, "baseline" if entry == task.baseline else None))
    caption = f"{task.name}: methods ranked by {task.quality}"
    return table(caption, [*head, *map(heading, shown[:room])], rows, "ranking")


def _family(metric: str) -> str:
    return metric.partition("/")[0]  # auroc/noise is an auroc


def _ranked_name(report: Report, task: TaskResults, standing: Standing) -> Html:
    entry = standing.entry
    rank = tag("span", str(standing.rank or DASH), class_="rank")
    failed = small(count(standing.failed, "failed run"), "failed") if standing.failed else None
    name = tag(
        "span",
        entry_name(report, entry),
        _rising(task.unconverged.get(entry, 0), len(task.groups[entry])),
        class_="name",
    )
    return tag("div", rank, name, failed, class_="ranked")


def _rising(unconverged: int, runs: int) -> Html | None:
    """The mark of a method whose training had not converged, with the number of such runs on hovering."""
    if not unconverged:
        return None
    words = f"has not converged in {unconverged} of {count(runs, 'run')}"
    return tag("span", RISING, role="img", aria_label=words, title=words, class_="rising")


def _comparison(report: Report, task: TaskResults, standing: Standing, reach: float) -> list[Html]:
    """The two cells that compare with the MLE: difference with its picture, and the verdict."""
    verdict, difference = standing.verdict, standing.difference
    if verdict == "baseline":
        return [cell("baseline"), cell("")]
    if difference is None:
        return [cell("n/a"), cell("n/a")]
    picture = _forest(difference, reach, task.primary.better == "lower", report.style(standing.entry))
    symbol = SYMBOLS.get(verdict)
    p = f" {p_text(standing.p)}" if standing.p is not None else ""
    few = f", {FEW}" if standing.fragile else ""
    words = [
        tag("span", f"{symbol} {verdict}" if symbol else "n/a", class_=f"mark {verdict}"),
        small(p + few) if p else None,
    ]
    return [cell([picture, difference_text(difference, score_decimals(task))]), cell(words)]


def _reach(standings: Sequence[Standing]) -> float:
    """Half width of the interval pictures: all intervals, but at most four times the largest difference."""
    found = [s.difference for s in standings if s.difference]
    largest = max((abs(d.mean) for d in found), default=0.0)
    widest = max((abs(b) for d in found for b in (d.low, d.high) if b is not None), default=0.0)
    return min(max(widest, largest), 4 * largest) * 1.1 or 1.0


def _forest(difference: Difference, reach: float, lower_is_better: bool, style: str) -> Html:
    """Interval around a difference, better to the right; an interval cut at the edge ends in an arrow."""
    width, sign = 108.0, -1 if lower_is_better else 1

    def at(value: float) -> float:
        return (1 + sign * value / reach) * width / 2

    marks = [tag("path", class_="axis", d=f"M{short(width / 2)} 0v14")]
    if difference.low is not None and difference.high is not None:
        left, right = sorted((at(difference.low), at(difference.high)))
        d = f"M{short(max(left, 1))} 7H{short(min(right, width - 1))}"
        d += "M4 4L1 7L4 10" if left < 0 else ""
        d += f"M{width - 4:g} 4L{width - 1:g} 7L{width - 4:g} 10" if right > width else ""
        marks.append(tag("path", class_="stroke", d=d))
    marks.append(tag("path", class_="fill", d=marker(at(difference.mean), 7, 3.4)))
    return tag("svg", marks, class_=f"forest plot {style}", viewBox=f"0 0 {width:g} 14", aria_hidden="true")


def _gaps(task: TaskResults) -> dict[Entry, Summary]:
    """Gap to the oracle, mean over seeds, with its standard error in place of a spread.

    Seeds share their test sequences, so errors are averaged over seeds and not shrunk by their number.
    """
    found = {}
    for entry, runs in task.groups.items():
        gap, error = (summarise(part(r, "oracle").get(key) for r in runs) for key in ("gap", "gap_se"))
        if gap:
            found[entry] = gap._replace(sd=error.mean if error else None)
    return found


def _gap_text(gap: Summary | None, digits: int) -> list[Child]:
    beaten = gap is not None and gap.sd is not None and gap.mean > 3 * gap.sd
    leak = small(" above the oracle: check for a leak", "failed") if beaten else None
    return [*plus_minus(gap, digits), leak]
