"""What of the study is still to be done, in the order that fills the tables of the thesis soonest.

Rounds: one seed of every published column; two more seeds of them; one seed of the columns beyond; the rest, which are
more seeds, long runs and the networks of the weight study. Within a round first the cheap tasks; within a task first
ensembles, whose networks all others use, then priors, then choices on validation data, then the columns themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from bayesformer.bench.planning import Cell
from bayesformer.bench.runner import missing_cells
from bayesformer.study.reproduction.choices import StudyChoices
from bayesformer.study.reproduction.description import Column, Description
from bayesformer.study.reproduction.study_cells import Length, column_cells, tuning_cells
from bayesformer.study.weight_networks import MEMBERS

Stage = Literal["networks", "priors", "choice", "cells"]
STAGES: tuple[Stage, ...] = ("networks", "priors", "choice", "cells")
SECOND = 3  # seeds after the second round
ENSEMBLE = "full network: Ensemble"


@dataclass(frozen=True)
class Duty:
    """Something to be done: cells of a column, tries of it, or the weight study of a task. `cells` is None while what
    they depend on has not been done."""

    round: int
    stage: Stage
    task: str
    place: int  # of the task's budget
    label: str
    column: Column | None
    cells: tuple[Cell, ...] | None
    networks: int = 0
    number: int = 0  # of cells, also of those that cannot be told yet
    length: Length = "equal"

    @property
    def order(self) -> tuple[int, int, int]:
        """Duties of equal order may be done side by side."""
        return self.round, self.place, STAGES.index(self.stage)

    def is_meant_by(self, pattern: str) -> bool:
        """Whether the pattern, which may stand anywhere, matches its task and label, such as "toy/m1 full network"."""
        return fnmatchcase(f"{self.task} {self.label}", f"*{pattern}*")

    @property
    def ready(self) -> bool:
        """Whether everything that it depends on has been done."""
        return self.cells is not None


@dataclass(frozen=True)
class StudyFolders:
    """Where the study keeps what it makes."""

    results: Path
    weights: Path
    networks: Path

    @property
    def tuning(self) -> Path:
        """Results of the tries, beside the results."""
        return self.results.with_name(f"{self.results.name}_tuning")

    @property
    def choices(self) -> Path:
        """The file of what was chosen, with the results."""
        return self.results / "choices.json"

    def statistics(self, task: str) -> Path:
        """The file of the weight study of a task."""
        return self.weights / f"{task.replace('/', '-')}.json"


def agenda(
    description: Description, choices: StudyChoices, folders: StudyFolders, only: str | None = None
) -> list[Duty]:
    """Everything that has no result yet, in order; `only` keeps what a pattern of task and column matches, and the
    priors that this needs."""
    found = [duty for task in description.tasks for duty in _of_task(description, choices, task)]
    if only is not None:
        meant = [duty for duty in found if duty.is_meant_by(only)]
        waiting = {duty.task for duty in meant if not duty.ready}  # for priors, perhaps
        found = meant + [duty for duty in found if duty.stage == "priors" and duty.task in waiting]
    left = _left(found, folders)
    return sorted(left, key=lambda duty: duty.order)


def _left(duties: Sequence[Duty], folders: StudyFolders) -> list[Duty]:
    """The duties without those that are done, each with its missing cells only."""
    left = []
    for tried, folder in ((False, folders.results), (True, folders.tuning)):
        part = [duty for duty in duties if (duty.stage == "choice") == tried]
        missing = {(c.key, c.seed) for c in missing_cells([c for d in part for c in d.cells or ()], folder)}
        for duty in part:
            if duty.cells is None or duty.stage == "priors":
                left.append(duty)
                continue
            cells = tuple(cell for cell in duty.cells if (cell.key, cell.seed) in missing)
            if cells or tried:  # a choice without missing cells is still to be made
                left.append(replace(duty, cells=cells, number=len(cells)))
    return left


def _of_task(description: Description, choices: StudyChoices, task: str) -> Iterator[Duty]:
    budget = description.budget(task)
    place = description.budgets.index(budget)
    common: dict[str, Any] = {"task": task, "place": place}
    without = task not in choices.priors
    first = max(1, -(-budget.first // MEMBERS)) if without else 1
    ensemble = description.column(ENSEMBLE)

    def networks(turn: int, seeds: Sequence[int]) -> Duty:
        cells = column_cells(description, ensemble, task, choices, seeds)
        how = {"column": ensemble, "cells": tuple(cells or ()), "number": len(seeds), **common}
        return Duty(turn, "networks", label=ensemble.label, **how)

    yield networks(0, range(first))
    yield networks(1, range(first, min(SECOND, budget.seeds)))
    yield networks(3, range(max(first, SECOND), -(-budget.networks // MEMBERS)))
    if without:
        yield Duty(0, "priors", label="weights", column=None, cells=(), networks=budget.first, **common)
    for column in description.on(task):
        published = description.is_published(column)
        begins = 0 if published else 2
        if column.tries and choices.of(task, column) is None:
            cells = tuning_cells(description, column, task, choices)
            how = {"column": column, "cells": _tuple(cells), "number": len(column.tries), **common}
            yield Duty(begins, "choice", label=column.label, **how)
        if column.label == ENSEMBLE:
            continue
        for turn, seeds in _turns(begins, budget.seeds):
            yield _cells(description, column, task, choices, turn, seeds, "equal", common)
        if column.long:
            yield _cells(description, column, task, choices, 3, range(min(2, budget.seeds)), "long", common)


def _turns(begins: int, seeds: int) -> Iterator[tuple[int, range]]:
    turns = (begins, range(1)), (begins + 1, range(1, min(SECOND, seeds))), (3, range(SECOND, seeds))
    yield from ((turn, part) for turn, part in turns if part)


def _cells(
    description: Description,
    column: Column,
    task: str,
    choices: StudyChoices,
    turn: int,
    seeds: Sequence[int],
    length: Length,
    common: dict[str, Any],
) -> Duty:
    cells = column_cells(description, column, task, choices, seeds, length)
    label = column.label if length == "equal" else f"{column.label}, long"
    how: dict[str, Any] = {"column": column, "cells": _tuple(cells), "number": len(seeds), "length": length, **common}
    return Duty(turn, "cells", label=label, **how)


def _tuple(cells: list[Cell] | None) -> tuple[Cell, ...] | None:
    return None if cells is None else tuple(cells)
