"""The first section of the page: what was found over all tasks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

from bayesformer.bench.report.data import Report, TaskResults
from bayesformer.bench.report.markup import Child, Html, tag
from bayesformer.bench.report.parts import (
    cell,
    details,
    difference_text,
    entry_name,
    heading,
    link,
    plus_minus,
    row,
    small,
    table,
)
from bayesformer.bench.report.wording import (
    DASH,
    FEW,
    SMALL,
    SYMBOLS,
    count,
    few_of,
    p_text,
    score_decimals,
    spread,
    why_untested,
)
from bayesformer.bench.statistics import FEW_SEEDS, LEVEL, Standing, Verdict

OUTCOMES: dict[Verdict, str] = {
    "better": "the top-ranked method is significantly better than the MLE",
    "unclear": "the top-ranked method's advantage over the MLE cannot be told from seed noise",
    "untested": "the top-ranked method is ahead of the MLE, but the seeds do not allow a test",
    "baseline": "the MLE itself ranks first",
}

MANY = 20  # methods, variants counted, beyond which the header names kinds only and the table of ranks is folded


def summary(report: Report) -> Html:
    """The section: a summary in words, a table by task, and ranks by method."""
    return tag(
        "section",
        tag("h2", "Did it help?"),
        [tag("p", text, class_="answer" if i == 0 else None) for i, text in enumerate(_answer(report))],
        _answer_table(report),
        tag("p", SMALL, class_="fine") if any(s.tested for t in report.tasks for s in t.winners) else None,
        _ranks(report) if len(report.tasks) > 1 and len(report.entries) > 1 else None,
        _guide(report),
        id="summary",
    )


def _answer(report: Report) -> Iterator[str]:
    """The finding in words, negative ones included."""
    compared = [t for t in report.tasks if t.compared and t.winners]
    if not compared:
        yield "Nothing can be said: no task was run with both the MLE and another method."
        return
    found = []
    for outcome, text in OUTCOMES.items():
        if tasks := [t for t in compared if t.outcome == outcome]:
            found.append((len(tasks), text + few_of(sum(t.winners[0].fragile for t in tasks), len(tasks))))
    (first, text), *rest = found
    total = count(len(compared), "task")
    yield "; ".join([f"On {first} of {total} {text}", *(f"on {n} {words}" for n, words in rest)]) + "."
    if tested := [s for t in compared for s in t.standings if s.tested]:
        verdicts = [s.verdict for s in tested]
        better, worse, unclear = (verdicts.count(v) for v in SYMBOLS)
        few = f"; {fragile} of {len(tested)} on {FEW}" if (fragile := sum(s.fragile for s in tested)) else ""
        yield (
            f"Over all {count(len(tested), 'tested comparison')} of a method with the MLE: "
            f"{better} significantly better ▲, {worse} significantly worse ▼, {unclear} unclear ≈{few}."
        )
    if caution := _power(report):
        yield caution


def _power(report: Report) -> str:
    pairs = [s.difference.n for t in report.tasks for s in t.standings if s.difference]
    if not pairs or max(pairs) > 4:
        return ""
    if max(pairs) < 2:
        return "With one training seed nothing can be tested: the ranks below are a single draw."
    return (
        f"With {max(pairs)} seeds the test has {count(max(pairs) - 1, 'degree')} of freedom and finds only "
        "large, steady differences: “unclear” means not shown, not absent."
    )


def _answer_table(report: Report) -> Html:
    metrics = {t.primary for t in report.tasks}
    several = len(metrics) > 1
    head = ["Task", *(["Ranked by"] if several else []), "Top-ranked", "Its score", "MLE"]
    head += ["Difference to MLE", "Significant?"]
    caption: list[Child] = ["Best method per task", None if several else [" by ", heading(metrics.pop())]]
    return table(caption, head, [_answer_row(report, task, several) for task in report.tasks], "answers")


def _answer_row(report: Report, task: TaskResults, name_metric: bool) -> Html:
    digits = score_decimals(task)
    base = next((s.summary for s in task.standings if s.entry == task.baseline), None)
    top = task.winners[0] if task.winners else None
    difference = top.difference if top else None
    cells = [
        tag("td", heading(task.primary)) if name_metric else None,
        tag("td", [entry_name(report, s.entry) for s in task.winners] or "not ranked", class_="names"),
        cell(plus_minus(top.summary if top else None, digits)),
        cell(plus_minus(base, digits)),
        cell(difference_text(difference, digits) if difference else DASH),
        tag("td", _verdict_words(task), class_="words"),
    ]
    return row(link(task), cells)


def _verdict_words(task: TaskResults) -> list[Child]:
    if not task.winners:
        return ["no ranked score"]
    if task.baseline is None:
        return ["n/a: no MLE was run"]
    if len(task.groups) == 1:
        return ["n/a: only the MLE was run"]
    if task.outcome == "baseline":
        worse = [s for s in task.standings if s.verdict == "worse"]
        few = few_of(sum(s.fragile for s in worse), len(worse))
        others = f"; {len(worse)} of {len(task.standings) - 1} others significantly worse ▼{few}" if worse else ""
        return ["No: nothing ranks above the MLE", others]
    top = task.winners[0]
    if top.verdict == "untested" or top.p is None:
        return [f"n/a: {why_untested(top)}"]
    yes = tag("strong", "▲ Yes") if top.verdict == "better" else "≈ Not shown"
    return [yes, ", ", tag("span", p_text(top.p), class_="nowrap"), f", {FEW}" if top.fragile else None]


def _ranks(report: Report) -> Html:
    """The table of ranks, behind a title to click on where it is long."""
    return details("Rank of every method", _rank_table(report)) if len(report.entries) > MANY else _rank_table(report)


def _rank_table(report: Report) -> Html:
    """Methods over all tasks, by mean rank."""
    places = {e: {t.index: s for t in report.tasks for s in t.standings if s.entry == e} for e in report.entries}
    ranks = {e: [s.rank for s in found.values() if s.rank] for e, found in places.items()}
    means = {e: fmean(values) if values else math.inf for e, values in ranks.items()}
    total = len(report.tasks)
    rows = []
    for entry in sorted(report.entries, key=lambda e: (means[e], e)):
        placed = len(ranks[entry])
        partial = small(f" {placed} of {total} tasks") if placed < total else None
        mean = cell([f"{means[entry]:.1f}" if placed else DASH, partial])
        cells = [_rank_cell(places[entry].get(t.index)) for t in report.tasks]
        rows.append(row(entry_name(report, entry), [mean, cells]))
    head = ["Method", "Mean rank", *map(link, report.tasks)]
    return table("Rank of every method on every task, by mean rank", head, rows, "ranks")


def _rank_cell(standing: Standing | None) -> Html:
    if standing is None or standing.rank is None:
        return cell(DASH)
    rank = str(standing.rank)
    few = small(f" {FEW}") if standing.fragile else None
    return cell([tag("strong", rank) if standing.rank == 1 else rank, _mark(standing.verdict), few])


def _mark(verdict: Verdict) -> Html | None:
    if verdict not in SYMBOLS:
        return None
    label = "no clear difference to MLE" if verdict == "unclear" else f"{verdict} than MLE"
    return tag("span", SYMBOLS[verdict], class_=f"mark {verdict}", role="img", aria_label=label, title=label)


def _guide(report: Report) -> Html:
    points = [
        f"{spread(report.tasks)} A mean in bold is the best of its column.",
        "Each method is compared with the MLE (ordinary training, one set of weights) seed by seed: the "
        "difference is method minus MLE, with the 95 % interval of Student's paired t-test.",
        f"▲ significantly better, ▼ significantly worse: p < {LEVEL} after Holm's correction for testing "
        "several methods on one task. ≈ is unclear: the data do not show a difference. The intervals are "
        "for one comparison each and, like the count over tasks, not corrected further.",
        "n/a: fewer than two seeds in common with the MLE, or no variation between them.",
        f"{DASH} means that there is no finite number: not measured, not run, or a run that failed.",
    ]
    if any(s.fragile for t in report.tasks for s in t.standings):
        few = f"{FEW}: fewer than {FEW_SEEDS} in common with the MLE. Such a verdict is fragile: one more can turn it."
        points.insert(4, few)
    if any(r.get("oracle") for r in report.results):
        points.append(
            "The oracle is the true process that made the data: no method can beat it except by luck, so the "
            "gap to it is the room that is left. ± behind a gap is its standard error over test sequences."
        )
    return details("How to read the tables", tag("ul", [tag("li", p) for p in points]), "guide")
