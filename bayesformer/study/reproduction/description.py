"""What the study consists of: tasks with their budgets, and columns of tables as methods with settings.

`study.toml` beside this file holds it. A task has `seeds`, the `networks` of its weight study (`first` of them before
priors are derived), the `extra` epochs of every method beyond the baseline's, `draws` of a prediction, `settings`, and
the `tuning` runs. A column has a `method` with `settings`, where it starts, and `tries`: settings among which
validation data choose, or `like`, another column of its group whose choice it takes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from bayesformer.bench.planning import expand
from bayesformer.bench.tasks import TASKS
from bayesformer.core.errors import unknown_name
from bayesformer.methods import METHODS

T = TypeVar("T")
TRIES = 4
"""Settings that every method may try on validation data, alike for all."""


@dataclass(frozen=True)
class TuningBudget:
    """The runs that choose settings: their epochs, and the task's settings that differ in them."""

    epochs: int
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskBudget:
    """What the methods get on the tasks of a pattern."""

    name: str
    seeds: int
    networks: int
    extra: int
    draws: int
    tuning: TuningBudget
    first: int = 10
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """One column of a table: a method with settings, on the tasks of a pattern."""

    group: str
    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tries: tuple[Mapping[str, Any], ...] = ()
    start: str | None = None
    like: str | None = None
    long: bool = False
    tasks: str = "*"
    epochs: int | None = None

    @property
    def label(self) -> str:
        """Group and name, which no other column has."""
        return f"{self.group}: {self.name}"

    @property
    def chooser(self) -> str:
        """The label of the column whose choice it uses."""
        return f"{self.group}: {self.like or self.name}"

    @property
    def needs_priors(self) -> bool:
        """Whether it uses the priors that were derived from trained networks."""
        return str(self.settings.get("prior", "")).startswith("@derived")


@dataclass(frozen=True)
class Description:
    """The whole study: budgets by task, columns by group, and which tables a group fills."""

    budgets: tuple[TaskBudget, ...]
    columns: tuple[Column, ...]
    tables: Mapping[str, tuple[str, ...]]

    @property
    def tasks(self) -> list[str]:
        """Names of all tasks, in the order in which they are run."""
        return expand([budget.name for budget in self.budgets], TASKS, "task")

    def budget(self, task: str) -> TaskBudget:
        """The budget of a task, that of the first pattern that matches."""
        found = [budget for budget in self.budgets if fnmatchcase(task, budget.name)]
        if not found:
            raise unknown_name("task of the study", task, self.tasks)
        return found[0]

    def on(self, task: str) -> list[Column]:
        """The columns that a task has, in their order."""
        return [column for column in self.columns if fnmatchcase(task, column.tasks)]

    def column(self, label: str) -> Column:
        """The column of this label, group and name."""
        found = {column.label: column for column in self.columns}
        if label not in found:
            raise unknown_name("column", label, found)
        return found[label]

    def is_published(self, column: Column) -> bool:
        """Whether a table of the thesis has the column."""
        return bool(self.tables.get(column.group))


def read_description(path: Path | None = None) -> Description:
    """The study as a file describes it; by default the one of the package."""
    own = resources.files("bayesformer.study.reproduction") / "study.toml"
    text = (own if path is None else path).read_text(encoding="utf8")
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"study {path or own} is not valid TOML: {error}.") from error
    return describe_study(content)


def describe_study(content: Mapping[str, Any]) -> Description:
    """The description in a table of TOML, every name in it checked."""
    budgets = []
    for entry in content["task"]:
        tuning = _made(TuningBudget, entry["tuning"], "tuning")
        budgets.append(_made(TaskBudget, {**entry, "tuning": tuning}, "task"))
    columns: list[Column] = []
    for group in content["group"]:
        columns += [_column(entry, group, content) for entry in group["columns"]]
    labels = [column.label for column in columns]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise ValueError(f"columns of the study must have different names; {sorted(twice)[0]!r} occurs twice.")
    for column in columns:
        if column.chooser not in labels:
            raise unknown_name("like", column.like or "", labels)
    tables = {group["name"]: tuple(group.get("tables", ())) for group in content["group"]}
    return Description(tuple(budgets), tuple(columns), tables)


def _column(entry: Mapping[str, Any], group: Mapping[str, Any], content: Mapping[str, Any]) -> Column:
    if entry["method"] not in METHODS:
        raise unknown_name("method", entry["method"], METHODS)
    named = entry.get("tries")
    if named is not None and named not in content["tries"]:
        raise unknown_name("tries", named, content["tries"])
    tries = tuple(content["tries"][named]) if named else ()
    if named and len(tries) != TRIES:
        raise ValueError(f"tries.{named} must be {TRIES} settings, as many as every method gets; got {len(tries)}.")
    default = content.get("defaults", {}).get(entry["method"], {})
    settings = {**default, **group.get("settings", {}), **entry.get("settings", {})}
    return _made(Column, {**entry, "group": group["name"], "settings": settings, "tries": tries}, "column")


def _made(kind: type[T], entry: Mapping[str, Any], where: str) -> T:
    known = {part.name for part in fields(kind)}  # type: ignore[arg-type]
    if unknown := set(entry) - known:
        raise unknown_name(f"entry of a {where}", unknown.pop(), known)
    return kind(**entry)
