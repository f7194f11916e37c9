"""The report page: one offline HTML file made from result dicts, the answer first.

The road is `write_report` → `_page` → header, summary, one section per task → tables, then figures. Every
piece returns `Html`; text from results is escaped by `svg.tag`, and the page's own policy forbids any
resource and any script but the theme switch. Tables are over all seeds, a figure shows the first one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import statistics as numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bayesformer.bench import svg
from bayesformer.bench.statistics import (
    LEVEL,
    Difference,
    Entry,
    Result,
    Standing,
    Summary,
    Verdict,
    baseline_of,
    best,
    by_seed,
    entry_of,
    finite,
    group,
    standings,
    summarise,
)
from bayesformer.bench.svg import Html, Plot, Scale, tag
from bayesformer.evaluate.catalogue import Metric, describe
from bayesformer.storage import write_atomically

SHOWN = (
    *("log_likelihood", "accuracy", "ece", "auroc", "crps", "rmse", "coverage_error_90"),
    *("brier", "f1_macro", "aurc", "process_mse"),
)
"""Metrics of the main table after the primary one, in this order; the rest is in the full table."""
COLUMNS, SERIES, IMAGES = 5, 2, 8  # most metrics in the main table, series and images in a figure

MARKS: dict[Verdict, tuple[str, str]] = {
    "baseline": ("", "baseline"),
    "better": ("▲", "better"),
    "worse": ("▼", "worse"),
    "unclear": ("≈", "unclear"),
    "untested": ("", "n/a"),
}
OUTCOMES: dict[Verdict, str] = {
    "better": "the top-ranked method is significantly better than the MLE",
    "unclear": "the top-ranked method's advantage over the MLE cannot be told from seed noise",
    "untested": "the top-ranked method is ahead of the MLE, but the seeds do not allow a test",
    "baseline": "the MLE itself ranks first",
}
DASH = "–"  # what a missing number looks like


def write_report(
    results: Sequence[Result], path: str | os.PathLike[str], title: str = "Benchmark", note: str = ""
) -> Path:
    """Write the page of these results and return its path.

    Args:
        results: one dict per cell (task × method × seed); of cells run twice the later one counts.
        path: the HTML file; replaced atomically, its folder is made.
        title: heading of the page.
        note: a caution shown under the heading, such as "demo settings: short training".
    """
    if not results:
        raise ValueError("results must hold at least one result; got an empty list.")
    for i, result in enumerate(results):
        if missing := [key for key in ("task", "method", "seed") if result.get(key) is None]:
            raise ValueError(f"results[{i}] must have task, method and seed; it lacks {', '.join(missing)}.")
    target = Path(path)
    # A lone surrogate, which JSON can carry, becomes "?" rather than an error after hours of training.
    write_atomically(target, _page(Report(results), title, note).encode("utf-8", "replace"))
    return target


# ── What the results hold ────────────────────────────────────────────────────────────────────────────────


class Report:
    """The results sorted by task, with one colour and marker per entry."""

    def __init__(self, results: Sequence[Result]) -> None:
        titled = [(title, r) for name, runs in _by_task(results).items() for title, r in _titled(name, runs)]
        cells: dict[tuple[str, Entry, int], Result] = {}
        for title, result in sorted(titled, key=lambda pair: str(pair[1].get("started") or "")):
            cells[title, entry_of(result), int(result["seed"])] = result
        self.results = [cells[key] for key in sorted(cells)]
        self.repeated = len(results) - len(cells)
        self.entries = sorted({entry for _, entry, _ in cells})
        self.seeds = sorted({seed for _, _, seed in cells})
        names = sorted({title for title, _, _ in cells})
        self.tasks = [
            Task(name, i, [cells[key] for key in sorted(cells) if key[0] == name]) for i, name in enumerate(names, 1)
        ]
        baseline = baseline_of(self.entries)
        self.slots = {e: i for i, e in enumerate(e for e in self.entries if e != baseline)}

    def style(self, entry: Entry) -> str:
        """CSS class that sets the entry's colour --c; the baseline is grey."""
        return f"m{self.slots[entry] % len(svg.PALETTE)}" if entry in self.slots else "m"

    def shape(self, entry: Entry) -> int:
        """Marker of the entry: five shapes and seven colours repeat together only after 35 entries."""
        return self.slots[entry] + 1 if entry in self.slots else 0

    def name(self, entry: Entry) -> Html:
        """The entry's name behind its marker."""
        swatch = tag(
            "svg",
            tag("path", class_="fill", d=svg.marker(5, 5, 4, self.shape(entry))),
            class_=f"swatch {self.style(entry)}",
            viewBox="0 0 10 10",
            aria_hidden="true",
        )
        variant = tag("small", entry.variant, class_="variant") if entry.variant else None
        return tag("span", swatch, tag("span", entry.method, variant), class_="entry")

    def values(self, key: str) -> list[str]:
        """Distinct non-empty values of a field, as text, in order."""
        return sorted({str(r[key]) for r in self.results if r.get(key)})


def _by_task(results: Iterable[Result]) -> dict[str, list[Result]]:
    tasks: dict[str, list[Result]] = {}
    for result in results:
        tasks.setdefault(str(result["task"]), []).append(result)
    return tasks


def _titled(name: str, results: Sequence[Result]) -> list[tuple[str, Result]]:
    """Results under the task's name, or, if one method was run with several settings of the task or its
    training, under a name for each of them: runs of different settings are never averaged."""
    settings = [_common_settings(r) for r in results]
    found: dict[Entry, set[str]] = {}
    for result, values in zip(results, settings, strict=True):
        found.setdefault(entry_of(result), set()).add(json.dumps(values, sort_keys=True))
    if all(len(texts) == 1 for texts in found.values()):
        return [(name, r) for r in results]
    keys = _differing(settings)
    words = [", ".join(f"{k.split('.', 1)[1]}={values.get(k)}" for k in keys) for values in settings]
    return [(f"{name} ({text})", r) for text, r in zip(words, results, strict=True)]


def _common_settings(result: Result) -> dict[str, str]:
    """Settings of the task and its training, which a fair comparison shares, as "training.lr": "0.003"."""
    settings = result.get("settings") or {}
    parts = ((part, settings.get(part) or {}) for part in ("task", "training"))
    return {f"{part}.{key}": str(value) for part, values in parts for key, value in values.items()}


def _differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """The settings that do not have one value in all."""
    keys = dict.fromkeys(key for values in settings for key in values)
    return [key for key in keys if len({values.get(key) for values in settings}) > 1]


