"""Cells in worker processes, each to an answer or an error of its own: the one place that knows which pool does it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, NoReturn

from bayesformer.engine import run_in_processes
from bayesformer.progress import Reporter

Work = Callable[[Any, Reporter], Any]
BEGUN = "begun"
"""Task name of the report that a worker has taken up a cell."""


def in_processes(
    work: Work, cells: Sequence[Any], workers: int, reporter: Reporter
) -> Iterator[tuple[int, Any | Exception]]:
    """Yield `(i, work(cells[i], reporter))` as each ends, or `(i, error)` if its worker died.

    A dead worker takes the others of its pool with it, so every cell that was being worked on is done once more, alone:
    one that kills its worker again has failed, the others go on. Ctrl-C ends all workers at once.
    """
    waiting = list(range(len(cells)))
    while waiting:
        listener = _Listener(reporter)
        order, done = list(waiting), set()
        try:
            tasks = [(i, cells[i]) for i in order]
            for place, answer in run_in_processes(_Announced(work), tasks, workers, listener):
                done.add(order[place])
                yield order[place], answer
        except BrokenProcessPool:
            suspects = [i for i in order if i in listener.begun and i not in done]
            for i in suspects or [i for i in order if i not in done]:  # none: a worker dies before its first cell
                yield i, _alone(work, cells[i], reporter)
                done.add(i)
        waiting = [i for i in waiting if i not in done]


def _alone(work: Work, cell: Any, reporter: Reporter) -> Any | Exception:
    try:
        return dict(run_in_processes(_Announced(work), [(0, cell)], 1, reporter))[0]
    except BrokenProcessPool:
        return RuntimeError("its worker process died: killed, or out of memory.")


@dataclass(frozen=True)
class _Announced:
    """Work that says which cell it takes up, and whose process ends at Ctrl-C instead of taking up the next one."""

    work: Work

    def __call__(self, task: tuple[int, Any], reporter: Reporter) -> Any:
        number, cell = task
        reporter.update(f"{BEGUN} {number}", 0, 1)
        try:
            return self.work(cell, reporter)
        except KeyboardInterrupt:
            _leave()


def _leave() -> NoReturn:
    os._exit(130)


class _Listener:
    """Keeps the numbers of cells that have begun, and passes on every other report."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter, self.begun = reporter, set[int]()

    def update(self, task: str, done: int, total: int, note: str = "") -> None:
        """Take a report of a worker: note a cell that has begun, or pass the report on."""
        if task.startswith(f"{BEGUN} "):
            self.begun.add(int(task.removeprefix(f"{BEGUN} ")))
        else:
            self.reporter.update(task, done, total, note)
