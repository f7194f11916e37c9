"""The summary that opens docs/results.md and the headline table of the README, made from stored results.

For every task that has results of an MLE: which method won, by how much, at what cost. The winner is the one with the
best mean validation score, so that nothing is chosen on test data; what is shown of it is its test score. Documents
hold the tables between markers, `<!-- begin NAME -->` and `<!-- end NAME -->`, and `bayesformer study summary` writes
what stands between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from bayesformer.bench.records import read_results
from bayesformer.bench.statistics import (
    BASELINE,
    Difference,
    Entry,
    Result,
    Summary,
    by_seed,
    finite,
    group,
    paired_difference,
    summarise,
)
from bayesformer.core.storage import write_atomically
from bayesformer.evaluate.catalogue import describe

SOURCES = (
    ("study", "toy/*"),
    ("study", "pos"),
    ("study", "mnist"),
    ("weight_space", "toy/*"),
    ("laplace", "digits"),
    ("laplace", "regression/*"),
    ("cold", "imdb*"),
)
"""Experiments and their tasks; a task is that of the first experiment that compares something with the MLE on it."""
LEAST_SEEDS = 2
ASKED = {
    "toy/*": "the next value of a series whose true law is known",
    "pos": "parts of speech of English words",
    "mnist": "handwritten digits, 28 × 28",
    "digits": "handwritten digits, 8 × 8",
    "regression/*": "a number from a table of features",
    "imdb*": "whether a movie review is positive",
}
SUMMARY, HEADLINE = "summary", "headline"
SHORT = 48  # characters of a variant


@dataclass(frozen=True)
class SummaryRow:
    """One task: the MLE, the ensemble, and the method that validation data prefer."""

    task: str
    experiment: str
    metric: str
    baseline: Summary
    ensemble: Summary | None
    winner: Entry
    score: Summary
    difference: Difference | None
    training: float | None  # times the MLE's
    prediction: float | None

    @property
    def verdict(self) -> str:
        """Whether the winner is ahead of the MLE by more than seed noise."""
        found = self.difference
        if self.winner.method == BASELINE:
            return "nothing was better"
        if found is None or found.low is None or found.high is None:
            return "one seed"
        better = describe(self.metric).better == "higher"
        low, high = (found.low, found.high) if better else (-found.high, -found.low)
        return "better" if low > 0 else "worse" if high < 0 else "within seed noise"


def summary_rows(folder: Path) -> list[SummaryRow]:
    """A row for every task that some stored experiment compares with the MLE."""
    rows: dict[str, SummaryRow] = {}
    for experiment, pattern in SOURCES:
        if not (folder / experiment).is_dir():
            continue
        results = [r for r in read_results(folder / experiment).results if fnmatchcase(str(r["task"]), pattern)]
        for task in sorted({str(r["task"]) for r in results} - set(rows)):
            row = summary_row([r for r in results if r["task"] == task], task, experiment)
            if row is not None:
                rows[task] = row
    return list(rows.values())


def summary_row(results: Sequence[Result], task: str, experiment: str) -> SummaryRow | None:
    """The row of one task; None where there is no MLE, or nothing to compare it with on as many seeds."""
    groups = {entry: runs for entry, runs in group(results).items() if len(runs) >= LEAST_SEEDS}
    plain = Entry(BASELINE)
    if plain not in groups:
        return None
    most = len(groups[plain])
    entries = {entry: runs for entry, runs in groups.items() if len(runs) >= most}
    if len(entries) < 2:
        return None
    metric = "oracle_gap" if all("oracle_gap" in r["metrics"] for r in groups[plain]) else str(results[0]["primary"])
    validation = {entry: summarise(r.get("validation") for r in runs) for entry, runs in entries.items()}
    judged = {
        entry: found.mean for entry, found in validation.items() if found is not None and found.n == len(entries[entry])
    }
    if plain not in judged:
        return None
    winner = max(judged, key=judged.__getitem__)
    scores = {entry: by_seed(runs, metric) for entry, runs in entries.items()}
    baseline, score = summarise(scores[plain].values()), summarise(scores[winner].values())
    if baseline is None or score is None:
        return None
    ensemble = summarise(scores[Entry("ensemble")].values()) if Entry("ensemble") in scores else None
    return SummaryRow(
        task,
        experiment,
        metric,
        baseline,
        ensemble,
        winner,
        score,
        paired_difference(scores[winner], scores[plain]),
        _ratio(entries[winner], entries[plain], "fit_seconds"),
        _ratio(entries[winner], entries[plain], "predict_ms"),
    )


def _ratio(ours: Iterable[Result], theirs: Iterable[Result], name: str) -> float | None:
    a, b = (summarise(finite(r["cost"].get(name)) for r in runs) for runs in (ours, theirs))
    return None if a is None or b is None or not b.mean else a.mean / b.mean


def summary_table(rows: Sequence[SummaryRow]) -> str:
    """Markdown: every task with its winner, what it gains, and what it costs."""
    lines = [
        "| task | asked for | score | MLE | ensemble | best by validation | its score | gain over the MLE | training, "
        "MLE = 1 | prediction, MLE = 1 | seeds | experiment |",
        "|---" * 12 + "|",
    ]
    for row in rows:
        cells = [row.task, asked(row.task), describe(row.metric).label, _told(row.baseline), _told(row.ensemble)]
        cells += [label_of_entry(row.winner), _told(row.score), f"{_gain(row)}: {row.verdict}"]
        cells += [_times(row.training), _times(row.prediction), str(row.score.n), f"`results/{row.experiment}`"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def headline_table(rows: Sequence[SummaryRow]) -> str:
    """Markdown for a first look: the tasks, the MLE, the winner and its gain."""
    lines = ["| task | score | MLE | best by validation | gain over the MLE |", "|---|---|---|---|---|"]
    for row in rows:
        label = describe(row.metric).label
        gain = f"{_gain(row)}: {row.verdict}"
        lines.append(f"| {row.task} | {label} | {_told(row.baseline)} | {label_of_entry(row.winner)} | {gain} |")
    return "\n".join(lines)


def asked(task: str) -> str:
    """What a task asks for, in a few words."""
    return next((words for pattern, words in ASKED.items() if fnmatchcase(task, pattern)), "")


def label_of_entry(entry: Entry) -> str:
    """A method with its settings, cut where they are long, such as tables of priors."""
    text = entry.label.replace("|", "/")
    return text if len(text) <= SHORT else f"{text[: SHORT - 1].rstrip(', ')}…"


def _told(summary: Summary | None) -> str:
    if summary is None:
        return "–"
    return f"{summary.mean:.3f}" if summary.sd is None else f"{summary.mean:.3f} ± {summary.sd:.3f}"


def _gain(row: SummaryRow) -> str:
    found = row.difference
    if row.winner.method == BASELINE or found is None:
        return "–"
    interval = "" if found.low is None or found.high is None else f" ({found.low:+.3f} to {found.high:+.3f})"
    return f"{found.mean:+.3f}{interval}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def told_in_words(rows: Sequence[SummaryRow]) -> str:
    """One paragraph: on how many tasks something was better than the MLE, and how often which kind of method won."""
    verdicts = [row.verdict for row in rows]
    kinds: dict[str, int] = {}
    for row in rows:
        kinds[row.winner.method] = kinds.get(row.winner.method, 0) + 1
    won = ", ".join(f"`{name}` {count}" for name, count in sorted(kinds.items(), key=lambda pair: (-pair[1], pair[0])))
    better = verdicts.count("better")
    return (
        f"Of {len(rows)} tasks, the method that validation data prefer is better than one network of maximum "
        f"likelihood (MLE) by more than seed noise on {better}. Times that a kind of method was preferred: {won}."
    )


def summary_text(folder: Path) -> str:
    """What opens the page of results: a paragraph and the table."""
    rows = summary_rows(folder)
    explained = (
        "A gap to the oracle is the log-likelihood above that of the true process, in nats per series: 0 is perfect. A "
        "gain has a 95 % interval over training seeds; costs are times of training and of a prediction as multiples of "
        "the MLE's, on machines that did other work as well. `bayesformer study summary` writes this table."
    )
    return f"{told_in_words(rows)}\n\n{summary_table(rows)}\n\n{explained}"


def filled(text: str, name: str, content: str) -> str:
    """A document with this content between the markers of a name."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"document must hold {begin} and {end} once each, in this order; it does not.")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def documents(results: Path, page: Path, readme: Path) -> Mapping[Path, str]:
    """The two documents as they should be."""
    made = {page: (SUMMARY, summary_text(results)), readme: (HEADLINE, headline_table(summary_rows(results)))}
    return {path: filled(path.read_text(encoding="utf8"), *what) for path, what in made.items()}


def write_documents(results: Path, page: Path, readme: Path, check: bool = False) -> list[Path]:
    """Bring both documents up to date and return those that were not; with `check` nothing is written."""
    stale = [(p, text) for p, text in documents(results, page, readme).items() if p.read_text(encoding="utf8") != text]
    for path, text in stale:
        if not check:
            write_atomically(path, text.encode())
    return [path for path, _ in stale]