@dataclass(frozen=True)
class Task:
    """One task's results, grouped by entry and ranked by its primary metric."""

    name: str
    index: int
    results: list[Result]

    @cached_property
    def groups(self) -> dict[Entry, list[Result]]:
        """Runs of every entry, by seed."""
        return group(self.results)

    @cached_property
    def metrics(self) -> list[str]:
        """Names of all metrics that a run has."""
        return list(dict.fromkeys(name for r in self.results for name in r.get("metrics") or {}))

    @cached_property
    def primary(self) -> Metric:
        """The metric that ranks."""
        named = [str(r["primary"]) for r in self.results if r.get("primary")]
        return _metric(named[0] if named else next(iter(self.metrics), ""))

    @property
    def quality(self) -> str:
        """The primary metric inside a sentence: without its unit, an acronym as it is."""
        label = self.primary.label.split(", ")[0]
        return label[0].lower() + label[1:] if label[1:2].islower() else label

    @cached_property
    def standings(self) -> list[Standing]:
        """The entries by rank."""
        return standings(self.results, self.primary.name, self.primary.better)

    @cached_property
    def winners(self) -> list[Standing]:
        """Rank 1, more than one in a tie."""
        return [s for s in self.standings if s.rank == 1]

    @property
    def order(self) -> list[Entry]:
        """The entries by rank, by name alone."""
        return [s.entry for s in self.standings]

    @cached_property
    def baseline(self) -> Entry | None:
        """The MLE that others are compared with."""
        return baseline_of(self.groups)

    @property
    def compared(self) -> bool:
        """Whether there is an MLE and something to compare with it."""
        return self.baseline is not None and len(self.groups) > 1

    @property
    def outcome(self) -> Verdict:
        """Of the top-ranked: ahead of the MLE for sure, perhaps, untested, or the MLE itself."""
        verdicts = [s.verdict for s in self.winners]
        if not verdicts or "baseline" in verdicts:
            return "baseline" if verdicts else "untested"
        # First by mean and yet worse: the MLE lacks the seeds on which this one did well.
        return "unclear" if verdicts[0] == "worse" else verdicts[0]

    @property
    def description(self) -> str:
        """What the task is."""
        return next((str(r["task_description"]) for r in self.results if r.get("task_description")), "")

    def summaries(self, metric: str) -> dict[Entry, Summary | None]:
        """A metric of every entry over seeds."""
        return {e: summarise(by_seed(runs, metric).values()) for e, runs in self.groups.items()}

    def costs(self, key: str) -> dict[Entry, Summary | None]:
        """A cost of every entry over seeds."""
        return {e: summarise((r.get("cost") or {}).get(key) for r in runs) for e, runs in self.groups.items()}

    def columns(self) -> list[Metric]:
        """The primary metric, then the first of SHOWN that were measured."""
        known = [m for m in map(_metric, self.metrics) if m != self.primary and m.name.split("/")[0] in SHOWN]
        known.sort(key=lambda m: SHOWN.index(m.name.split("/")[0]))
        room = COLUMNS - 1 - any(r.get("oracle") for r in self.results)  # the gap is a column, too
        return [self.primary, *known[:room]]

    def figures(self, key: str) -> dict[Entry, Any]:
        """What the first seed that has it recorded under `key`, in order of rank."""
        found = {
            e: next((f for r in self.groups[e] if (f := (r.get("figures") or {}).get(key))), None) for e in self.order
        }
        return {e: f for e, f in found.items() if f}

    def seed_note(self, key: str) -> str:
        """Which run a figure shows."""
        seeds = {
            next((r["seed"] for r in runs if (r.get("figures") or {}).get(key)), None) for runs in self.groups.values()
        } - {None}
        return f"One run, seed {seeds.pop()}." if len(seeds) == 1 else "One run each, the first seed."


def _metric(name: str) -> Metric:
    """The catalogue's entry; a metric it does not know is shown by its name and ranks nobody."""
    try:
        return describe(name)
    except ValueError:
        return Metric(name, name or "no metric", "none", "")


# ── Numbers as text ──────────────────────────────────────────────────────────────────────────────────────


def _fixed(value: float | None, digits: int, sign: bool = False) -> str:
    """A number with a true minus sign; a dash for none; never "−0.0"."""
    if value is None:
        return DASH
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    if not text.strip("+-0."):
        text = text.lstrip("+-")
    return text.replace("-", "−")


def _digits(summaries: Iterable[Summary | None]) -> int:
    """Decimals for a column: two digits of its typical spread, or four of its largest value."""
    kept = [s for s in summaries if s]
    largest = max((abs(s.mean) for s in kept), default=0.0)
    spreads = [s.sd for s in kept if s.sd]
    if largest == 0:
        return 2
    wanted = 1 - _exponent(numbers.median(spreads)) if spreads else 3 - _exponent(largest)
    return min(max(wanted, 3 if largest < 1e-2 else 0), 6 if largest < 1e-2 else 4)


def _exponent(value: float) -> int:
    return math.floor(math.log10(value))


def _plus_minus(summary: Summary | None, digits: int, best: bool = False) -> list[svg.Child]:
    """mean ± sd; one seed shows no spread."""
    if summary is None:
        return [DASH]
    mean = _fixed(summary.mean, digits)
    spread = tag("small", f" ± {_fixed(summary.sd, digits)}", class_="sd") if summary.sd is not None else None
    return [tag("strong", mean) if best else mean, spread]


def _p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def _interval(difference: Difference, digits: int) -> str:
    if difference.low is None:
        return "[n/a]"
    return f"[{_fixed(difference.low, digits, True)}, {_fixed(difference.high, digits, True)}]"


def _listing(items: Sequence[str], most: int = 12) -> str:
    """a, b and c; a long list is cut with the number left out."""
    shown = list(items[:most])
    if len(items) > most:
        return ", ".join(shown) + f" and {len(items) - most} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _count(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 5400 else f"{seconds / 3600:.3g} h"


# ── Page ─────────────────────────────────────────────────────────────────────────────────────────────────


def _page(report: Report, title: str, note: str) -> str:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none';style-src 'unsafe-inline';script-src 'sha256-{digest}';img-src data:"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width,initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(svg.style() + CSS)),
        tag("script", Html(SCRIPT)),
    )
    main = tag("main", _summary(report), [_task(report, task) for task in report.tasks])
    body = tag("body", _header(report, title, note), main, _footer(report))
    return "<!DOCTYPE html>\n" + tag("html", head, "\n", body, lang="en") + "\n"


def _header(report: Report, title: str, note: str) -> Html:
    return tag(
        "header",
        tag("button", "Theme", id="theme", type="button", hidden=True),
        tag("p", "bayesformer report", class_="eyebrow"),
        tag("h1", title),
        tag("p", _extent(report), class_="lede"),
        tag("p", tag("strong", "Note "), note, class_="note") if note else None,
        tag("dl", [tag("div", tag("dt", k), tag("dd", v)) for k, v in _facts(report)], class_="facts"),
        _methods(report),
    )


def _extent(report: Report) -> str:
    return ", ".join(
        [
            _count(len(report.tasks), "task"),
            _count(len(report.entries), "method"),
            _count(len(report.seeds), "training seed"),
            _count(len(report.results), "run"),
        ]
    )


