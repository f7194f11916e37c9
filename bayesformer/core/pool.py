"""Objects that one thread may use at a time, lent to any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")

IDLE = 4  # objects kept for the next who asks; further ones are made anew


class Pool(Generic[T]):
    """Makes objects on demand and keeps a few that are idle. Nobody waits: every borrower has an object of its own."""

    def __init__(self, make: Callable[[], T]) -> None:
        self.make = make
        self.idle: list[T] = []  # append and pop of a list are atomic

    @contextmanager
    def borrow(self) -> Iterator[T]:
        """An object that no other thread has; it comes back at the end, unless an error left it in doubt."""
        try:
            one = self.idle.pop()
        except IndexError:
            one = self.make()
        yield one
        if len(self.idle) < IDLE:
            self.idle.append(one)

    def clear(self) -> None:
        """Let go of everything that is idle; what is lent is kept when it comes back."""
        self.idle.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool[T]:
        return Pool(self.make)
