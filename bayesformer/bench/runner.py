"""The runner: does the cells (task, method, seed) that have no result yet.

It names no task and no method. A result is one JSON line in a file of its own, written whole when the cell is done; a
cell that was killed resumes from its checkpoint; a cell that failed is written aside with its error and does not stop
the others. `planning` makes the cells, `trial` does one, `pool` spreads them over processes, `records` reads results.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bayesformer.bench.cell_workers import in_processes
from bayesformer.bench.planning import Cell
from bayesformer.bench.provenance import provenance
from bayesformer.bench.records import CHECKPOINTS, FAILED, read_results
from bayesformer.bench.trial import Options, run_cell
from bayesformer.core.progress import Reporter, Silent
from bayesformer.core.storage import write_json

NOT_BEGUN = "not begun"
"""What a cell answers whose turn came after the deadline."""


@dataclass(frozen=True)
class Outcome:
    """What became of a run: files of new results, cells that failed with their errors, how many were there, and how
    many were not begun since their turn came after the deadline."""

    done: list[Path]
    failed: list[tuple[Cell, str]]
    skipped: int
    left: int = 0


def missing_cells(cells: Sequence[Cell], folder: Path) -> list[Cell]:
    """The cells without a result in the folder, in either form; a result that cannot be read counts as missing."""
    done = read_results(folder).paths if folder.is_dir() else set()
    return [cell for cell in cells if folder / cell.path not in done]


def check_writable(folder: Path) -> None:
    """Make the folder and see that a file can be written there, before anything is trained."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"results folder {folder} must be a folder one can write to: {error.strerror}.") from error


def run(
    cells: Sequence[Cell],
    options: Options,
    reporter: Reporter | None = None,
    on_end: Callable[[Cell], None] | None = None,
) -> Outcome:
    """Train and evaluate the cells that have no result in `options.results`, and write each result when its cell ends.

    A cell is one task, method and seed. One that fails is recorded in the outcome and does not stop the others.
    Checkpoints are deleted when no cell needs them any more. `on_end` is called after each cell, failed or not, before
    `reporter`.
    """
    reporter = reporter or Silent()
    check_writable(options.results)
    missing = missing_cells(cells, options.results)
    waiting = Counter(cell.trained_in for cell in missing)
    done: list[Path] = []
    failed: list[tuple[Cell, str]] = []
    left = 0
    for cell, problem in _each(in_order(missing), options, reporter):
        if problem == NOT_BEGUN:
            left += 1
            continue
        if on_end is not None:
            on_end(cell)
        if problem is None:
            done.append(options.results / cell.path)
            waiting[cell.trained_in] -= 1
            if not waiting[cell.trained_in]:  # no other cell starts from this training
                shutil.rmtree(options.results / CHECKPOINTS / cell.trained_in, ignore_errors=True)
        else:
            failed.append((cell, problem))
        reporter.update("cells", len(done) + len(failed), len(missing), str(cell))
    return Outcome(done, failed, len(cells) - len(missing), left)


def _each(cells: list[Cell], options: Options, reporter: Reporter) -> Iterator[tuple[Cell, str | None]]:
    work = CellWork(options)
    if options.workers > 1 and len(cells) > 1:
        for i, answer in in_processes(work, cells, options.workers, reporter):
            # A worker that died could not write the error itself.
            yield cells[i], work.failed(cells[i], answer) if isinstance(answer, Exception) else answer
    else:
        for cell in cells:
            yield cell, work(cell, reporter)


def in_order(cells: Sequence[Cell]) -> list[Cell]:
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
    """Does one cell and returns what went wrong, if anything; an object so that worker processes can have it."""

    options: Options

    def __call__(self, cell: Cell, reporter: Reporter) -> str | None:
        """Run the cell and write its result, or its error; returns the error in one line, or None."""
        if self.options.deadline is not None and time.time() > self.options.deadline:
            return NOT_BEGUN
        try:
            result = run_cell(cell, self.options, _Named(reporter, str(cell)))
            write_json(self.options.results / cell.path, result)
        except Exception as error:
            return self.failed(cell, error)
        (self.options.results / FAILED / cell.path).unlink(missing_ok=True)
        return None

    def failed(self, cell: Cell, error: Exception) -> str:
        """Write the error of a cell to the folder of failures, and return it in one line."""
        text = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        aside = {**asdict(cell), "error": text, "traceback": trace, **provenance()}
        try:
            write_json(self.options.results / FAILED / cell.path, aside)
        except OSError as full:  # the disk, which may be why the cell failed; its checkpoint is there
            text += f" (its error could not be written to a file: {full.strerror})"
        return text


class _Named:
    """Puts the cell's name before what its training reports."""

    def __init__(self, reporter: Reporter, name: str) -> None:
        self.reporter, self.name = reporter, name

    def update(self, task: str, done: int, total: int, note: str = "") -> None:
        """Report with the cell's name in front of the task's."""
        self.reporter.update(f"{self.name}: {task}", done, total, note)
