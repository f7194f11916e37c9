"""How long cells will take, from a few steps of each kind of them.

A cell is fitted to two and to eight batches of its data for one epoch, and asked about a few inputs. The differences
are the time of a batch and of an input, without what happens once; multiplied by what the cell really sees they are its
forecast. Times are those of the processor, so that other programs do not count. Networks that are kept are not counted:
ensembles train them, and all others start from them. Kinds of cells are told apart by what their time depends on, so
that one measurement serves many settings and seeds.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bayesformer.bench.planning import Cell
from bayesformer.bench.tasks import TASKS, TaskData
from bayesformer.core.progress import Reporter, Silent
from bayesformer.core.storage import read_json, write_json
from bayesformer.data import Data, as_batches
from bayesformer.data.inputs import first_tensor
from bayesformer.methods import Problem
from bayesformer.train.problem import Models
from bayesformer.train.training import steps_per_epoch

FEW, MORE = 2, 8  # batches
ASKED, MANY = 16, 80  # inputs
CALM = 1e-8
STRENGTHS = (
    "temperature", "prior", "prior_scale", "prior_location", "prior_precision", "prior_sd", "spread", "lengthscale",
    "lr", "friction", "rate", "divergence", "rho",
)  # fmt: skip
"""Settings that change what is found, hardly how long it takes."""


@dataclass(frozen=True)
class CellPace:
    """Seconds of one batch of training and of one input of prediction."""

    batch: float
    input: float


def kind_of(cell: Cell) -> str:
    """What the time of a cell depends on, as text; the five series are one kind."""
    task = cell.task.split("/")[0]
    settings = {k: v for k, v in cell.method_settings.items() if k not in STRENGTHS}
    settings["contextual"] = cell.method_settings.get("prior") == "contextual"
    size = cell.training["batch_size"]
    return json.dumps([task, cell.method, settings, size, cell.start is not None], sort_keys=True)


def measure(cell: Cell) -> CellPace:
    """Fit a cell to little data, twice, and ask it about few inputs, twice."""
    task, training, method = cell.build()
    method, data = calm(method), task.load()
    size, epochs = training.batch_size, least_epochs(method)

    def fitted(batches: int) -> tuple[float, Any]:
        train = data.train.subset(slice(0, batches * size))
        share = max(2, len(data.validation) * len(train) // len(data.train)) if data.validation is not None else 0
        held = None if data.validation is None else as_batches(data.validation.subset(slice(0, share)), "validation")
        model: Any = task.model if cell.start is None else Models((task.model(),))
        problem = Problem(
            model, task.likelihood, as_batches(train, "train"), held, replace(training, epochs=epochs), seed=cell.seed
        )
        started = time.process_time()
        fit = getattr(method, "fit_trained", method.fit) if cell.start is not None else method.fit
        posterior = fit(problem)
        return time.process_time() - started, posterior

    fitted(1)  # warms up
    (few, _), (more, posterior) = fitted(FEW), fitted(MORE)

    def asked(count: int) -> float:
        inputs = data.test.take(slice(0, count)).inputs
        posterior.predict(inputs)
        started = time.process_time()
        posterior.predict(inputs)
        return time.process_time() - started

    least = min(ASKED, len(data.test) // 2)
    most = min(MANY, len(data.test))
    batch = max(more - few, 0.0) / (MORE - FEW) / epochs
    return CellPace(batch, max(asked(most) - asked(least), 0.0) / (most - least))


def calm(method: Any) -> Any:
    """The method with a step size that cannot diverge, as a chain's would that starts from an untrained network."""
    return replace(method, lr=CALM) if isinstance(getattr(method, "lr", None), float) else method


def least_epochs(method: object) -> int:
    """Epochs of one batch after which a method has what it keeps along its way, draws or snapshots."""
    kept = getattr(method, "draws", 1) if hasattr(method, "burn_in") else getattr(method, "every", 0)
    return 3 * kept if isinstance(kept, int) and kept > 1 else 1


