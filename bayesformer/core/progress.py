"""Progress of long work, shown on a terminal, sent to a parent process, or kept silent."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class Reporter(Protocol):
    """Where work says how far it is. One call per unit of work; cheap enough for every step."""

    def update(self, task: str, done: int, total: int, note: str = "") -> None:
        """`done` of `total` units of `task`; done == total ends it."""
        ...


class Silent:
    """A reporter that shows nothing."""

    def update(self, task: str, done: int, total: int, note: str = "") -> None:
        """Takes the news and does nothing with it."""


class Queued:
    """Sends what it hears through a queue, at most every `interval` seconds per task."""

    def __init__(self, queue: Any, interval: float = 0.2) -> None:
        self.queue, self.interval = queue, interval
        self.last: dict[str, float] = {}

    def update(self, task: str, done: int, total: int, note: str = "") -> None:
        """Puts the news on the queue that the parent reads."""
        now = time.monotonic()
        if done < total and now - self.last.get(task, 0.0) < self.interval:
            return
        self.last[task] = now
        self.queue.put((task, done, total, note))


class Bars:
    """One rich progress bar per task on standard error."""

    def __init__(self, progress: Any) -> None:
        self.progress = progress
        self.ids: dict[str, Any] = {}
        self.last: dict[str, float] = {}

    def update(self, task: str, done: int, total: int, note: str = "") -> None:
        """Move, add or remove the bar of `task`."""
        now = time.monotonic()
        if done >= total:
            if task in self.ids:
                self.progress.remove_task(self.ids.pop(task))
            return
        if task in self.ids and now - self.last[task] < 0.1:
            return
        self.last[task] = now
        if task not in self.ids:
            self.ids[task] = self.progress.add_task(task, total=total, note=note)
        self.progress.update(self.ids[task], completed=done, note=note)


class Lines:
    """A line of text for every finished unit of the tasks named; for logs, where bars would be noise."""

    def __init__(self, tasks: Sequence[str]) -> None:
        self.tasks = tasks

    def update(self, task: str, done: int, total: int, note: str = "") -> None:
        """Print, if this task is followed."""
        if task in self.tasks:
            print(f"[{done}/{total}] {note}", file=sys.stderr, flush=True)


@contextmanager
def bars(show: bool | None = None, lines: Sequence[str] = ()) -> Iterator[Reporter]:
    """Progress bars while the block runs: by default on a terminal only, and elsewhere lines of some tasks."""
    if not (sys.stderr.isatty() if show is None else show):
        yield Silent() if show is False or not lines else Lines(lines)
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(bar_width=24),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("[dim]{task.fields[note]}"),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True)) as progress:
        yield Bars(progress)
