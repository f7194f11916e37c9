"""Views of the results: what was run, by task, method and seed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from bayesformer.bench.report.colours import PALETTE
from bayesformer.bench.report.markup import Shared
from bayesformer.bench.statistics import (
    Entry,
    Result,
    Standing,
    Summary,
    Verdict,
    baseline_of,
    by_seed,
    entry_of,
    finite,
    group,
    part,
    standings,
    summarise,
    unconverged,
)
from bayesformer.bench.tasks import task_identity
from bayesformer.core.settings import identity
from bayesformer.evaluate.catalogue import Metric, describe
from bayesformer.train.training import Training

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Report:
    """All results of a page, sorted by task, with one colour and marker per entry."""

    def __init__(self, results: Sequence[Result]) -> None:
        by_task = _collect((str(r["task"]), r) for r in results)
        titled = [pair for name, runs in by_task.items() for pair in _titled(name, runs)]
        cells: dict[tuple[str, Entry, int], Result] = {}
        for title, result in sorted(titled, key=lambda pair: str(pair[1].get("started") or "")):
            cells[title, entry_of(result), int(result["seed"])] = result
        found = _collect((key[0], cells[key]) for key in sorted(cells))
        self.tasks = [TaskResults(name, i, runs) for i, (name, runs) in enumerate(found.items(), 1)]
        self.results = [r for runs in found.values() for r in runs]
        self.repeated = len(results) - len(cells)
        self.entries = sorted({entry for _, entry, _ in cells})
        self.seeds = sorted({seed for _, _, seed in cells})
        baseline = baseline_of(self.entries)
        self.shared = Shared()
        self.slots = {e: i for i, e in enumerate(e for e in self.entries if e != baseline)}

    def style(self, entry: Entry) -> str:
        """CSS class that sets the entry's colour --c; the baseline is grey."""
        return f"m{self.slots[entry] % len(PALETTE)}" if entry in self.slots else "m"

    def shape(self, entry: Entry) -> int:
        """Marker of the entry: five shapes and seven colours repeat together only after 35 entries."""
        return self.slots[entry] + 1 if entry in self.slots else 0

    def values(self, key: str) -> list[str]:
        """Distinct non-empty values of a field, as text, in order."""
        return sorted({str(r[key]) for r in self.results if r.get(key)})


@dataclass(frozen=True)
class TaskResults:
    """One task's results, grouped by entry and ranked by its primary metric."""

    name: str
    index: int
    results: list[Result]

    @cached_property
    def groups(self) -> dict[Entry, list[Result]]:
        """The runs of every entry, in the order of their seeds."""
        return group(self.results)

    @cached_property
    def metrics(self) -> list[str]:
        """Names of all metrics that a run has."""
        return list(dict.fromkeys(name for r in self.results for name in part(r, "metrics")))

    @cached_property
    def primary(self) -> Metric:
        """The metric by which the methods of this task are ranked."""
        named = [str(r["primary"]) for r in self.results if r.get("primary")]
        return metric_of(named[0] if named else next(iter(self.metrics), ""))

    @property
    def quality(self) -> str:
        """The primary metric inside a sentence: without its unit, an acronym as it is."""
        label = self.primary.label.split(", ")[0]
        return label[0].lower() + label[1:] if label[1:2].islower() else label

    @cached_property
    def standings(self) -> list[Standing]:
        """The standing of every entry, by rank."""
        return standings(self.results, self.primary.name, self.primary.better)

    @cached_property
    def winners(self) -> list[Standing]:
        """The entries that share rank 1; more than one in a tie."""
        return [s for s in self.standings if s.rank == 1]

    @property
    def order(self) -> list[Entry]:
        """The entries in the order of their ranks."""
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
        """The verdict on the top-ranked entry: better than the MLE, unclear, untested, or the MLE itself."""
        verdicts = [s.verdict for s in self.winners]
        if not verdicts or "baseline" in verdicts:
            return "baseline" if verdicts else "untested"
        # First by mean and yet worse: the MLE lacks the seeds on which this one did well.
        return "unclear" if verdicts[0] == "worse" else verdicts[0]

    @property
    def description(self) -> str:
        """The task's one-line description, or an empty text."""
        return next((str(r["task_description"]) for r in self.results if r.get("task_description")), "")

    def summaries(self, metric: str) -> dict[Entry, Summary | None]:
        """Mean and spread over seeds of a metric, for every entry."""
        return {e: summarise(by_seed(runs, metric).values()) for e, runs in self.groups.items()}

    def costs(self, key: str) -> dict[Entry, Summary | None]:
        """Mean and spread over seeds of a cost, for every entry."""
        return {e: summarise(part(r, "cost").get(key) for r in runs) for e, runs in self.groups.items()}

    def pictured(self, key: str) -> dict[Entry, Result]:
        """The first run of every entry that recorded the figure `key`, by rank."""
        found = {e: next((r for r in self.groups[e] if part(r, "figures").get(key)), None) for e in self.order}
        return {e: r for e, r in found.items() if r}

    @cached_property
    def unconverged(self) -> dict[Entry, int]:
        """How many runs of an entry had not converged, for the entries that have such runs."""
        found = {entry: unconverged(runs) for entry, runs in self.groups.items()}
        return {entry: number for entry, number in found.items() if number}

    def seed_note(self, key: str) -> str:
        """A sentence that says which run a figure shows."""
        seeds = {r["seed"] for r in self.pictured(key).values()}
        return f"One run, seed {seeds.pop()}." if len(seeds) == 1 else "One run each, the first seed."


def metric_of(name: str) -> Metric:
    """The catalogue's entry; a metric it does not know is shown by its name and ranks nobody."""
    try:
        return describe(name)
    except ValueError:
        return Metric(name, name or "no metric", "none", "")


def unequal_settings(results: Iterable[Result]) -> list[str]:
    """Settings of the task and its training that are not the same in all runs."""
    return _differing([_common_settings(r) for r in results])


def floats(values: object) -> list[float]:
    """The values as floats, NaN in place of what is not a finite number; an empty list if there is none."""
    listed = values if isinstance(values, list | tuple) else []
    return [math.nan if (v := finite(value)) is None else v for value in listed]


def _collect(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _titled(name: str, results: Sequence[Result]) -> list[tuple[str, Result]]:
    """Results under the task's name, or, if one method was run with several settings of the task or its
    training, under a name for each of them: runs of different settings are never averaged."""
    settings = [_common_settings(r) for r in results]
    found = _collect(zip(map(entry_of, results), settings, strict=True))
    if all(values == several[0] for several in found.values() for values in several):
        return [(name, r) for r in results]
    keys = _differing(settings)
    words = [", ".join(f"{k.split('.', 1)[1]}={values.get(k)}" for k in keys) for values in settings]
    return [(f"{name} ({text})", r) for text, r in zip(words, results, strict=True)]


def _common_settings(result: Result) -> dict[str, str]:
    """Settings of the task and its training, which a fair comparison shares, as "training.lr": "0.003".

    Settings that came later and are at their default count as absent, as in results that were stored before.
    """
    settings = part(result, "settings")
    common = {
        "task": task_identity(str(result["task"]), part(settings, "task")),
        "training": identity(Training, part(settings, "training")),
    }
    return {f"{key}.{name}": str(v) for key, values in common.items() for name, v in values.items()}


def _differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    keys = dict.fromkeys(key for values in settings for key in values)
    return [key for key in keys if len({values.get(key) for values in settings}) > 1]