def inputs_asked(data: TaskData) -> int:
    """Inputs that a cell predicts in all: validation data, test data and outsiders."""
    outsiders = sum(len(first_tensor(inputs)) for inputs in data.probes.values())
    return outsiders + len(data.test) + (0 if data.validation is None else len(data.validation))


class Forecaster:
    """Seconds of cells, measured once per kind and kept in a file of this machine."""

    def __init__(self, path: Path | None = None, reporter: Reporter | None = None, kept: bool = True) -> None:
        self.path, self.reporter = path, reporter or Silent()
        self.kept = kept  # whether an ensemble trains the networks of the MLE
        known = read_json(path, "measured times") if path is not None and path.exists() else {}
        self.paces = {kind: CellPace(**values) for kind, values in known.items()}
        self.sizes: dict[str, tuple[int, int]] = {}

    def learn(self, cells: Mapping[str, Cell]) -> None:
        """Measure the kinds that are not known yet, by one cell each."""
        unknown = {kind: cell for kind, cell in cells.items() if kind not in self.paces}
        for i, (kind, cell) in enumerate(unknown.items()):
            self.reporter.update("measuring", i + 1, len(unknown), str(cell))
            self.paces[kind] = measure(cell)
            if self.path is not None:
                write_json(self.path, {kind: vars(pace) for kind, pace in self.paces.items()})

    def seconds(self, cell: Cell) -> float:
        """The forecast of one cell, measured first if need be."""
        kind = kind_of(cell)
        self.learn({kind: cell})
        pace, (examples, asked) = self.paces[kind], self.size(cell)
        epochs = 1 if is_trained(cell) else cell.training["epochs"]
        batches = epochs * steps_per_epoch(examples, cell.training["batch_size"])
        if cell.method == "mle" and self.kept:  # its network is the ensemble's first, unless it trains for longer
            batches *= cell.training["epochs"] != TASKS[cell.task]().training.epochs
        return pace.batch * batches + pace.input * asked

    def size(self, cell: Cell) -> tuple[int, int]:
        """Training examples of a cell, and inputs that it predicts."""
        place = json.dumps([cell.task, dict(cell.task_settings)], sort_keys=True)
        if place not in self.sizes:
            data = cell.build()[0].load()
            assert isinstance(data.train, Data)
            self.sizes[place] = len(data.train), inputs_asked(data)
        return self.sizes[place]


def forecast_of(cells: Sequence[Cell], forecaster: Forecaster) -> str:
    """Markdown: seconds of an epoch and of all predictions of every kind of cell, and the hours of all cells.

    Of cells that share a training it counts once.
    """
    rows = ["| method | settings | an epoch, s | prediction, s | cells |", "|---|---|---|---|---|"]
    total, trained, kinds = 0.0, set(), Counter(kind_of(cell) for cell in cells)
    shown = set()
    for cell in cells:
        whole = forecaster.seconds(cell)
        pace, (examples, asked) = forecaster.paces[kind_of(cell)], forecaster.size(cell)
        total += pace.input * asked if cell.trained_in in trained else whole
        trained.add(cell.trained_in)
        if kind_of(cell) not in shown:
            epoch = pace.batch * steps_per_epoch(examples, cell.training["batch_size"])
            told = cell.variant.replace("|", "/")
            number = kinds[kind_of(cell)]
            rows.append(f"| {cell.method} | {told} | {epoch:.1f} | {pace.input * asked:.1f} | {number} |")
        shown.add(kind_of(cell))
    return "\n".join([*rows, "", f"{len(cells)} cells, {total / 3600:.1f} core-hours."])


def is_trained(cell: Cell) -> bool:
    """Whether the cell only looks at its data once, around a network that is trained already."""
    return cell.start is not None and hasattr(type(cell.build()[2]), "fit_trained")
