"""Shells for any number of threads: each thread borrows one of its own and gives it back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bayesformer.model.shell import Shell
from bayesformer.model.skeleton import Skeleton


class ShellPool:
    """Makes shells of one skeleton when they are asked for and keeps up to `keep` idle ones for the next asker.

    `prepare` is called once with every new shell, for instance to set its mode. Weights and buffers are as the last
    borrower left them: load both after borrowing.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        gradients: bool = False,
        keep: int = 2,
        prepare: Callable[[Shell], object] | None = None,
    ) -> None:
        if keep < 0:
            raise ValueError(f"keep must be at least 0; got {keep}.")
        self.skeleton, self.gradients, self.keep, self.prepare = skeleton, gradients, keep, prepare
        self._idle = list[Shell]()
        self._lock = threading.Lock()  # around the list only, never while a shell is made or runs

    @contextmanager
    def borrow(self) -> Iterator[Shell]:
        """A shell for this thread alone; one whose borrower failed is thrown away."""
        with self._lock:
            shell = self._idle.pop() if self._idle else None
        if shell is None:
            shell = self.skeleton.shell(self.gradients)
            if self.prepare is not None:
                self.prepare(shell)
        yield shell
        with self._lock:
            if len(self._idle) < self.keep:
                self._idle.append(shell)

    def __reduce__(self) -> Any:
        return ShellPool, (self.skeleton, self.gradients, self.keep, self.prepare)