def _facts(report: Report) -> Iterator[tuple[str, svg.Child]]:
    links = [tag("li", tag("a", t.name, href=f"#task-{t.index}")) for t in report.tasks]
    yield "Tasks", tag("ul", links, class_="inline")
    yield "Methods", tag("ul", [tag("li", report.name(e)) for e in report.entries], class_="inline")
    yield "Seeds", _listing([str(s) for s in report.seeds], 20)
    commits = report.values("commit")
    dirty = sum(bool(r.get("dirty")) for r in report.results)
    text = _listing([c[:10] for c in commits], 6) if commits else "unknown"
    yield "Commit", f"{text}; {_count(dirty, 'run')} with uncommitted changes" if dirty else text
    pairs = {f"{k} {v}" for r in report.results for k, v in (r.get("versions") or {}).items()}
    if pairs:
        yield "Versions", ", ".join(sorted(pairs))
    if devices := report.values("device"):
        yield "Device", ", ".join(devices)
    if days := sorted({started[:10] for started in report.values("started")}):
        yield "Date", days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    fit = [s for r in report.results if (s := finite((r.get("cost") or {}).get("fit_seconds"))) is not None]
    if fit:
        yield "Training", f"{_duration(sum(fit))} in total"
    if missing := _missing(report):
        yield "No result", f"{missing}: not run, or failed"
    if report.repeated:
        yield "Run twice", f"{_count(report.repeated, 'earlier run')} replaced by a later one"


def _missing(report: Report) -> str:
    """The cells of tasks × methods × seeds that are not there."""
    gaps = []
    for task in report.tasks:
        for entry in report.entries:
            have = {int(r["seed"]) for r in task.groups.get(entry, ())}
            lacking = [str(seed) for seed in report.seeds if seed not in have]
            which = f" (seed {_listing(lacking)})" if have else ""
            gaps += [f"{entry.label} on {task.name}{which}"] if lacking else []
    return _listing(gaps)


def _methods(report: Report) -> Html | None:
    about = {
        e: next((str(t) for r in report.results if entry_of(r) == e and (t := r.get("method_description"))), "")
        for e in report.entries
    }
    if not any(about.values()):
        return None
    rows = [tag("div", tag("dt", report.name(e)), tag("dd", text or DASH)) for e, text in about.items()]
    return tag("details", tag("summary", "What the methods are"), tag("dl", rows, class_="methods"))


def _footer(report: Report) -> Html:
    text = (
        "Made by bayesformer from the recorded results alone. The file needs no network and loads nothing."
        f" {_extent(report)}."
    )
    return tag("footer", tag("p", text))


# ── Summary ──────────────────────────────────────────────────────────────────────────────────────────────


def _summary(report: Report) -> Html:
    return tag(
        "section",
        tag("h2", "Did it help?"),
        [tag("p", text, class_="answer" if i == 0 else None) for i, text in enumerate(_answer(report))],
        _answer_table(report),
        _rank_table(report) if len(report.tasks) > 1 and len(report.entries) > 1 else None,
        _guide(report),
        id="summary",
    )


def _answer(report: Report) -> Iterator[str]:
    """The finding in words, negative ones included."""
    compared = [t for t in report.tasks if t.compared and t.winners]
    if not compared:
        yield "Nothing can be said: no task was run with both the MLE and another method."
        return
    outcomes = [t.outcome for t in compared]
    found = [(outcomes.count(outcome), text) for outcome, text in OUTCOMES.items() if outcome in outcomes]
    (first, text), *rest = found
    total = _count(len(compared), "task")
    yield "; ".join([f"On {first} of {total} {text}", *(f"on {n} {words}" for n, words in rest)]) + "."
    verdicts = [s.verdict for t in compared for s in t.standings if s.verdict not in ("baseline", "untested")]
    if verdicts:
        better, worse, unclear = (verdicts.count(v) for v in ("better", "worse", "unclear"))
        yield (
            f"Over all {_count(len(verdicts), 'tested comparison')} of a method with the MLE: "
            f"{better} significantly better ▲, {worse} significantly worse ▼, {unclear} unclear ≈."
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
        f"With {max(pairs)} seeds the test has {_count(max(pairs) - 1, 'degree')} of freedom and finds only "
        "large, steady differences: “unclear” means not shown, not absent."
    )


def _answer_table(report: Report) -> Html:
    metrics = {t.primary for t in report.tasks}
    head = ["Task", "Top-ranked", "Its score", "MLE", "Difference to MLE", "Significant?"]
    rows = [_answer_row(report, task, len(metrics) > 1) for task in report.tasks]
    if len(metrics) > 1:
        head.insert(1, "Ranked by")
        return _table("Best method per task", head, rows, "answers")
    metric = metrics.pop()
    return _table(["Best method per task by ", _heading(metric)], head, rows, "answers")


def _answer_row(report: Report, task: Task, name_metric: bool) -> Html:
    digits = _digits(s.summary for s in task.standings)
    base = next((s.summary for s in task.standings if s.entry == task.baseline), None)
    top = task.winners[0] if task.winners else None
    difference = top.difference if top else None
    return tag(
        "tr",
        tag("th", tag("a", task.name, href=f"#task-{task.index}"), scope="row"),
        tag("td", _heading(task.primary)) if name_metric else None,
        tag("td", [report.name(s.entry) for s in task.winners] or "not ranked", class_="names"),
        _cell(_plus_minus(top.summary if top else None, digits)),
        _cell(_plus_minus(base, digits)),
        _cell(_difference_text(difference, digits) if difference else DASH),
        tag("td", _verdict_words(task), class_="words"),
    )


def _verdict_words(task: Task) -> list[svg.Child]:
    if not task.winners:
        return ["no ranked score"]
    if task.baseline is None:
        return ["n/a: no MLE was run"]
    if len(task.groups) == 1:
        return ["n/a: only the MLE was run"]
    if task.outcome == "baseline":
        worse = sum(s.verdict == "worse" for s in task.standings)
        others = f"; {worse} of {len(task.standings) - 1} others significantly worse ▼" if worse else ""
        return ["No: nothing ranks above the MLE", others]
    top = task.winners[0]
    if top.verdict == "untested" or top.p is None:
        return [f"n/a: {_why_untested(top)}"]
    yes = tag("strong", "▲ Yes") if top.verdict == "better" else "≈ Not shown"
    return [yes, ", ", tag("span", _p_text(top.p), class_="nowrap")]


def _why_untested(standing: Standing) -> str:
    if standing.difference is None:
        return "no seed in common with the MLE"
    return "only one seed" if standing.difference.n < 2 else "all seeds differ by the same amount"


def _rank_table(report: Report) -> Html:
    """Methods over all tasks, by mean rank."""
    places = {e: {t.index: s for t in report.tasks for s in t.standings if s.entry == e} for e in report.entries}
    means = {
        e: numbers.fmean(ranks) if (ranks := [s.rank for s in row.values() if s.rank]) else math.inf
        for e, row in places.items()
    }
    rows = []
    for entry in sorted(report.entries, key=lambda e: (means[e], e)):
        placed = sum(s.rank is not None for s in places[entry].values())
        partial = tag("small", f" {placed} of {len(report.tasks)} tasks", class_="sd")
        mean = [f"{means[entry]:.1f}" if placed else DASH, partial if placed < len(report.tasks) else None]
        cells = [_rank_cell(places[entry].get(t.index)) for t in report.tasks]
        rows.append(tag("tr", tag("th", report.name(entry), scope="row"), _cell(mean), cells))
    head = ["Method", "Mean rank", *(tag("a", t.name, href=f"#task-{t.index}") for t in report.tasks)]
    return _table("Rank of every method on every task, by mean rank", head, rows, "ranks")


