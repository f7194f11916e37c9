"""The global random streams of torch, numpy and Python: seeded for code that draws from them alone, and restored.

Random augmentation, functions that build models and some models accept no generator, so running them repeatably means
setting these streams. One lock is held meanwhile: two trainings in one process never see each other's seeds.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

_T = TypeVar("_T")

GLOBAL_STREAMS = threading.RLock()
"""Held by whoever seeds the global streams of torch, numpy and `random`, or reads them to put them back."""


class RandomStates(NamedTuple):
    """Where the three global streams stand."""

    torch: Tensor
    numpy: dict[str, Any]
    python: tuple[Any, ...]

    def same(self, other: RandomStates) -> bool:
        """Whether no number was drawn between the two states."""
        return self.python == other.python and torch.equal(self.torch, other.torch) and _equal(self.numpy, other.numpy)


def get_states() -> RandomStates:
    """The present states of the three streams."""
    # numpy's legacy functions are the global stream; there is no other door to it
    return RandomStates(torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate())  # noqa: NPY002


def set_states(states: RandomStates) -> None:
    """Put the three streams where they were."""
    torch.set_rng_state(states.torch)
    _set_python_states(states)


def _set_python_states(states: RandomStates) -> None:
    np.random.set_state(states.numpy)  # noqa: NPY002
    random.setstate(states.python)


def seed_states(seed: int) -> None:
    """Start the three streams from a 63-bit seed."""
    torch.default_generator.manual_seed(seed)
    _seed_python(seed)


def _seed_python(seed: int) -> None:
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's global stream as torch.manual_seed does; skips its lazy CUDA seeding if there is no accelerator."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # torch.manual_seed spends .7 ms on preparing seeds for CUDA, XPU and others
        torch.default_generator.manual_seed(seed)


@contextmanager
def global_streams(seed: int, torch_too: bool = True) -> Iterator[None]:
    """The global streams of numpy, `random` and (`torch_too`) torch seeded, and restored afterwards.

    A lock of the process is held, so that threads of this library wait for each other. A user's own thread that
    draws from a global stream meanwhile disturbs the numbers that are drawn here.
    """
    with GLOBAL_STREAMS, torch.random.fork_rng(enabled=torch_too):  # those of accelerators, too
        before = get_states()
        try:
            _seed_python(seed)
            if torch_too:
                seed_torch(seed)
            yield
        finally:
            _set_python_states(before)


@contextmanager
def borrowed() -> Iterator[RandomStates]:
    """Hold the lock, yield the present states, and restore them at the end if they were moved."""
    with GLOBAL_STREAMS:
        before = get_states()
        try:
            yield before
        finally:
            if not before.same(get_states()):
                set_states(before)


class PrivateStream:
    """Global streams of one's own: calls made through it continue them, and the caller's are untouched."""

    def __init__(self, seed: int) -> None:
        with borrowed():
            seed_states(seed)
            self._states = get_states()

    def __call__(self, fn: Callable[[], _T]) -> _T:
        """The result of `fn()`, run with the global streams set to these ones."""
        with borrowed():
            set_states(self._states)
            try:
                return fn()
            finally:
                self._states = get_states()


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping):
        return all(_equal(a[key], b[key]) for key in a)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)
