"""The runner: fills in the cells (task, method, seed) that have no result yet.

It names no task and no method. A result is one JSON line in a file of its own, written whole when the cell is
done; a cell that was killed resumes from its checkpoint; a cell that failed is written aside with its error and
does not stop the others.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bayesformer import evaluate
from bayesformer.attention import families
from bayesformer.attention.maps import picture
from bayesformer.bench import chain_traces as traces
from bayesformer.bench.memory import PeakMemory
from bayesformer.bench.tasks import TASKS, Evaluation, Task, describe
from bayesformer.bench.timing import best_seconds
from bayesformer.core.errors import DamagedFileError, unknown_name
from bayesformer.core.progress import Reporter, Silent
from bayesformer.core.settings import identity, override, summary
from bayesformer.core.storage import read_json, write_json
from bayesformer.core.strategy import Strategy
from bayesformer.core.workers import Failure, run_in_processes
from bayesformer.data import Data
from bayesformer.data.inputs import first_tensor
from bayesformer.methods import METHODS, Method, Problem, build_method
from bayesformer.posterior import Posterior
from bayesformer.train.training import Training

FAILED, CHECKPOINTS, POSTERIORS = "failed", ".checkpoints", "posteriors"
ASIDE = {FAILED, CHECKPOINTS, POSTERIORS}
TIMED, TIMES, PATIENCE = 128, 5, 2.0  # examples whose prediction is timed, how often, and for how many seconds


@dataclass(frozen=True)
class Cell:
    """One training to do: names and every setting, nothing hidden."""

    task: str
    method: str
    seed: int
    task_settings: Mapping[str, Any]
    training: Mapping[str, Any]
    method_settings: Mapping[str, Any]

    @property
    def key(self) -> str:
        """A hash of the settings: cells of one key differ by seed only."""
        chosen = identity(METHODS[self.method], self.method_settings)
        facts = [self.task, self.method, self.task_settings, self.training, chosen]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def path(self) -> Path:
        """Where its result lies, below the results folder."""
        return Path(self.task.replace("/", "-")) / f"{self.method}-{self.key}" / f"seed{self.seed}.json"

    @property
    def folder(self) -> Path:
        """A folder name of its own, for its posterior."""
        return self.path.with_suffix("")

    @property
    def trained_in(self) -> Path:
        """A folder name for checkpoints, the same for cells whose settings differ after training only."""
        kind = METHODS[self.method]
        after = getattr(kind, "AFTER_TRAINING", ())
        if not after:
            return self.folder
        defaults = asdict(kind())
        common = {**self.method_settings, **{name: defaults[name] for name in after}}
        return replace(self, method_settings=common).folder

    def __str__(self) -> str:
        return f"{self.task} {self.method} seed {self.seed}"

    def build(self) -> tuple[Task, Training, Method]:
        """The objects its settings describe."""
        task = override(TASKS[self.task](), self.task_settings, self.task)
        training = Training(**self.training)
        return task, training, build_method(self.method, dict(self.method_settings))


@dataclass(frozen=True)
class Overrides:
    """Settings that differ from the defaults: for training, by task and by method."""

    training: Mapping[str, Any]
    tasks: Mapping[str, Mapping[str, Any]]
    methods: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, settings: Mapping[str, Mapping[str, Any]]) -> Overrides:
        """From {"training": {...}, "ensemble": {...}, "toy/m1": {...}, "toy/*": {"training": {...}, ...}}."""
        rest = dict(settings)
        training = rest.pop("training", {})
        methods = {name: rest.pop(name) for name in list(rest) if name in METHODS}
        tasks = {name: rest.pop(name) for name in list(rest) if any(fnmatchcase(task, name) for task in TASKS)}
        if rest:
            raise unknown_name("group of settings", next(iter(rest)), ["training", *METHODS, *TASKS])
        return cls(training, tasks, methods)


def expand(patterns: Sequence[str], known: Mapping[str, Any], kind: str) -> list[str]:
    """Names from names and patterns such as toy/*; an unknown one is an error with the nearest."""
    names: list[str] = []
    for pattern in patterns:
        found = [name for name in known if fnmatchcase(name, pattern)]
        if not found:
            raise unknown_name(kind, pattern, known)
        names += [name for name in found if name not in names]
    return names


@dataclass(frozen=True)
class Variant:
    """A method with settings of its own, on which tasks, and how many seeds it gets (None: as many as the others)."""

    method: str
    settings: Mapping[str, Any]
    seeds: int | None = None
    tasks: str = "*"


def variants(methods: Sequence[str | Mapping[str, Any]]) -> list[Variant]:
    """Methods from names, patterns and tables such as {"name": "vi", "temperature": [1.0, 0.1], "seeds": 1}.

    A list among the settings makes one variant per value, several lists their product.
    """
    found = []
    for entry in methods:
        table = {"name": entry} if isinstance(entry, str) else dict(entry)
        if "name" not in table:
            raise ValueError(f"methods must be names or tables with a name; got {table}.")
        names, seeds = expand([table.pop("name")], METHODS, "method"), table.pop("seeds", None)
        tasks = table.pop("tasks", "*")
        expand([tasks], TASKS, "task")
        if seeds is not None and (not isinstance(seeds, int) or seeds < 1):
            raise ValueError(f"methods: seeds of {names[0]} must be a whole number of at least 1; got {seeds!r}.")
        choices = [value if isinstance(value, list) else [value] for value in table.values()]
        for name in names:
            found += [
                Variant(name, dict(zip(table, values, strict=True)), seeds, tasks) for values in product(*choices)
            ]
    return found


def plan(
    tasks: Sequence[str],
    methods: Sequence[str | Mapping[str, Any]],
    seeds: Sequence[int],
    settings: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """All cells of a comparison, every setting checked before anything runs.

    {task} in a method's text settings stands for the last part of the task's name: "improved/{task}".
    """
    overrides = Overrides.of(settings or {})
    cells: dict[tuple[str, int], Cell] = {}
    for task_name in expand(tasks, TASKS, "task"):
        changes: dict[str, Any] = {}
        for pattern, values in overrides.tasks.items():
            if fnmatchcase(task_name, pattern):
                changes |= values
        own = changes.pop("training", {})  # training of this task alone
        task = override(TASKS[task_name](), changes, task_name)
        training = override(task.training, {**overrides.training, **own}, "training")
        for variant in [v for v in variants(methods) if fnmatchcase(task_name, v.tasks)]:
            chosen = {**overrides.methods.get(variant.method, {}), **variant.settings}
            short = task_name.rpartition("/")[2]
            chosen = {k: v.replace("{task}", short) if isinstance(v, str) else v for k, v in chosen.items()}
            method = override(METHODS[variant.method](), chosen, variant.method)
            for seed in seeds if variant.seeds is None else range(variant.seeds):
                parts = asdict(task), asdict(training), asdict(method)  # type: ignore[call-overload]
                cell = Cell(task_name, variant.method, seed, *parts)
                cells[cell.key, seed] = cell  # two entries may describe one cell
    return list(cells.values())


@dataclass(frozen=True)
class Options:
    """How cells run; nothing here changes a result."""

    results: Path
    workers: int = 1  # cells at once
    strategy: Strategy = "auto"  # of a cell's members; with "processes" a cell that runs alone has all workers
    keep_posteriors: bool = True
    checkpoint_seconds: float = 10.0


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    done: list[Path]
    failed: list[tuple[Cell, str]]
    skipped: int


def run(cells: Sequence[Cell], options: Options, reporter: Reporter | None = None) -> Outcome:
    """Run the cells that have no result yet; each result is safe on disk as soon as its cell ends."""
    reporter = reporter or Silent()
    missing = [cell for cell in cells if not (options.results / cell.path).exists()]
    waiting = Counter(cell.trained_in for cell in missing)
    done: list[Path] = []
    failed: list[tuple[Cell, str]] = []
    for cell, problem in _each(_in_order(missing), options, reporter):
        if problem is None:
            done.append(options.results / cell.path)
            waiting[cell.trained_in] -= 1
            if not waiting[cell.trained_in]:  # no other cell starts from this training
                shutil.rmtree(options.results / CHECKPOINTS / cell.trained_in, ignore_errors=True)
        else:
            failed.append((cell, problem))
        reporter.update("cells", len(done) + len(failed), len(missing), str(cell))
    return Outcome(done, failed, len(cells) - len(missing))


def _each(cells: list[Cell], options: Options, reporter: Reporter) -> Iterator[tuple[Cell, str | None]]:
    work = CellWork(options)
    if options.workers > 1 and len(cells) > 1:
        for i, answer in run_in_processes(work, cells, options.workers, reporter, keep_going=True):
            died = isinstance(answer, Failure)  # and could not write its error itself
            yield cells[i], work.failed(cells[i], answer.error) if died else answer
    else:
        for cell in cells:
            yield cell, work(cell, reporter)


def _in_order(cells: Sequence[Cell]) -> list[Cell]:
    """Long cells first, so that no worker is left with one at the end; of cells that share a training one first, so
    that two workers do not both do it."""
    before: Counter[Path] = Counter()
    places = []
    for cell in cells:
        places.append((-int(cell.method_settings.get("members", 1)), before[cell.trained_in]))
        before[cell.trained_in] += 1
    return [cell for _, cell in sorted(zip(places, cells, strict=True), key=lambda pair: pair[0])]


@dataclass(frozen=True)
class CellWork:
    """Does one cell and says what went wrong, if anything; an object so that worker processes can have it."""

    options: Options

    def __call__(self, cell: Cell, reporter: Reporter) -> str | None:
        """Run the cell and put its result, or its error, on disk."""
        try:
            result = run_cell(cell, self.options, _Named(reporter, str(cell)))
        except Exception as error:
            return self.failed(cell, error)
        write_json(self.options.results / cell.path, result)
        (self.options.results / FAILED / cell.path).unlink(missing_ok=True)
        return None

    def failed(self, cell: Cell, error: Exception) -> str:
        """Write the error of a cell aside, and say it in one line."""
        text = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        write_json(
            self.options.results / FAILED / cell.path,
            {**asdict(cell), "error": text, "traceback": trace, **provenance()},
        )
        return text


def run_cell(cell: Cell, options: Options, reporter: Reporter) -> dict[str, Any]:
    """Fit, predict, judge; raises when the truth is beaten."""
    task, training, method = cell.build()
    data = task.load()
    started = datetime.now(UTC)
    with PeakMemory() as memory:
        posterior = method.fit(
            Problem(
                model=task.model,
                likelihood=task.likelihood,
                data=data.train,
                validation=data.validation,
                training=training,
                seed=cell.seed,
                strategy=options.strategy,
                workers=options.workers if options.strategy == "processes" else None,
                checkpoint=options.results / CHECKPOINTS / cell.trained_in,
                checkpoint_seconds=options.checkpoint_seconds,
                reporter=reporter,
            )
        )
        evaluation = task.evaluate(posterior.predict, data)
    validation = _validation_score(posterior, data.validation)
    if len(posterior.theta) >= traces.LEAST * posterior.facts.get("chains", len(posterior.theta)):
        few = data.validation.take(slice(0, 20)).inputs
        evaluation.metrics.update(traces.summarise(traces.function_traces(posterior, few)))
        evaluation.figures["traces"] = traces.picture(posterior, few)
    if cell.seed == 0 and posterior.draws > 1 and families(posterior.model):  # of one seed: maps are large
        evaluation.figures["attention"] = picture(posterior.attention_maps(data.test.take(slice(0, 1)).inputs))
    if evaluation.gap is not None:
        evaluate.check_not_above(evaluation.gap, label=str(cell))
    if options.keep_posteriors:
        made_for = {"name": cell.task, "settings": dict(cell.task_settings)}
        kept = replace(posterior, facts={**posterior.facts, "task": made_for})
        kept.save(options.results / POSTERIORS / cell.folder)
    cost = {
        "fit_seconds": round(float(posterior.facts["seconds"]), 3),
        "predict_ms": round(_predict_ms(posterior, data.test), 4),
        "parameters": sum(t.numel() for t in posterior.weights.tensors().values()),
        "peak_mib": memory.mib,
    }
    return _result(cell, posterior, evaluation, validation, cost, started)


def _validation_score(posterior: Posterior, validation: Data) -> float:
    """Mean log-likelihood of the predictive on validation data: what settings are chosen by."""
    predictive = posterior.predict(validation.inputs)
    return evaluate.mean_log_likelihood(predictive, validation.targets, validation.mask)


def _predict_ms(posterior: Posterior, test: Data) -> float:
    """Milliseconds per example, in this process alone: the fastest of a few predictions of the same examples, after
    one that warms up. Other programs only ever add to a time."""
    few = test.take(slice(0, TIMED)).inputs
    return best_seconds(partial(posterior.predict, few), TIMES, PATIENCE) / len(first_tensor(few)) * 1e3


class _Named:
    """Puts the cell's name before what its training reports."""

    def __init__(self, reporter: Reporter, name: str) -> None:
        self.reporter, self.name = reporter, name

    def update(self, task: str, done: int, total: int, note: str = "") -> None:
        """Pass on."""
        self.reporter.update(f"{self.name}: {task}", done, total, note)


def _result(
    cell: Cell,
    posterior: Posterior,
    evaluation: Evaluation,
    validation: float,
    cost: dict[str, Any],
    started: datetime,
) -> dict[str, Any]:
    gap = evaluation.gap
    oracle = None
    if gap is not None:
        oracle = {"log_likelihood": evaluation.oracle, "gap": gap.mean, "gap_se": gap.standard_error}
    return {
        "task": cell.task,
        "task_description": describe(cell.task),
        "method": cell.method,
        "method_description": summary(METHODS[cell.method]),
        "variant": _variant(cell),
        "seed": cell.seed,
        "key": cell.key,
        "settings": {
            "task": dict(cell.task_settings),
            "training": dict(cell.training),
            "method": dict(cell.method_settings),
        },
        "started": started.isoformat(timespec="seconds"),
        **provenance(),
        "device": str(posterior.theta.device),
        "fit": {name: posterior.facts[name] for name in ("epochs", "best_epoch")},
        "validation": validation,
        "cost": cost,
        "primary": TASKS[cell.task]().primary,
        "metrics": evaluation.metrics,
        "oracle": oracle,
        "figures": evaluation.figures,
    }


def _variant(cell: Cell) -> str:
    """The method's settings that differ from its defaults."""
    defaults = asdict(METHODS[cell.method]())
    changed = {k: v for k, v in cell.method_settings.items() if v != defaults[k]}
    return ", ".join(f"{name}={value}" for name, value in changed.items())


def provenance() -> dict[str, Any]:
    """Commit, versions and machine: what made this number."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("bayesformer", "numpy", "scikit-learn"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    commit = _git("rev-parse", "--short=10", "HEAD")
    return {
        "commit": commit,
        "dirty": bool(commit and _git("status", "--porcelain", "--untracked-files=no")),
        "versions": versions,
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
    }


def _git(*arguments: str) -> str | None:
    """What git says of this package's own checkout, if it is one."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists() or shutil.which("git") is None:
        return None
    answer = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None


def load_results(folder: Path) -> list[dict[str, Any]]:
    """All results below a folder, in a fixed order; a damaged one is an error naming its file."""
    if not folder.is_dir():
        raise FileNotFoundError(f"results folder {folder} does not exist.")
    results = []
    for path in sorted(folder.rglob("seed*.json")):
        if ASIDE & set(path.relative_to(folder).parts):
            continue
        result = read_json(path, "result")
        lacking = {"task", "method", "seed", "metrics", "cost"} - result.keys()
        if lacking:
            raise DamagedFileError(f"result {path} lacks {', '.join(sorted(lacking))}.")
        results.append(result)
    return results