def _rank_cell(standing: Standing | None) -> Html:
    if standing is None or standing.rank is None:
        return _cell(DASH)
    rank = str(standing.rank)
    return _cell([tag("strong", rank) if standing.rank == 1 else rank, _mark(standing.verdict)])


def _mark(verdict: Verdict) -> Html | None:
    symbol, word = MARKS[verdict]
    if not symbol:
        return None
    label = f"{word} than MLE" if verdict in ("better", "worse") else "no clear difference to MLE"
    return tag("span", symbol, class_=f"mark {verdict}", role="img", aria_label=label, title=label)


def _guide(report: Report) -> Html:
    points = [
        f"{_spread(report.tasks)} A mean in bold is the best of its column.",
        "Each method is compared with the MLE (ordinary training, one set of weights) seed by seed: the "
        "difference is method minus MLE, with the 95 % interval of Student's paired t-test.",
        f"▲ significantly better, ▼ significantly worse: p < {LEVEL} after Holm's correction for testing "
        "several methods on one task. ≈ is unclear: the data do not show a difference. The intervals are "
        "for one comparison each and, like the count over tasks, not corrected further.",
        "n/a: fewer than two seeds in common with the MLE, or no variation between them.",
        f"{DASH} means that there is no finite number: not measured, not run, or a run that failed.",
    ]
    if any(r.get("oracle") for r in report.results):
        points.append(
            "The oracle is the true process that made the data: no method can beat it except by luck, so the "
            "gap to it is the room that is left. ± behind a gap is its standard error over test sequences."
        )
    return tag(
        "details",
        tag("summary", "How to read the tables"),
        tag("ul", [tag("li", p) for p in points]),
        class_="guide",
    )


def _spread(tasks: Iterable[Task]) -> str:
    """What ± means here, with the number of seeds."""
    counts = sorted({len(runs) for task in tasks for runs in task.groups.values()})
    if counts[-1] == 1:
        return "One training seed: no spread can be given."
    span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"± spread is the standard deviation over {span} training seeds."


# ── Tables ───────────────────────────────────────────────────────────────────────────────────────────────


def _table(caption: svg.Child, head: Sequence[svg.Child], rows: Sequence[Html], class_: str) -> Html:
    """A table that scrolls inside its own frame, its first column staying in view."""
    heads = tag("thead", tag("tr", [tag("th", h, scope="col") for h in head]))
    table = tag("table", tag("caption", caption), heads, tag("tbody", rows), class_=class_)
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=f"Table: {class_}")


def _cell(content: svg.Child) -> Html:
    return tag("td", content, class_="n")


def _heading(metric: Metric) -> Html:
    arrow = {"higher": "↑", "lower": "↓", "none": ""}[metric.better]
    words = f"{metric.better} is better" if arrow else None
    sign = tag("span", arrow, role="img", aria_label=words, title=words, class_="arrow") if arrow else None
    return tag("span", metric.label, " " if arrow else None, sign, title=metric.help or None)


def _difference_text(difference: Difference, digits: int) -> list[svg.Child]:
    """The difference and its interval, with enough decimals that a small one is not written as zero."""
    if difference.mean:
        digits = min(max(digits, -_exponent(abs(difference.mean))), 6)
    interval = tag("small", _interval(difference, digits), class_="sd nowrap")
    return [_fixed(difference.mean, digits, True), " ", interval]


def _task(report: Report, task: Task) -> Html:
    drawn = [make(report, task) for make in FIGURES]
    return tag(
        "section",
        tag("h2", task.name),
        tag("p", task.description) if task.description else None,
        tag("p", _task_answer(task), class_="answer"),
        _ranking(report, task),
        tag("p", _under_ranking(report, task), class_="fine"),
        _full_metrics(report, task),
        _per_seed(report, task),
        _settings(task),
        drawn,
        _cost(report, task),
        id=f"task-{task.index}",
    )


def _task_answer(task: Task) -> str:
    """One sentence, whichever way it went."""
    if not task.winners:
        return "No method has a ranked score on this task."
    names = _listing([s.entry.label for s in task.winners])
    if len(task.groups) == 1:
        return f"Only {names} was run here: there is nothing to compare."
    verb = "ranks first" if len(task.winners) == 1 else "share the first rank"
    first = f"{names} {verb} by {task.quality}"
    if task.baseline is None:
        return f"{first}; no MLE was run, so no gain can be claimed."
    return {
        "baseline": f"No gain from being Bayesian was seen here: {first}.",
        "better": f"{first} and is significantly better than the MLE.",
        "untested": f"{first}; whether that is more than luck could not be tested: {_why_untested(task.winners[0])}.",
    }.get(task.outcome, f"{first}, but its advantage over the MLE cannot be told from seed noise.")


def _ranking(report: Report, task: Task) -> Html:
    metrics = task.columns()
    tables = {m.name: task.summaries(m.name) for m in metrics}
    digits = {name: _digits(table.values()) for name, table in tables.items()}
    winners = {m.name: best(_means(tables[m.name]), m.better) for m in metrics}
    gaps = _gaps(task)
    compared = task.compared
    reach = _reach(task.standings)
    rows = []
    for standing in task.standings:
        entry = standing.entry
        scores = [_cell(_plus_minus(tables[m.name][entry], digits[m.name], entry in winners[m.name])) for m in metrics]
        if compared:
            scores[1:1] = _compared(report, standing, digits[task.primary.name], task.primary, reach)
        if gaps:
            scores.insert(3 if compared else 1, _cell(_gap_text(gaps.get(entry), _gap_digits(gaps))))
        rank = tag("span", str(standing.rank or DASH), class_="rank")
        failed = tag("small", f"{_count(standing.failed, 'failed run')}", class_="failed") if standing.failed else None
        name = tag("th", tag("div", rank, report.name(entry), failed, class_="ranked"), scope="row")
        rows.append(tag("tr", name, scores, class_="baseline" if entry == task.baseline else None))
    head: list[svg.Child] = ["Method", *map(_heading, metrics)]
    if compared:
        head[2:2] = ["Difference to MLE", "Verdict"]
    if gaps:
        head.insert(4 if compared else 2, "Gap to oracle, nats")
    return _table(f"{task.name}: methods ranked by {task.quality}", head, rows, "ranking")


def _means(summaries: Mapping[Entry, Summary | None]) -> dict[Entry, float | None]:
    return {e: s.mean if s else None for e, s in summaries.items()}


def _compared(report: Report, standing: Standing, digits: int, metric: Metric, reach: float) -> list[Html]:
    """The two cells that compare with the MLE: difference with its picture, and the verdict."""
    if standing.verdict == "baseline":
        return [_cell("baseline"), _cell("")]
    difference = standing.difference
    if difference is None:
        return [_cell("n/a"), _cell("n/a")]
    picture = _forest(difference, reach, metric.better == "lower", report.style(standing.entry))
    symbol, word = MARKS[standing.verdict]
    p = tag("small", f" {_p_text(standing.p)}", class_="sd") if standing.p is not None else None
    words = [tag("span", f"{symbol} {word}".strip(), class_=f"mark {standing.verdict}"), p]
    return [_cell([picture, _difference_text(difference, digits)]), _cell(words)]


