"""The time that a piece of work takes, among other programs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch


def best_seconds(work: Callable[[], object], times: int, patience: float) -> float:
    """The shortest time of some runs after one that warms up: other programs only ever add to a time.

    At most `times` runs, and no further one after `patience` seconds.
    """
    on_gpu = torch.cuda.is_available()
    clock = time.process_time if torch.get_num_threads() == 1 and not on_gpu else time.perf_counter
    work()
    best, began = math.inf, clock()
    for _ in range(times):
        start = clock()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, clock() - start)
        if clock() - began > patience:
            break
    return best
