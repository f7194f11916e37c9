"""The tables of the thesis with our values beside the published ones, and tables of what goes beyond it.

A cell of a table reads "ours (published)". Ours is the mean over training seeds ± their standard deviation, the
thesis's is one network. "–" is not run yet. Tables are data first, then Markdown or a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bayesformer.bench.statistics import Result, Summary, finite, summarise
from bayesformer.evaluate.catalogue import describe
from bayesformer.study.reproduction.choices import StudyChoices
from bayesformer.study.reproduction.description import Column, Description
from bayesformer.study.reproduction.published import TASKS, Published, published, score_of
from bayesformer.study.reproduction.study_cells import Length, column_cells

NONE = "–"
GAINS = {"log_likelihood_gain_percent": "log_likelihood", "auroc_gain_percent": "auroc"}
BEYOND = ("untempered", "beyond", "attention layer, improved prior", "long baselines")
PLAIN = "full network"
"""The group that improved priors are compared with, and the one that has the baselines of all tables."""
TITLES = {
    "3.1": "Inference over all weights",
    "3.2": "Inference over all weights: which sentences are ambiguous, by entropy",
    "3.5": "Inference over all weights: ambiguous and foreign digits, by entropy",
    "3.6": "Inference over the attention layers",
    "3.7": "Inference over the attention layers: which sentences are ambiguous, by entropy",
    "3.8": "Inference over the attention layers: ambiguous and foreign digits, by entropy",
    "3.9": "Log-likelihood gained by improved priors, %",
    "3.10": "AUROC gained by improved priors, %",
    "3.11": "Stochastic attention",
    "3.12": "Stochastic attention: which sentences are ambiguous, by entropy",
    "3.15": "Stochastic attention: ambiguous and foreign digits, by entropy",
}


@dataclass(frozen=True)
class StudyTable:
    """A table as text: a title, a note under it, the head and the rows."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        """The table as Markdown, its note below."""
        lines = [f"| {' | '.join(self.head)} |", "|---" * len(self.head) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        return "\n".join(lines) + (f"\n\n{self.note}" if self.note else "")


class StoredStudy:
    """Stored results of the study, found by column and task."""

    def __init__(self, description: Description, choices: StudyChoices, results: Sequence[Result]) -> None:
        self.description, self.choices = description, choices
        self.found = {(str(r["task"]), str(r["key"]), int(r["seed"])): r for r in results}

    def of(self, column: Column | None, task: str, length: Length = "equal") -> dict[int, Result]:
        """By seed the results of a column on a task, with the settings that were chosen; none of what is no part of the
        description."""
        if column is None or task not in self.description.tasks:
            return {}
        seeds = range(self.description.budget(task).seeds)
        cells = column_cells(self.description, column, task, self.choices, seeds, length) or []
        every = {cell.seed: self.found.get((cell.task, cell.key, cell.seed)) for cell in cells}
        return {seed: result for seed, result in every.items() if result is not None}

    def scores(self, column: Column | None, task: str, metric: str, length: Length = "equal") -> dict[int, float]:
        """By seed the finite values of a score."""
        pairs = ((s, finite(r["metrics"].get(metric))) for s, r in self.of(column, task, length).items())
        return {seed: value for seed, value in pairs if value is not None}

    def column(self, group: str, name: str) -> Column | None:
        """The column of a group, or a baseline, which all groups share; None if there is none of that name."""
        labels = {column.label: column for column in self.description.columns}
        return labels.get(f"{group}: {name}", labels.get(f"{PLAIN}: {name}"))

    def oracle(self, task: str) -> float | None:
        """The log-likelihood of the true process, where it is known and something has been run."""
        levels = [(r.get("oracle") or {}).get("log_likelihood") for (t, _, _), r in self.found.items() if t == task]
        known = summarise(levels)
        return None if known is None else known.mean

    def seeds(self, columns: Sequence[Column], task: str) -> int:
        """The most seeds that a column of these has on a task."""
        return max((len(self.of(column, task)) for column in columns), default=0)


class RowKey(NamedTuple):
    """What a row of a published table is about."""

    dataset: str
    metric: str


def thesis_table(stored: StoredStudy, number: str) -> StudyTable:
    """A table of the thesis, transposed: a row per method, a column per data set and score."""
    numbers = [p for p in published() if p.table == number]
    if not numbers:
        raise ValueError(f"table must be one of {', '.join(TITLES)}; got {number!r}.")
    group = next((g for g, tables in stored.description.tables.items() if number in tables), PLAIN)
    keys = list(dict.fromkeys(RowKey(p.dataset, p.metric) for p in numbers))
    values = {(p.method, RowKey(p.dataset, p.metric)): p for p in numbers}
    methods = list(dict.fromkeys(p.method for p in numbers))
    rows = []
    for method in methods:
        column = stored.column(group, method)
        cells = [_compared(stored, column, key, values.get((method, key))) for key in keys]
        rows.append((method, *cells))
    if number in {"3.1", "3.6", "3.11"}:
        oracle = [stored.oracle(TASKS[k.dataset]) if k.metric == "log_likelihood" else None for k in keys]
        rows.append(("oracle", *(NONE if level is None else f"{level:.3f}" for level in oracle)))
    head = ("ours (published)", *(f"{key.dataset} {label_of(key)}" for key in keys))
    return StudyTable(f"Table {number}. {TITLES[number]}", head, tuple(rows), _note(stored, group, keys))


def label_of(key: RowKey) -> str:
    """How a column of a published table is headed."""
    return {"log_likelihood": "log-lik.", "variance_mse": "var. MSE", "mse": "MSE", "accuracy": "acc."}.get(
        key.metric, "gain, %" if key.metric in GAINS else key.metric.upper()
    )


def _compared(stored: StoredStudy, column: Column | None, key: RowKey, value: Published | None) -> str:
    theirs = NONE if value is None else f"{value.value:.3g}" if abs(value.value) < 1 else f"{value.value:.2f}"
    task = TASKS[key.dataset]
    if key.metric in GAINS:
        metric = GAINS[key.metric] if key.metric.startswith("log") else score_of(key.dataset, "auroc")
        ours = gain(stored, column, task, metric)
    else:
        ours = summarise(stored.scores(column, task, score_of(key.dataset, key.metric)).values())
    return f"{told(ours)} ({theirs})"


def gain(stored: StoredStudy, column: Column | None, task: str, metric: str) -> Summary | None:
    """Percent that improved priors change a score by, over seeds: 100 (improved - plain) / |plain|."""
    if column is None:
        return None
    plain = stored.scores(stored.column(PLAIN, column.name), task, metric)
    improved = stored.scores(column, task, metric)
    common = [seed for seed in improved if plain.get(seed)]
    return summarise(100 * (improved[seed] - plain[seed]) / abs(plain[seed]) for seed in common)


def told(summary: Summary | None) -> str:
    """Mean ± standard deviation over seeds, as short as it is telling."""
    if summary is None:
        return NONE
    digits = 3 if abs(summary.mean) < 10 else 2
    text = f"{summary.mean:.{digits}f}"
    return text if summary.sd is None else f"{text} ± {summary.sd:.{digits}f}"


def _note(stored: StoredStudy, group: str, keys: Sequence[RowKey]) -> str:
    """How many seeds stand behind every task."""
    columns = [c for c in stored.description.columns if c.group in {group, PLAIN}]
    counts = {task: stored.seeds(columns, task) for task in dict.fromkeys(TASKS[key.dataset] for key in keys)}
    words = ", ".join(f"{task} {count}" for task, count in counts.items())
    padding = " POS accuracy, F1 and ECE count padding, as the thesis most likely does." if "pos" in counts else ""
    return f"Seeds: {words}.{padding}"


def beyond_table(stored: StoredStudy, task: str) -> StudyTable:
    """Every column of a task on the scores that matter there, published or not, with what it cost."""
    names = scores_of_task(task)
    rows = []
    lengths: tuple[Length, ...] = ("equal", "long")
    for column in stored.description.on(task):
        for length in lengths:
            results = list(stored.of(column, task, length).values())
            if not results:
                continue
            label = column.label.removeprefix(f"{PLAIN}: ") + (", long" if length == "long" else "")
            values = [told(summarise(r["metrics"].get(name) for r in results)) for name in names]
            seconds = summarise(_training_seconds(r) for r in results)
            predict = summarise(r["cost"].get("predict_ms") for r in results)
            cost = ["–" if s is None else f"{s.mean:.3g}" for s in (seconds, predict)]
            rows.append((label, _settings(stored, column, task), *values, *cost, str(len(results))))
    head = ("method", "chosen", *(describe(name).label for name in names), "training, s", "prediction, ms", "seeds")
    return StudyTable(f"All methods on {task}", head, tuple(rows))


def scores_of_task(task: str) -> tuple[str, ...]:
    """The scores that a task's table shows."""
    if task.startswith("toy/"):
        return "oracle_gap", "variance_mse", "process_mse", "coverage_error_90"
    if task == "pos":
        ambiguity = ("auroc/ambiguity", "auroc_epistemic/ambiguity", "auroc/ambiguity_max", "stump_accuracy/ambiguity")
        return "log_likelihood", "accuracy", "ece", "brier", "aurc", *ambiguity
    outsiders = [
        f"{score}/{who}" for who in ("ambiguous", "fashion") for score in ("auroc", "auroc_epistemic", "fpr95")
    ]
    return "log_likelihood", "accuracy", "ece", "brier", "aurc", *outsiders, "pavpu", "accuracy/noisy", "pavpu/noisy"


def _training_seconds(result: Result) -> float | None:
    cost = result["cost"]
    return (finite(cost.get("fit_seconds")) or 0.0) + (finite(cost.get("start_seconds")) or 0.0)


def _settings(stored: StoredStudy, column: Column, task: str) -> str:
    chosen: Mapping[str, Any] = stored.choices.of(task, column) or {}
    return ", ".join(f"{name}={value}" for name, value in chosen.items()) or NONE


def choice_rows(choices: StudyChoices) -> StudyTable:
    """Every choice with the validation scores of its tries, the chosen one in bold."""
    rows = []
    for task, made in choices.chosen.items():
        for label, choice in made.items():
            scores = [
                f"{'**' if settings == choice['settings'] else ''}{_short(settings)}: "
                f"{'failed' if score is None else f'{score:.3f}'}{'**' if settings == choice['settings'] else ''}"
                for settings, score in zip(choice["tries"], choice["validation"], strict=True)
            ]
            rows.append((task, label, *scores))
    head = ("task", "column", "try 1", "try 2", "try 3", "try 4")
    return StudyTable("Settings chosen on validation data", head, tuple(rows))


def _short(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
