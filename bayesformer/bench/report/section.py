"""One task: the answer, its tables, its figures."""

from __future__ import annotations

import json
from collections.abc import Callable

from bayesformer.bench.report.attention_figure import attention
from bayesformer.bench.report.cost_figure import cost
from bayesformer.bench.report.curve_figure import curves
from bayesformer.bench.report.data import Report, TaskResults, metric_of, unequal_settings
from bayesformer.bench.report.examples import examples
from bayesformer.bench.report.figures import bands, coverage, entropy, reliability
from bayesformer.bench.report.markup import Html, tag
from bayesformer.bench.report.parts import cell, details, entry_name, heading, row, scores, small, table
from bayesformer.bench.report.ranking import ranking
from bayesformer.bench.report.trace_figure import traces
from bayesformer.bench.report.wording import (
    SMALL,
    count,
    decimals,
    few_of,
    fixed,
    listing,
    score_decimals,
    spread,
    why_untested,
)
from bayesformer.bench.statistics import UNCONVERGED, by_seed, part, summarise

FIGURES: tuple[Callable[[Report, TaskResults], Html | None], ...] = (
    curves,
    reliability,
    coverage,
    entropy,
    bands,
    examples,
    attention,
    traces,
)
"""Drawn in this order where a task recorded what they need."""


def section(report: Report, task: TaskResults) -> Html:
    """The section of one task: an answer in words, tables and figures."""
    return tag(
        "section",
        tag("h2", task.name),
        tag("p", task.description) if task.description else None,
        tag("p", _answer(task), class_="answer"),
        ranking(report, task),
        tag("p", _under_ranking(report, task), class_="fine"),
        _full_metrics(report, task),
        _per_seed(report, task),
        _settings(task),
        [draw(report, task) for draw in FIGURES],
        cost(report, task),
        id=f"task-{task.index}",
    )


def _answer(task: TaskResults) -> str:
    """One sentence on the best method and whether it beats the MLE."""
    if not task.winners:
        return "No method has a ranked score on this task."
    names = listing([s.entry.label for s in task.winners])
    if len(task.groups) == 1:
        return f"Only {names} was run here: there is nothing to compare."
    verb = "ranks first" if len(task.winners) == 1 else "share the first rank"
    first = f"{names} {verb} by {task.quality}"
    if task.baseline is None:
        return f"{first}; no MLE was run, so no gain can be claimed."
    top = task.winners[0]
    few = few_of(top.fragile, 1)
    return {
        "baseline": f"No gain from being Bayesian was seen here: {first}.",
        "better": f"{first} and is significantly better than the MLE{few}.",
        "untested": f"{first}; whether that is more than luck could not be tested: {why_untested(top)}.",
    }.get(task.outcome, f"{first}, but its advantage over the MLE cannot be told from seed noise{few}.")


def _under_ranking(report: Report, task: TaskResults) -> str:
    words = [spread([task])]
    if task.baseline and task.compared:
        which = f" ({task.baseline.variant})" if task.baseline.variant else ""
        words.append(
            f"The interval is for the mean difference to the MLE{which} over common seeds, drawn with better "
            "to the right; p is Holm-corrected."
        )
    if any(s.tested for s in task.standings):
        words.append(SMALL)
    if levels := summarise(part(r, "oracle").get("log_likelihood") for r in task.results):
        value = fixed(levels.mean, decimals([levels._replace(sd=None)]))
        words.append(f"The oracle, the true process, reaches {value} nats; ± of a gap is its standard error.")
    if unequal := unequal_settings(task.results):
        words.append(f"Caution: the methods were not run with the same {listing(unequal)}.")
    if task.unconverged:
        words.append(UNCONVERGED)
    if failed := [s.entry.label for s in task.standings if s.failed]:
        words.append(f"{listing(failed)}: runs without a finite score are left out, which flatters the mean.")
    if absent := [e.label for e in report.entries if e not in task.groups]:
        words.append(f"No result on this task: {listing(absent)}.")
    return " ".join(words)


def _full_metrics(report: Report, task: TaskResults) -> Html:
    rows = []
    for metric in map(metric_of, task.metrics):
        about = small(metric.help, "help") if metric.help else None
        cells = scores(task, metric)
        rows.append(row([heading(metric, explained=True), about], [cells[e] for e in task.order]))
    head = ["Metric", *(entry_name(report, e) for e in task.order)]
    return details(f"All {count(len(rows), 'metric')}", table(f"{task.name}: all metrics", head, rows, "full"))


def _per_seed(report: Report, task: TaskResults) -> Html:
    """The primary metric of every single run, which the tests are computed from."""
    seeds = sorted({int(r["seed"]) for r in task.results})
    digits = score_decimals(task)
    rows = []
    for entry in task.order:
        values = by_seed(task.groups[entry], task.primary.name)
        rows.append(row(entry_name(report, entry), [cell(fixed(values.get(seed), digits)) for seed in seeds]))
    caption = f"{task.name}: {task.quality} of every run"
    return details("Every run", table(caption, ["Method", *(f"Seed {s}" for s in seeds)], rows, "seeds"))


def _settings(task: TaskResults) -> Html | None:
    """Every setting of the first run of each method, as recorded; what all of them share stands once."""
    found = {e.label: part(runs[0], "settings") for e, runs in task.groups.items() if runs[0].get("settings")}
    several = list(found.values())
    shared = {k: v for k, v in several[0].items() if all(s.get(k) == v for s in several)} if len(several) > 1 else {}
    texts = {"All methods": shared} if shared else {}
    texts |= {label: {k: v for k, v in settings.items() if k not in shared} for label, settings in found.items()}
    blocks = [(tag("h3", label), tag("pre", _json(values), tabindex="0")) for label, values in texts.items() if values]
    return details("Settings", blocks) if blocks else None


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str)
