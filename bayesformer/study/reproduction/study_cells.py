"""From columns of the study to cells of the runner: with which settings, for how many epochs, from which start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from bayesformer.bench.planning import Cell, plan
from bayesformer.bench.tasks import TASKS
from bayesformer.methods import METHODS
from bayesformer.study.reproduction.choices import StudyChoices
from bayesformer.study.reproduction.description import Column, Description, TaskBudget

Length = Literal["equal", "long"]
LONG_SCRATCH, LONG_START = 2, 4
"""What a long run has, in epochs of the equal one: from scratch, and after a start."""
BASELINES = ("mle", "ensemble")


def column_cells(
    description: Description,
    column: Column,
    task: str,
    choices: StudyChoices,
    seeds: Sequence[int],
    length: Length = "equal",
) -> list[Cell] | None:
    """The cells of a column on a task; None while its settings have not been chosen or its priors not derived."""
    if not seeds:
        return []
    budget, chosen = description.budget(task), choices.of(task, column)
    settings = None if chosen is None else settings_of(column, task, budget, choices, chosen)
    if settings is None:
        return None
    entry = {"name": column.method, **settings, "training": epochs_of(column, task, budget, length)}
    if column.start is not None:
        entry["start"] = column.start
    return plan([task], [entry], seeds, {task: dict(budget.settings)} if budget.settings else {})


def tuning_cells(description: Description, column: Column, task: str, choices: StudyChoices) -> list[Cell] | None:
    """One cell per try, in their order, on less data and for few epochs; None while its priors are not derived."""
    budget = description.budget(task)
    tuning = budget.tuning
    found = []
    for tried in column.tries:
        settings = settings_of(column, task, budget, choices, tried)
        if settings is None:
            return None
        entry: dict[str, Any] = {"name": column.method, **settings}
        if column.start is not None:
            entry["start"] = column.start
        short = {**budget.settings, **tuning.settings, "training": {"epochs": tuning.epochs}}
        found += plan([task], [entry], [0], {task: short})
    return found


def settings_of(
    column: Column, task: str, budget: TaskBudget, choices: StudyChoices, chosen: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The method's settings with what stands for others put in; None where priors are asked for that are not there."""
    settings = {**column.settings, **chosen}
    for name, value in settings.items():
        if value == "@draws":
            settings[name] = budget.draws
        elif isinstance(value, str) and value.startswith("@derived"):
            laws = choices.derived(task, heavy=value == "@derived_heavy")
            if laws is None:
                return None
            settings[name] = laws
    return settings


def epochs_of(column: Column, task: str, budget: TaskBudget, length: Length) -> dict[str, int]:
    """Training settings of a column that differ from the task's: its epochs, if they do."""
    if column.epochs is not None:
        return {"epochs": column.epochs}
    if column.method in BASELINES or hasattr(METHODS[column.method], "fit_trained"):
        return {}
    if column.start is not None:
        return {"epochs": budget.extra * (LONG_START if length == "long" else 1)}
    whole = TASKS[task]().training.epochs + budget.extra
    return {"epochs": whole * (LONG_SCRATCH if length == "long" else 1)}