def _reach(table: Sequence[Standing]) -> float:
    """Half width of the interval pictures: all intervals, but at most four times the largest difference."""
    found = [s.difference for s in table if s.difference]
    largest = max((abs(d.mean) for d in found), default=0.0)
    widest = max((abs(b) for d in found for b in (d.low, d.high) if b is not None), default=0.0)
    return min(max(widest, largest), 4 * largest) * 1.1 or 1.0


def _forest(difference: Difference, reach: float, lower_is_better: bool, style: str) -> Html:
    """Interval around a difference, better to the right; an interval cut at the edge ends in an arrow."""
    width, sign = 108.0, -1 if lower_is_better else 1

    def at(value: float) -> float:
        return (1 + sign * value / reach) * width / 2

    marks = [tag("path", class_="axis", d=f"M{svg.short(width / 2)} 0v14")]
    if difference.low is not None and difference.high is not None:
        left, right = sorted((at(difference.low), at(difference.high)))
        d = f"M{svg.short(max(left, 1))} 7H{svg.short(min(right, width - 1))}"
        d += "M4 4L1 7L4 10" if left < 0 else ""
        d += f"M{width - 4:g} 4L{width - 1:g} 7L{width - 4:g} 10" if right > width else ""
        marks.append(tag("path", class_="stroke", d=d))
    marks.append(tag("path", class_="fill", d=svg.marker(at(difference.mean), 7, 3.4)))
    return tag("svg", marks, class_=f"forest plot {style}", viewBox=f"0 0 {width:g} 14", aria_hidden="true")


def _gaps(task: Task) -> dict[Entry, tuple[float, float | None]]:
    """Gap to the oracle, mean over seeds, with its standard error.

    Seeds share their test sequences, so errors are averaged over seeds and not shrunk by their number.
    """
    found = {}
    for entry, runs in task.groups.items():
        oracles = [r["oracle"] for r in runs if r.get("oracle")]
        gap, error = (summarise(o.get(key) for o in oracles) for key in ("gap", "gap_se"))
        if gap:
            found[entry] = (gap.mean, error.mean if error else None)
    return found


def _gap_digits(gaps: Mapping[Entry, tuple[float, float | None]]) -> int:
    return _digits(Summary(gap, error, 2) for gap, error in gaps.values())


def _gap_text(gap: tuple[float, float | None] | None, digits: int) -> list[svg.Child]:
    if gap is None:
        return [DASH]
    mean, error = gap
    beaten = error is not None and mean > 3 * error
    return [
        _fixed(mean, digits),
        tag("small", f" ± {_fixed(error, digits)}", class_="sd") if error is not None else None,
        tag("small", " above the oracle: check for a leak", class_="failed") if beaten else None,
    ]


def _under_ranking(report: Report, task: Task) -> list[svg.Child]:
    words = [_spread([task])]
    if task.baseline and task.compared:
        which = f" ({task.baseline.variant})" if task.baseline.variant else ""
        words.append(
            f"The interval is for the mean difference to the MLE{which} over common seeds, drawn with better "
            "to the right; p is Holm-corrected."
        )
    levels = summarise(o.get("log_likelihood") for r in task.results if (o := r.get("oracle")))
    if levels:
        value = _fixed(levels.mean, _digits([levels._replace(sd=None)]))
        words.append(f"The oracle, the true process, reaches {value} nats; ± of a gap is its standard error.")
    if unequal := _differing([_common_settings(r) for r in task.results]):
        words.append(f"Caution: the methods were not run with the same {_listing(unequal)}.")
    if failed := [s.entry.label for s in task.standings if s.failed]:
        words.append(f"{_listing(failed)}: runs without a finite score are left out, which flatters the mean.")
    if absent := [e.label for e in report.entries if e not in task.groups]:
        words.append(f"No result on this task: {_listing(absent)}.")
    return [" ".join(words)]


def _full_metrics(report: Report, task: Task) -> Html:
    rows = []
    for metric in map(_metric, task.metrics):
        summaries = task.summaries(metric.name)
        digits, winners = _digits(summaries.values()), best(_means(summaries), metric.better)
        about = tag("small", metric.help, class_="help") if metric.help else None
        cells = [_cell(_plus_minus(summaries[e], digits, e in winners)) for e in task.order]
        rows.append(tag("tr", tag("th", _heading(metric), about, scope="row"), cells))
    table = _table(f"{task.name}: all metrics", ["Metric", *map(report.name, task.order)], rows, "full")
    return tag("details", tag("summary", f"All {_count(len(rows), 'metric')}"), table)


def _per_seed(report: Report, task: Task) -> Html:
    """The raw material of the tests."""
    seeds = sorted({int(r["seed"]) for r in task.results})
    digits = _digits(s.summary for s in task.standings)
    rows = []
    for entry in task.order:
        values = by_seed(task.groups[entry], task.primary.name)
        cells = [_cell(_fixed(values.get(seed), digits)) for seed in seeds]
        rows.append(tag("tr", tag("th", report.name(entry), scope="row"), cells))
    caption = f"{task.name}: {task.quality} of every run"
    table = _table(caption, ["Method", *(f"Seed {s}" for s in seeds)], rows, "seeds")
    return tag("details", tag("summary", "Every run"), table)


def _settings(task: Task) -> Html | None:
    """Every setting of the first run of each method, as recorded."""
    texts = {
        e.label: json.dumps(runs[0]["settings"], indent=1, ensure_ascii=False, default=str)
        for e, runs in task.groups.items()
        if runs[0].get("settings")
    }
    if not texts:
        return None
    blocks = [(tag("h3", label), tag("pre", text, tabindex="0")) for label, text in texts.items()]
    return tag("details", tag("summary", "Settings"), blocks)


# ── Figures ──────────────────────────────────────────────────────────────────────────────────────────────


def _figure(
    title: str, rows: Sequence[Sequence[Html]], caption: str, class_: str, key: Sequence[Html | None] = ()
) -> Html:
    return tag(
        "figure",
        tag("h3", title),
        tag("ul", key, class_="key m") if key else None,
        [tag("div", panels, class_=f"panels {class_}") for panels in rows],
        tag("figcaption", caption),
    )


def _panel(report: Report, entry: Entry, content: svg.Child, aside: str = "") -> Html:
    name = tag("p", report.name(entry), tag("small", aside) if aside else None, class_="panel-name")
    return tag("div", name, content, class_=f"panel {report.style(entry)}")


def _floats(values: object) -> list[float]:
    """A list of numbers with NaN where something else stands."""
    listed = values if isinstance(values, list | tuple) else []
    return [math.nan if (v := finite(value)) is None else v for value in listed]


