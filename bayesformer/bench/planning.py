"""The plan of a comparison: its cells (task, method, seed), with every setting checked before anything runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from bayesformer.bench.records import cell_path
from bayesformer.bench.tasks import TASKS, Task, task_identity
from bayesformer.core.errors import unknown_name
from bayesformer.core.settings import identity, override
from bayesformer.methods import EVERY_METHOD, Method, build_method
from bayesformer.train.training import Training

REMOVED: Mapping[str, Mapping[str, Any]] = {"ensemble": {"init": "fresh"}}
"""Settings that methods once had, at the values that today's behaviour corresponds to. They are still part of a cell's
key, so that results stored with them count. Members of an ensemble start from new models, as the runner's tasks build
them."""


@dataclass(frozen=True)
class Cell:
    """One training with one method: the names of task and method, the seed, and the value of every setting."""

    task: str
    method: str
    seed: int
    task_settings: Mapping[str, Any]
    training: Mapping[str, Any]
    method_settings: Mapping[str, Any]
    start: Mapping[str, Any] | None = None
    """training of the MLE networks that it starts from; None starts from new models"""

    @property
    def key(self) -> str:
        """Eight hexadecimal digits from a hash of the settings: cells with one key differ by seed only."""
        chosen = {**REMOVED.get(self.method, {}), **identity(EVERY_METHOD[self.method], self.method_settings)}
        training = identity(Training, self.training)
        facts = [self.task, self.method, task_identity(self.task, self.task_settings), training, chosen]
        if self.start is not None:
            facts.append({"start": identity(Training, self.start)})
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def path(self) -> Path:
        """The file of its result, relative to the results folder."""
        return cell_path(self.task, self.method, self.key, self.seed)

    @property
    def folder(self) -> Path:
        """A folder name that no other cell has, for its posterior."""
        return self.path.with_suffix("")

    @property
    def trained_in(self) -> Path:
        """A folder name for checkpoints, the same for cells whose settings differ after training only."""
        kind = EVERY_METHOD[self.method]
        after = getattr(kind, "AFTER_TRAINING", ())
        if not after:
            return self.folder
        defaults = asdict(kind())
        common = {**self.method_settings, **{name: defaults[name] for name in after}}
        return replace(self, method_settings=common).folder

    @property
    def variant(self) -> str:
        """The method's settings that differ from its defaults, as "name=value, name=value"."""
        defaults = asdict(EVERY_METHOD[self.method]())
        changed = {k: v for k, v in self.method_settings.items() if v != defaults[k]}
        if self.start is not None:
            differs = {k: v for k, v in self.training.items() if v != self.start[k]}
            changed |= {"start": "mle", **differs}
        return ", ".join(f"{name}={value}" for name, value in changed.items())

    def __str__(self) -> str:
        return f"{self.task} {self.method} seed {self.seed}"

    def build(self) -> tuple[Task, Training, Method]:
        """The task, training and method objects that its settings describe."""
        task = override(TASKS[self.task](), self.task_settings, self.task)
        training = Training(**self.training)
        return task, training, build_method(self.method, dict(self.method_settings))


