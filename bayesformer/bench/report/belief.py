"""The section "Can this be believed?": what the fits of every method found out about themselves, and, where the true
posterior is known, how far from it they ended and at what price."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bayesformer.bench.report.data import Report, TaskResults
from bayesformer.bench.report.markup import Child, Html, tag
from bayesformer.bench.report.parts import cell, details, entry_name, plus_minus, row, small, table
from bayesformer.bench.report.wording import DASH, count
from bayesformer.bench.statistics import Entry, Result

DISTANCE, CHECKS, NAMES = "wasserstein", "checks", "doubts"
FOLDED = 20  # methods, variants counted, beyond which the table is behind a title to click on


def belief(report: Report) -> Html | None:
    """The section of all methods; None where no result says anything about it."""
    known = [task for task in report.tasks if task.primary.name == DISTANCE]
    if not known and not any(CHECKS in r or r.get(NAMES) for r in report.results):
        return None
    rows = [_row(report, entry, known) for entry in report.entries]
    head = ["Method", "What its fits found out about themselves"]
    head += ["Distance to the posterior, sd", "Gradient evaluations, epochs"] if known else []
    whole = table("Doubts of every method, over all tasks and seeds", head, rows, "belief")
    return tag(
        "section",
        tag("h2", "Can this be believed?"),
        tag("p", _words(bool(known))),
        details("Every method", whole) if len(report.entries) > FOLDED else whole,
        id="belief",
    )


def _words(known: bool) -> str:
    checks = (
        "Every fit ends with cheap checks of its own: what they found is a reason to doubt the method's uncertainty, "
        "whatever its score. “Nothing found” is no proof, and “not checked” means that nothing but "
        "the end of training was looked at, which had come to rest."
    )
    distance = (
        " The distance is to a posterior that is known (exactly, or by a very long chain), in its own standard "
        "deviations: 0 is right, and a single network at its mean has 1. An epoch is the gradient of all data once."
    )
    return checks + distance if known else checks


def _row(report: Report, entry: Entry, known: Sequence[TaskResults]) -> Html:
    runs = [r for task in report.tasks for r in task.groups.get(entry, ())]
    cells = [tag("td", list(_found(runs)), class_="words")]
    if known:
        distances = [task.summaries(DISTANCE).get(entry) for task in known]
        costs = [task.costs("gradient_epochs").get(entry) for task in known]
        names = [None if len(known) == 1 else small(f" {task.name.rpartition('/')[2]}") for task in known]
        cells.append(cell(_lines((plus_minus(d, 2), n) for d, n in zip(distances, names, strict=True) if d)))
        cells.append(cell(_lines((_whole(c.mean), n) for c, n in zip(costs, names, strict=True) if c)))
    return row(entry_name(report, entry), cells)


def _found(runs: Sequence[Result]) -> Iterator[Child]:
    """A paragraph per check that found something, with how many of the checked fits; else why there is none."""
    checked = [r for r in runs if isinstance(r.get(CHECKS), list)]
    earlier = [r for r in runs if CHECKS not in r]  # stored with the names of doubts alone, or before there were any
    found = _by_check([r[CHECKS] for r in checked] + [[{"check": n} for n in _listed(r, NAMES)] for r in earlier])
    total = len(runs) - len(earlier) + sum(bool(_listed(r, NAMES)) for r in earlier)
    for check, sentences in found.items():
        said = next((s for s in sentences if s), f"the check “{check}” found something; its sentence was not stored.")
        yield tag("p", tag("strong", f"{len(sentences)} of {count(total, 'fit')} "), said, class_="doubt")
    if found:
        return
    if checked:
        yield f"Nothing found in {count(len(checked), 'fit')}."
    else:
        yield "Not recorded." if earlier else "Not checked."


def _by_check(fits: Iterable[Sequence[Any]]) -> dict[str, list[str]]:
    """The sentences by the name of their check, one per fit that has it, most frequent checks first."""
    found: dict[str, list[str]] = {}
    for doubts in fits:
        several = {str(d.get("check", "")): str(d.get("sentence", "")) for d in doubts if isinstance(d, Mapping)}
        for check, sentence in several.items():
            found.setdefault(check, []).append(sentence)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def _listed(result: Result, key: str) -> list[Any]:
    value = result.get(key)
    return value if isinstance(value, list) else []


def _lines(parts: Iterable[tuple[Child, Child]]) -> Child:
    """One line per part, or a dash without any."""
    return [tag("div", *pair) for pair in parts] or DASH


def _whole(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f")