def _reliability(report: Report, task: Task) -> Html | None:
    found = task.figures("reliability")
    if not found:
        return None
    panels = []
    for entry, data in found.items():
        confidence, accuracy, count = (_floats(data.get(k)) for k in ("confidence", "accuracy", "count"))
        plot = _diagonal("confidence", "accuracy")
        largest = max((c for c in count if c > 0), default=1.0)
        plot.line(confidence, accuracy, "thin")
        for x, y, n in zip(confidence, accuracy, count, strict=False):
            if n > 0:
                plot.point(x, y, radius=max(1.3, 5.5 * math.sqrt(n / largest)))
        ece = _aside(task, entry, "reliability", "ece")
        panels.append(_panel(report, entry, plot.render(f"Reliability of {entry.label} on {task.name}"), ece))
    caption = (
        "On the dashed line a stated confidence comes true as often as it says; below it the method is too "
        "sure of itself, above it too timid. The area of a dot is the number of predictions. "
    )
    return _figure("Does confidence come true?", [panels], caption + task.seed_note("reliability"), "small")


def _coverage(report: Report, task: Task) -> Html | None:
    found = task.figures("coverage")
    if not found:
        return None
    panels = []
    for entry, data in found.items():
        levels, coverage = ([0.0, *_floats(data.get(k)), 1.0] for k in ("levels", "coverage"))
        plot = _diagonal("stated probability", "share inside")
        plot.band(levels, levels, coverage)
        plot.line(levels, coverage)
        for x, y in zip(levels[1:-1], coverage[1:-1], strict=False):
            plot.point(x, y, radius=1.8)
        share = _aside(task, entry, "coverage", "coverage_90")
        panels.append(_panel(report, entry, plot.render(f"Interval coverage of {entry.label} on {task.name}"), share))
    caption = (
        "An interval that states 90 % should hold 90 % of the true values: then the curve lies on the dashed "
        "line. Below it the intervals are too narrow (too sure), above it too wide. "
    )
    return _figure("Do intervals hold what they state?", [panels], caption + task.seed_note("coverage"), "small")


def _diagonal(x_label: str, y_label: str) -> Plot:
    plot = Plot(Scale.unit(), Scale.unit(), 190, 195, x_label, y_label)
    plot.line([0, 1], [0, 1], "guide")
    return plot


def _aside(task: Task, entry: Entry, figure: str, metric: str) -> str:
    """The number that belongs to a figure, of the same run."""
    run = next(r for r in task.groups[entry] if (r.get("figures") or {}).get(figure))
    value = finite((run.get("metrics") or {}).get(metric))
    return "" if value is None else f"{_metric(metric).label} {_fixed(value, 3)}"


def _entropy(report: Report, task: Task) -> Html | None:
    found = {e: d for e, d in task.figures("entropy").items() if d.get("sets")}
    if not found:
        return None
    names = list(dict.fromkeys(name for data in found.values() for name in data["sets"]))
    names.sort(key=lambda name: name != "test")
    shares = {e: {n: _shares(d["sets"].get(n)) for n in names} for e, d in found.items()}
    edges = {e: _floats(d.get("edges")) for e, d in found.items()}
    x = Scale.over([v for values in edges.values() for v in values], pad=0, count=3)
    y = Scale.over([0.0, *(v for sets in shares.values() for s in sets.values() for v in s)], pad=0, count=3)
    panels = []
    for entry, sets in shares.items():
        plot = Plot(x, y, 190, 150, "entropy, nats", "share")
        for i, name in enumerate(names):
            plot.histogram(edges[entry], sets[name], _set_style(i), closed=i == 0)
        panels.append(_panel(report, entry, plot.render(f"Entropy of {entry.label} on {_listing(names)}, {task.name}")))
    key = [_key_item(name, _set_style(i), LINE if i else BOX) for i, name in enumerate(names)]
    caption = (
        f"How unsure the method is on familiar inputs ({names[0]}, filled) and on inputs unlike the training "
        "data (lines): the further right of the filled area the lines lie, the better it notices what it "
        "does not know. All panels share their axes; a share is a fraction of its set. "
    )
    return _figure("Does it know what it does not know?", [panels], caption + task.seed_note("entropy"), "small", key)


def _shares(counts: object) -> list[float]:
    values = _floats(counts)
    total = math.fsum(v for v in values if v > 0) or 1.0
    return [v / total for v in values]


def _set_style(index: int) -> str:
    """Familiar inputs are a filled grey area, others lines that differ in colour and in dash."""
    if index == 0:
        return "m softer"
    return f"m{(1, 0, 3, 2)[(index - 1) % 4]} stroke " + ("", "dash", "dot")[(index - 1) % 3]


LINE, BOX = "M0 6h22", "M0 2h22v8h-22z"  # samples of a line and of an area


def _key_item(name: str, class_: str, shape: str) -> Html:
    sample = tag("svg", tag("path", class_=class_, d=shape), viewBox="0 0 22 12", aria_hidden="true")
    return tag("li", sample, name)


def _bands(report: Report, task: Task) -> Html | None:
    found = {e: [s for s in d if s.get("time")][:SERIES] for e, d in task.figures("bands").items()}
    number = max(map(len, found.values()), default=0)
    if not number:
        return None
    rows = []
    for i in range(number):
        shown = {e: series[i] for e, series in found.items() if len(series) > i}
        y = _band_scale(list(shown.values()))
        titles = {e: f"Predictions of {e.label} for series {i + 1}, {task.name}" for e in shown}
        rows.append([_panel(report, e, _band_plot(s, y, titles[e])) for e, s in shown.items()])
    has_oracle = any(s.get("oracle_mean") for d in found.values() for s in d)
    key = [
        _key_item("observed", "inkfill", svg.marker(11, 6, 2)),
        _key_item("predicted mean", "stroke", LINE),
        _key_item("total uncertainty", "soft", BOX),
        _key_item("of it, noise in the data (aleatoric)", "softer", BOX),
        _key_item("true mean (oracle)", "ink dash", LINE) if has_oracle else None,
        _key_item("its band", "ink dot", LINE) if has_oracle else None,
    ]
    which = "the first test series" if number == 1 else f"the first {number} test series, one per row"
    match = ", and the band should match that of the oracle, the best that any method can do"
    caption = (
        f"Predictions for {which}, not chosen for looks: most dots should lie inside the coloured band"
        f"{match if has_oracle else ''}. What lies outside the inner band is doubt of the method itself. "
        f"{task.seed_note('bands')}"
    )
    return _figure("What do predictions look like?", rows, caption, "series", key)


def _band_scale(series: Sequence[Mapping[str, Any]]) -> Scale:
    """Room for the data and the oracle, and for bands up to one data range beyond: a diverged method must not
    flatten the others."""
    solid = [v for s in series for k in ("observed", "oracle_low", "oracle_high") for v in _floats(s.get(k))]
    bands = [v for s in series for k in ("mean", "low", "high") for v in _floats(s.get(k))]
    solid = [v for v in solid if math.isfinite(v)] or [v for v in bands if math.isfinite(v)] or [0.0]
    span = max(solid) - min(solid)
    near = [v for v in bands if min(solid) - span <= v <= max(solid) + span]
    return Scale.over(solid + near)