@dataclass(frozen=True)
class Overrides:
    """Settings that differ from the defaults: of training, by task name or pattern, and by method name."""

    training: Mapping[str, Any]
    tasks: Mapping[str, Mapping[str, Any]]
    methods: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, settings: Mapping[str, Mapping[str, Any]]) -> Overrides:
        """From {"training": {...}, "ensemble": {...}, "toy/m1": {...}, "toy/*": {"training": {...}, ...}}."""
        rest = dict(settings)
        training = rest.pop("training", {})
        methods = {name: rest.pop(name) for name in list(rest) if name in EVERY_METHOD}
        tasks = {name: rest.pop(name) for name in list(rest) if any(fnmatchcase(task, name) for task in TASKS)}
        if rest:
            raise unknown_name("group of settings", next(iter(rest)), ["training", *EVERY_METHOD, *TASKS])
        return cls(training, tasks, methods)

    def of_task(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The changes for one task: to its own settings, and to its training."""
        changes: dict[str, Any] = {}
        for pattern, values in self.tasks.items():
            if fnmatchcase(name, pattern):
                changes |= values
        own = changes.pop("training", {})  # training of this task alone
        return changes, {**self.training, **own}


@dataclass(frozen=True)
class Variant:
    """A method with settings of its own, on which tasks, and how many seeds it gets (None: as many as the others).

    With start="mle" it starts from the networks that the task's training gives, those of the methods mle and ensemble
    of the same seed; `training` are settings of what it does after that.
    """

    method: str
    settings: Mapping[str, Any]
    seeds: int | None = None
    tasks: str = "*"
    start: str | None = None
    training: Mapping[str, Any] = field(default_factory=dict)


def expand(patterns: Sequence[str], known: Mapping[str, Any], kind: str) -> list[str]:
    """Names from names and patterns such as toy/*, each once; an unknown one is an error that names the nearest."""
    names: list[str] = []
    for pattern in patterns:
        found = [name for name in known if fnmatchcase(name, pattern)]
        if not found:
            raise unknown_name(kind, pattern, known)
        names += [name for name in found if name not in names]
    return names


def variants(methods: Sequence[str | Mapping[str, Any]]) -> list[Variant]:
    """Methods from names, patterns and tables such as {"name": "vi", "temperature": [1.0, 0.1], "seeds": 1}.

    A list among the settings makes one variant per value, several lists their product.
    """
    found = []
    for entry in methods:
        table: dict[str, Any] = {"name": entry} if isinstance(entry, str) else dict(entry)
        if "name" not in table:
            raise ValueError(f"methods must be names or tables with a name; got {table}.")
        names, seeds = expand([table.pop("name")], EVERY_METHOD, "method"), table.pop("seeds", None)
        tasks, start, training = table.pop("tasks", "*"), table.pop("start", None), table.pop("training", {})
        if start not in (None, "mle"):
            if "start" not in EVERY_METHOD[names[0]].__dataclass_fields__:
                raise ValueError(f"methods: start of {names[0]} must be 'mle', or left out; got {start!r}.")
            table["start"], start = start, None  # a setting of the method itself
        expand([tasks], TASKS, "task")
        if seeds is not None and (not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1):
            raise ValueError(f"methods: seeds of {names[0]} must be a whole number of at least 1; got {seeds!r}.")
        if empty := [name for name, value in table.items() if value == []]:
            raise ValueError(f"methods: {empty[0]} of {names[0]} must list at least one value; got [].")
        choices = [value if isinstance(value, list) else [value] for value in table.values()]
        for name in names:
            found += [
                Variant(name, dict(zip(table, values, strict=True)), seeds, tasks, start, training)
                for values in product(*choices)
            ]
    return found


def plan(
    tasks: Sequence[str],
    methods: Sequence[str | Mapping[str, Any]],
    seeds: Sequence[int],
    settings: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """All cells of a comparison, every setting checked before anything runs.

    Args:
        tasks: names or patterns such as toy/*.
        methods: names, patterns or tables, see `variants`. {task} in a text setting stands for the last part of the
            task's name: "improved/{task}".
        seeds: training seeds of the methods that do not say how many they get.
        settings: settings that differ from the defaults, see `Overrides.of`.
    """
    overrides = Overrides.of(settings or {})
    cells: dict[tuple[str, int], Cell] = {}
    for task_name in expand(tasks, TASKS, "task"):
        task_changes, training_changes = overrides.of_task(task_name)
        _check_recordable(task_changes, task_name)
        _check_recordable(training_changes, "training")
        task = override(TASKS[task_name](), task_changes, task_name)
        training = override(task.training, training_changes, "training")
        for variant in [v for v in variants(methods) if fnmatchcase(task_name, v.tasks)]:
            chosen = {**overrides.methods.get(variant.method, {}), **variant.settings}
            short = task_name.rpartition("/")[2]
            chosen = {k: v.replace("{task}", short) if isinstance(v, str) else v for k, v in chosen.items()}
            _check_recordable(chosen, variant.method)
            method = override(EVERY_METHOD[variant.method](), chosen, variant.method)
            after = override(training, variant.training, "training")
            started = None if variant.start is None else asdict(training)
            parts = asdict(task), asdict(after), asdict(method), started  # type: ignore[call-overload]
            for seed in seeds if variant.seeds is None else range(variant.seeds):
                cell = Cell(task_name, variant.method, seed, *parts)
                cells[cell.key, seed] = cell  # two entries may describe one cell
    if not cells:
        raise ValueError(f"methods must name at least one that runs on {', '.join(tasks)}; got {list(methods)}.")
    return list(cells.values())


def _check_recordable(settings: Mapping[str, Any], where: str) -> None:
    """Refuse a setting that could not be written beside its result, such as a date in a TOML table."""
    for name, value in settings.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{where}.{name} must be made of numbers, texts, lists and tables, to be recorded; got {value!r}."
            ) from error
