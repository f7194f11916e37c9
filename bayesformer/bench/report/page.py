"""The page as a whole: its policy, its header with what was run, and its footer."""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from bayesformer.bench.report.belief import belief
from bayesformer.bench.report.curve_figure import opening
from bayesformer.bench.report.data import Report
from bayesformer.bench.report.findings import MANY, summary
from bayesformer.bench.report.markup import Child, Html, tag
from bayesformer.bench.report.parts import details, entry_name, link
from bayesformer.bench.report.section import section
from bayesformer.bench.report.style import SCRIPT, sheet
from bayesformer.bench.report.wording import DASH, count, duration, listing
from bayesformer.bench.statistics import Result, entry_of, finite, part
from bayesformer.core.storage import write_atomically


def write_report(
    results: Sequence[Result],
    path: str | os.PathLike[str],
    title: str = "Benchmark",
    note: str = "",
    skipped: Sequence[str] = (),
) -> Path:
    """Write the page of these results and return its path.

    Args:
        results: one dict per cell (task × method × seed); of cells run twice the later one counts.
        path: the HTML file; replaced atomically, its folder is made.
        title: heading of the page.
        note: a caution shown under the heading, such as "demo settings: short training".
        skipped: a sentence for every result that could not be read; the page lists them.
    """
    if not results:
        raise ValueError("results must hold at least one result; got an empty list.")
    for i, result in enumerate(results):
        if missing := [key for key in ("task", "method", "seed") if result.get(key) is None]:
            raise ValueError(f"results[{i}] must have task, method and seed; it lacks {', '.join(missing)}.")
    target = Path(path)
    # A lone surrogate, which JSON can carry, becomes "?" rather than an error after hours of training.
    write_atomically(target, _page(Report(results), title, note, skipped).encode("utf-8", "replace"))
    return target


def _page(report: Report, title: str, note: str, skipped: Sequence[str]) -> str:
    """The policy forbids any resource and any script but the theme switch."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none';style-src 'unsafe-inline';script-src 'sha256-{digest}';img-src data:"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width,initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(sheet())),
        tag("script", Html(SCRIPT)),
    )
    main = tag("main", summary(report), belief(report), [section(report, task) for task in report.tasks])
    parts = [_header(report, title, note, skipped), main, _footer(report)]
    body = tag("body", report.shared.definitions(), parts)
    return "<!DOCTYPE html>\n" + tag("html", head, "\n", body, lang="en") + "\n"


def _header(report: Report, title: str, note: str, skipped: Sequence[str]) -> Html:
    return tag(
        "header",
        tag("button", "Theme", id="theme", type="button", hidden=True),
        tag("p", "bayesformer report", class_="eyebrow"),
        tag("h1", title),
        tag("p", _extent(report), class_="lede"),
        opening(report),
        _methods(report),
        tag("p", tag("strong", "Note "), note, class_="note") if note else None,
        _skipped(skipped) if skipped else None,
        tag("dl", [tag("div", tag("dt", k), tag("dd", v)) for k, v in _facts(report)], class_="facts"),
    )


def _skipped(sentences: Sequence[str]) -> Html:
    which = details("Which", tag("ul", [tag("li", sentence) for sentence in sentences]))
    number = count(len(sentences), "stored result")
    return tag("div", tag("p", tag("strong", "Skipped "), f"{number} that cannot be read."), which, class_="note")


def _extent(report: Report) -> str:
    numbers = {
        "task": len(report.tasks),
        "method": len(report.entries),
        "training seed": len(report.seeds),
        "run": len(report.results),
    }
    return ", ".join(count(n, word) for word, n in numbers.items())


def _facts(report: Report) -> Iterator[tuple[str, Child]]:
    yield "Tasks", tag("ul", [tag("li", link(t)) for t in report.tasks], class_="inline")
    names = _kinds(report) if len(report.entries) > MANY else [entry_name(report, e) for e in report.entries]
    yield "Methods", tag("ul", [tag("li", name) for name in names], class_="inline")
    yield "Seeds", listing([str(s) for s in report.seeds], 20)
    commits = listing([c[:10] for c in report.values("commit")], 6) or "unknown"
    dirty = sum(bool(r.get("dirty")) for r in report.results)
    yield "Commit", f"{commits}; {count(dirty, 'run')} with uncommitted changes" if dirty else commits
    if pairs := {f"{k} {v}" for r in report.results for k, v in part(r, "versions").items()}:
        yield "Versions", ", ".join(sorted(pairs))
    if devices := report.values("device"):
        yield "Device", ", ".join(devices)
    if days := [started[:10] for started in report.values("started")]:
        yield "Date", days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    if fit := [s for r in report.results if (s := finite(part(r, "cost").get("fit_seconds"))) is not None]:
        yield "Training", f"{duration(sum(fit))} in total"
    if missing := _missing(report):
        yield "No result", f"{missing}: not asked for, or failed"
    if report.repeated:
        yield "Run twice", f"{count(report.repeated, 'earlier run')} replaced by a later one"


def _kinds(report: Report) -> list[str]:
    """The methods without their variants, with the number of those that have several."""
    numbers = Counter(entry.method for entry in report.entries)
    return [name if number == 1 else f"{name} ({number} variants)" for name, number in numbers.items()]


def _missing(report: Report) -> str:
    """The cells of tasks × methods × seeds that are not there."""
    gaps = []
    for task in report.tasks:
        for entry in report.entries:
            have = {int(r["seed"]) for r in task.groups.get(entry, ())}
            lacking = [str(seed) for seed in report.seeds if seed not in have]
            which = f" (seed {listing(lacking)})" if have else ""
            gaps += [f"{entry.label} on {task.name}{which}"] if lacking else []
    if len(gaps) > MANY:
        return f"{len(gaps)} pairs of a method and a task"
    return listing(gaps)


def _methods(report: Report) -> Html | None:
    about = {entry_of(r): str(text) for r in reversed(report.results) if (text := r.get("method_description"))}
    if not about:
        return None
    rows = [tag("div", tag("dt", entry_name(report, e)), tag("dd", about.get(e, DASH))) for e in report.entries]
    return details("What the methods are", tag("dl", rows, class_="methods"))


def _footer(report: Report) -> Html:
    text = "Made by bayesformer from the recorded results alone. The file needs no network and loads nothing."
    return tag("footer", tag("p", f"{text} {_extent(report)}."))