def _band_plot(series: Mapping[str, Any], y: Scale, title: str) -> Html:
    time = _floats(series.get("time"))
    plot = Plot(Scale.over(time, pad=0.01), y, 240, 170, "time", clip=True)

    def get(key: str) -> list[float]:
        return _floats(series.get(key))

    plot.band(time, get("low"), get("high"), "soft")
    plot.band(time, get("aleatoric_low"), get("aleatoric_high"), "softer")
    for key in ("oracle_low", "oracle_high"):
        plot.line(time, get(key), "ink dot")
    plot.line(time, get("oracle_mean"), "ink dash")
    plot.line(time, get("mean"))
    for t, value in zip(time, get("observed"), strict=False):
        plot.point(t, value, "inkfill", radius=1.5)
    return plot.render(title)


def _examples(report: Report, task: Task) -> Html | None:
    found = task.figures("examples")
    panels = []
    for entry, data in found.items():
        rows = [
            tag("div", tag("p", words), tag("ul", pictures), class_="thumbs")
            for words, key in (("Least sure", "highest"), ("Most sure", "lowest"))
            if (pictures := [p for e in (data.get(key) or [])[:IMAGES] if (p := _picture(e))])
        ]
        if rows:
            panels.append(_panel(report, entry, rows))
    if not panels:
        return None
    caption = (
        "Test images with the highest and the lowest entropy. Under each: the predicted class and the "
        "entropy in nats; ✗ marks an error, with the true class behind it. Doubt is well placed when the "
        "images in the first row are hard for you, too. "
    )
    return _figure("Which inputs puzzle it?", [panels], caption + task.seed_note("examples"), "wide")


def _picture(example: Mapping[str, Any]) -> Html | None:
    try:
        source = svg.png([_floats(row) for row in example["image"]])
    except (KeyError, TypeError, ValueError):  # no picture is no reason to have no report
        return None
    label, predicted, entropy = (example.get(k) for k in ("label", "predicted", "entropy"))
    wrong = label != predicted
    words = f"{predicted} ✗ {label}" if wrong else f"{predicted}"
    nats = _fixed(finite(entropy), 2)
    alt = f"class {label}, predicted {predicted}, entropy {nats} nats"
    return tag(
        "li",
        tag("img", src=source, alt=alt, title=alt),
        tag("span", tag("b", words) if wrong else words),
        tag("small", nats),
    )


def _cost(report: Report, task: Task) -> list[Html]:
    fit, predict, parameters, memory = map(task.costs, ("fit_seconds", "predict_ms", "parameters", "peak_mib"))
    rows = []
    for entry in task.order:
        times = [_time(table, entry, task.baseline) for table in (fit, predict)]
        sizes = [_whole(table[entry]) for table in (parameters, memory)]
        rows.append(tag("tr", tag("th", report.name(entry), scope="row"), map(_cell, [*times, *sizes])))
    head = ["Method", "Training, s", "Prediction, ms per example", "Stored numbers", "Peak memory, MiB"]
    table = _table(f"{task.name}: cost", head, rows, "cost")
    plots = [
        _scatter(report, task, fit, "training, s"),
        _scatter(report, task, predict, "prediction, ms per example"),
    ]
    if not all(plots):
        return [tag("h3", "What does it cost?"), table]
    side = {"higher": ", best is upper left", "lower": ", best is lower left", "none": ""}[task.primary.better]
    caption = f"Quality ({task.quality}) against price on a logarithmic axis{side}. {_spread([task])}"
    return [_figure("What does it cost?", [[p for p in plots if p]], caption, "pair"), table]


def _time(table: Mapping[Entry, Summary | None], entry: Entry, baseline: Entry | None) -> list[svg.Child]:
    """A time with its spread, and as a multiple of the MLE's."""
    value, base = table[entry], table[baseline] if baseline else None
    if value is None or base is None or base.mean <= 0 or entry == baseline:
        return _plus_minus(value, _digits([value]))
    ratio = value.mean / base.mean
    multiple = f"{ratio:.1f} × MLE" if ratio < 10 else f"{ratio:.0f} × MLE"
    return [*_plus_minus(value, _digits([value])), tag("small", multiple, class_="times")]


def _whole(summary: Summary | None) -> str:
    return f"{summary.mean:,.0f}".replace(",", "\u202f") if summary else DASH


def _scatter(report: Report, task: Task, cost: Mapping[Entry, Summary | None], label: str) -> Html | None:
    quality = task.summaries(task.primary.name)
    shown = [(e, c, q) for e in task.order if (c := cost[e]) and (q := quality[e]) and c.mean > 0]
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
    return tag("div", plot.render(f"{task.primary.label} against {label}, {task.name}"), class_="panel")


def _label_points(plot: Plot, points: Sequence[tuple[float, float, str]]) -> None:
    """Names beside their points, each at the first of six places where it covers nothing."""
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y, _ in points]
    for x, y, label in points:
        text = label if len(label) <= 24 else label[:23] + "…"
        width = 5.7 * len(text)
        places = [
            ("", x + 8, y + 3.5, x + 8),
            ("end", x - 8, y + 3.5, x - 8 - width),
            ("middle", x, y - 9, x - width / 2),
            ("middle", x, y + 16, x - width / 2),
            ("", x + 6, y - 7, x + 6),
            ("", x + 6, y + 14, x + 6),
        ]
        boxes = [(left, py - 9, left + width, py + 2) for _, _, py, left in places]
        free = [
            i for i, box in enumerate(boxes)
            if box[0] > -4 and box[2] < plot.inner_width and not any(_overlap(box, t) for t in taken)
        ]  # fmt: skip
        choice = free[0] if free else 0
        anchor, px, py, _ = places[choice]
        taken.append(boxes[choice])
        plot.text(px, py, text, f"halo {anchor}".strip())


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


FIGURES: tuple[Callable[[Report, Task], Html | None], ...] = (
    _reliability,
    _coverage,
    _entropy,
    _bands,
    _examples,
)
"""Drawn in this order where a task recorded what they need."""


# ── Appearance ───────────────────────────────────────────────────────────────────────────────────────────

SCRIPT = """
(function(){var r=document.documentElement,k='bayesformer-theme',m=matchMedia('(prefers-color-scheme: dark)');
try{var s=localStorage.getItem(k);if(s)r.dataset.theme=s}catch(e){}
function dark(){return r.dataset.theme?r.dataset.theme==='dark':m.matches}
document.addEventListener('DOMContentLoaded',function(){var b=document.getElementById('theme');
function label(){b.textContent=dark()?'Light theme':'Dark theme'}
b.hidden=false;label();m.addEventListener('change',label);
b.addEventListener('click',function(){r.dataset.theme=dark()?'light':'dark';label();
try{localStorage.setItem(k,r.dataset.theme)}catch(e){}})})})()
"""

