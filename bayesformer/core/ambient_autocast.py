"""The library's own precision: a caller's torch.autocast does not reach what is computed here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

DEVICES = ("cpu", "cuda", "xpu", "mps")
P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger("bayesformer")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """The function, run outside the caller's torch.autocast; of a generator every step is.

    Half precision in sums over all data, in solves and in variances gives wrong posteriors, not only rounded ones.
    Training(precision="bf16") is the way to have forward passes in bfloat16 and the rest in float32.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _autocast_off():
            found = function(*args, **kwargs)
        return _each_step(found) if isinstance(found, Generator) else found  # type: ignore[return-value]

    return run


@contextmanager
def _autocast_off() -> Iterator[None]:
    active = [device for device in DEVICES if torch.is_autocast_enabled(device)]
    if active:
        log.info("torch.autocast does not reach this call; Training(precision='bf16') trains in bfloat16.")
    with ExitStack() as stack:
        for device in active:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _each_step(steps: Generator[Any, None, None]) -> Iterator[Any]:
    """The items of a generator; between them the caller's own code runs under his autocast."""
    with closing(steps):
        while True:
            with _autocast_off():
                try:
                    item = next(steps)
                except StopIteration:
                    return
            yield item
