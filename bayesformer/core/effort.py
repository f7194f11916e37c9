"""Gradients counted: how many examples' gradients some work took, whoever asked for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Effort:
    """A counter of examples whose gradient was evaluated; divided by N it is epochs of gradient evaluations."""

    def __init__(self) -> None:
        self.examples = 0


_counters: ContextVar[tuple[Effort, ...]] = ContextVar("counters of gradients", default=())


@contextmanager
def counting() -> Iterator[Effort]:
    """A counter of what is evaluated inside the block, in this thread and process."""
    effort = Effort()
    token = _counters.set((*_counters.get(), effort))
    try:
        yield effort
    finally:
        _counters.reset(token)


def note(examples: int) -> None:
    """Add the gradients of so many examples to every counter that is open."""
    for effort in _counters.get():
        effort.examples += examples