CSS = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--bg);color:var(--ink);overflow-wrap:break-word;font:16px/1.55 system-ui,
-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Liberation Sans",Arial,sans-serif}
header,main,footer{max-width:70rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:2.5rem;position:relative}
h1,h2{font-family:"Iowan Old Style","Palatino Linotype",Palatino,Charter,Georgia,"Liberation Serif",serif;
font-weight:600;line-height:1.15;text-wrap:balance;letter-spacing:-.01em}
h1{font-size:clamp(1.9rem,5vw,2.9rem);margin:.2rem 0 .5rem}
h2{font-size:clamp(1.5rem,3.6vw,2rem);margin:0 0 .6rem}
h3{font-size:1.02rem;font-weight:650;margin:0 0 .5rem}
p,ul{margin:0 0 .9rem;max-width:44rem}
a{color:var(--link);text-decoration-thickness:1px;text-underline-offset:.18em}
:focus-visible{outline:2px solid var(--link);outline-offset:2px}
small{font-size:.82em}
strong,b{font-weight:700}
dd{margin:0;min-width:0;overflow-wrap:anywhere}
section{margin-top:3rem;padding-top:2.25rem;border-top:1px solid var(--line)}
#summary{margin-top:1.75rem}
.eyebrow{color:var(--muted);font-size:.85rem;letter-spacing:.04em;margin:0}
.lede{color:var(--muted);font-size:1.05rem}
.note{border-left:3px solid var(--faint);padding:.15rem 0 .15rem .8rem}
.answer{font-size:1.12rem;line-height:1.5}
.fine,figcaption{color:var(--muted);font-size:.875rem;line-height:1.5;max-width:46rem}
#theme{position:absolute;right:1.25rem;top:1.1rem;padding:.3rem .8rem;font:inherit;font-size:.8rem;
color:var(--muted);background:none;border:1px solid var(--line);border-radius:99px;cursor:pointer}
#theme:hover{color:var(--ink);border-color:var(--faint)}
.facts{display:grid;grid-template-columns:1fr 1fr;gap:.35rem 2.5rem;margin:1.4rem 0 .8rem;font-size:.9rem}
.facts>div,.methods>div{display:grid;grid-template-columns:5rem 1fr;gap:.8rem;align-items:baseline}
.facts dt{color:var(--muted)}
.methods>div{grid-template-columns:minmax(7rem,13rem) 1fr;padding:.3rem 0;font-size:.92rem}
.inline,.key{display:flex;flex-wrap:wrap;gap:.1rem 1rem;list-style:none;padding:0;margin:0;max-width:none}
details{margin:.4rem 0;max-width:100%}
summary{cursor:pointer;color:var(--link);font-size:.92rem;padding:.15rem 0;width:fit-content}
details[open]>summary{margin-bottom:.6rem}
.guide ul{padding-left:1.1rem;font-size:.92rem}
pre{margin:0 0 1rem;padding:.8rem;background:var(--panel);overflow:auto;max-height:22rem;font-size:.78rem;
line-height:1.4}
.scroll{overflow-x:auto;margin:1.2rem 0;max-width:100%;overscroll-behavior-x:contain}
table{border-collapse:separate;border-spacing:0;min-width:100%;font-size:.9rem;line-height:1.35;
font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--muted);font-size:.82rem;padding-bottom:.5rem}
th,td{text-align:left;vertical-align:top;padding:.55rem 1rem .55rem 0;border-bottom:1px solid var(--line);
font-weight:400}
thead th{vertical-align:bottom;color:var(--muted);font-size:.82rem;border-bottom-color:var(--faint);
min-width:5rem}
tbody th,thead th:first-child{position:sticky;left:0;z-index:1;background:var(--bg);min-width:7rem}
td.n{white-space:nowrap}
.sd,.variant,.help,.times{color:var(--muted)}
.variant,.help,.failed,.times{display:block;font-weight:400}
.help{max-width:24rem;line-height:1.35}
.full tbody th{min-width:10rem}
.failed{color:var(--bad);white-space:normal}
.words{min-width:17rem}
.nowrap{white-space:nowrap}
.entry{display:inline-flex;gap:.45rem;align-items:baseline;min-width:0}
.entry>span{min-width:0}
th .entry,td .entry,th .entry>span,td .entry>span{min-width:auto}
.names .entry{display:flex}
.swatch{width:.7em;height:.7em;flex:none}
.ranked{display:grid;grid-template-columns:1.55rem auto;align-items:baseline;justify-content:start}
.ranked .failed{grid-column:2}
.rank{color:var(--muted)}
.ranking .baseline>*{background:var(--panel)}
.ranks .mark{margin-left:.3em}
.mark.better{color:var(--good);font-weight:650}
.mark.worse{color:var(--bad);font-weight:650}
.mark.unclear,.mark.untested,.arrow{color:var(--muted)}
.forest{width:108px;height:14px;margin-bottom:.15rem}
figure{margin:2.6rem 0 0}
figcaption{margin-top:.7rem}
.panels{display:grid;gap:1.2rem 1.8rem}
.panels.small{grid-template-columns:repeat(auto-fill,minmax(0,250px))}
.panels.series{grid-template-columns:repeat(auto-fit,minmax(min(100%,235px),1fr))}
.panels.series+.panels.series{margin-top:1.4rem}
.panels.wide{grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr))}
.panels.pair{grid-template-columns:repeat(auto-fit,minmax(min(100%,310px),1fr))}
.panels.wide .panel,.panels.pair .panel{max-width:520px}
.panels.series .panel{max-width:345px}
.panel{min-width:0}
.panel-name{display:flex;flex-wrap:wrap;justify-content:space-between;align-items:baseline;gap:0 .6rem;
margin:0 0 .3rem;font-size:.86rem;overflow-wrap:anywhere}
.panel-name small{color:var(--muted);font-variant-numeric:tabular-nums}
.panel-name .variant{display:inline;margin-left:.4em}
.key{gap:.2rem 1.3rem;margin-bottom:.9rem;font-size:.84rem;color:var(--muted)}
.key li{display:flex;align-items:center;gap:.45rem}
.key svg{width:22px;height:12px;flex:none}
.thumbs p{margin:.3rem 0 .2rem;font-size:.8rem;color:var(--muted)}
.thumbs ul{display:grid;grid-template-columns:repeat(8,minmax(0,1fr));gap:.4rem;list-style:none;padding:0;
margin:0 0 .5rem;max-width:27rem}
.thumbs li{gap:.05rem;min-width:0;overflow-wrap:anywhere;font-size:.74rem;line-height:1.25;display:flex;
flex-direction:column}
.thumbs img{width:100%;height:auto;aspect-ratio:1;image-rendering:pixelated;border-radius:2px}
.thumbs b{color:var(--bad)}
.thumbs small{color:var(--muted)}
footer{margin-top:4rem;padding-bottom:3rem;color:var(--muted);font-size:.85rem}
@media (max-width:40rem){
body{font-size:15px}
header,main,footer{padding-left:1rem;padding-right:1rem}
header{padding-top:3.2rem}
.facts{grid-template-columns:1fr}
.methods>div{grid-template-columns:1fr;gap:.1rem}
section{margin-top:2.5rem;padding-top:1.75rem}
tbody th{max-width:42vw}
.panels.small{gap:1rem .9rem;grid-template-columns:1fr 1fr}}
@media print{#theme{display:none}figure,tr{break-inside:avoid}.scroll{overflow:visible}}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
"""
