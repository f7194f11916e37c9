"""Cells in worker processes, each to an answer or an error of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bayesformer.core.progress import Reporter
from bayesformer.core.workers import Failure, run_in_processes

Work = Callable[[Any, Reporter], Any]


def in_processes(
    work: Work, cells: Sequence[Any], workers: int, reporter: Reporter
) -> Iterator[tuple[int, Any | Exception]]:
    """Yield `(i, work(cells[i], reporter))` as each ends, or `(i, error)` if its worker died; Ctrl-C ends them all."""
    for i, answer in run_in_processes(work, cells, workers, reporter, keep_going=True):
        yield i, answer.error if isinstance(answer, Failure) else answer
