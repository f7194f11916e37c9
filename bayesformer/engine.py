"""One engine for many members: ensemble members, chains and posterior draws.

A `MemberTask` knows how to do its work for one member and for several at once; the engine runs it batched
(one vmapped pass), looped, or spread over worker processes. The three give the same result for the same
seeds, so which one runs is a question of speed alone, and the answer is measured on the device at hand: on
one CPU thread batching often loses (it leaves the cache), on a GPU and for very small batches it wins.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesformer.core.errors import unknown_name
from bayesformer.core.progress import Queued, Reporter, Silent
from bayesformer.core.types import Params

Strategy: TypeAlias = Literal["auto", "looped", "batched", "processes"]
STRATEGIES = ("auto", "looped", "batched", "processes")

WORKER_START_SECONDS = 5.0  # a fresh interpreter importing torch
TRIALS = 5
MARGIN = 1.1  # leave the loop only for a gain that is more than noise
CHUNK = 10  # members per vmapped pass: more leave the cache, fewer do not fill a device

_in_worker = False  # set in worker processes, which never start workers of their own
_reporter: Reporter = Silent()
_work: Callable[..., Any] = print


class MemberTask(Protocol):
    """Work that is done once per member."""

    def single(self, member: int, reporter: Reporter) -> Params:
        """The result for one member."""
        ...

    def batched(self, members: Sequence[int], reporter: Reporter) -> Params:
        """The results for several, with the member axis in front of every tensor."""
        ...

    def trial(self, members: Sequence[int]) -> Callable[[], object]:
        """A small, repeatable piece of the work, for timing."""
        ...

    @property
    def units(self) -> int:
        """How many trials make up the work of one member."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the work happens."""
        ...

    @property
    def signature(self) -> str:
        """Tasks with equal signatures cost the same: one calibration serves them."""
        ...

    def why_not_batched(self) -> str | None:
        """The reason this task cannot be batched, or None if it can."""
        ...


@dataclass(frozen=True)
class Calibration:
    """Estimated seconds of each strategy, and the fastest."""

    seconds: dict[str, float]

    @property
    def best(self) -> str:
        """The strategy with the least estimated time."""
        return min(self.seconds, key=lambda name: self.seconds[name])


_calibrations: dict[tuple[str, int, int], Calibration] = {}
_obstacles: dict[str, str | None] = {}


def run_members(
    task: MemberTask,
    members: Sequence[int],
    strategy: Strategy = "auto",
    workers: int | None = None,
    reporter: Reporter | None = None,
) -> Params:
    """The task's results for all members, stacked in their order."""
    if strategy not in STRATEGIES:
        raise unknown_name("strategy", strategy, STRATEGIES)
    if not members:
        raise ValueError("members must hold at least one member; got none.")
    reporter = reporter or Silent()
    workers = 1 if _in_worker else cores() if workers is None else workers
    chosen = strategy if strategy != "auto" else choose(task, members, workers)
    if chosen == "batched":
        reason = obstacle(task)
        if reason:
            raise ValueError(f"strategy 'batched' is not possible here: {reason}. Use 'looped' or 'processes'.")
        size = chunk_of(task)
        parts = [task.batched(members[i : i + size], reporter) for i in range(0, len(members), size)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if chosen == "processes":
        found = dict(run_in_processes(task.single, members, workers, reporter))
        results = [found[i] for i in range(len(members))]
    else:
        results = [task.single(member, reporter) for member in members]
    return {name: torch.stack([result[name] for result in results]) for name in results[0]}


def chunk_of(task: MemberTask) -> int:
    """Members per batched pass: the task's own `chunk` if it has one."""
    return getattr(task, "chunk", None) or CHUNK


def obstacle(task: MemberTask) -> str | None:
    """Why the task cannot be batched, or None; asked once per kind of task."""
    if task.signature not in _obstacles:
        _obstacles[task.signature] = task.why_not_batched()
    return _obstacles[task.signature]


def choose(task: MemberTask, members: Sequence[int], workers: int) -> str:
    """The strategy to use: measured once per kind of task, the loop where there is nothing to gain."""
    if len(members) == 1:
        return "looped"
    key = (task.signature, len(members), workers)
    if key not in _calibrations:
        _calibrations[key] = calibrate(task, members, workers)
    return _calibrations[key].best


def calibrate(task: MemberTask, members: Sequence[int], workers: int) -> Calibration:
    """Time one unit of work for one member and for a chunk, and extrapolate."""
    chunk = members[: chunk_of(task)]
    trials = {"looped": task.trial(members[:1])}
    if obstacle(task) is None:
        trials["batched"] = task.trial(chunk)
    best = best_seconds(trials)
    one = best["looped"] * task.units
    seconds = {"looped": one * len(members)}
    if task.device.type == "cpu" and workers > 1 and not _in_worker and _portable(task):
        seconds["processes"] = WORKER_START_SECONDS + MARGIN * one * -(-len(members) // workers)
    if "batched" in best:
        seconds["batched"] = MARGIN * best["batched"] * task.units * len(members) / len(chunk)
    return Calibration(seconds)


def best_seconds(
    trials: Mapping[str, Callable[[], object]], times: int = TRIALS, patience: float = math.inf
) -> dict[str, float]:
    """The shortest time of each trial over interleaved rounds: other programs only ever add to a time.

    At most `times` rounds, and no further one after `patience` seconds.
    """
    on_gpu = torch.cuda.is_available()
    clock = time.process_time if torch.get_num_threads() == 1 and not on_gpu else time.perf_counter
    seconds, began = dict.fromkeys(trials, math.inf), clock()
    for turn in range(1 + times):
        for name, trial in trials.items():
            start = clock()
            trial()
            if on_gpu:
                torch.cuda.synchronize()
            if turn:  # the first turn warms up
                seconds[name] = min(seconds[name], clock() - start)
        if turn and clock() - began > patience:
            break
    return seconds


def _portable(task: MemberTask) -> bool:
    try:
        to_bytes(task.single)
    except ValueError:
        return False
    return True


def cores() -> int:
    """Processors this process may use; 1 inside a worker."""
    return (
        1 if _in_worker else len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )


def run_in_processes(
    fn: Callable[..., Any], arguments: Sequence[Any], workers: int, reporter: Reporter | None = None
) -> Iterator[tuple[int, Any]]:
    """`(i, fn(arguments[i], reporter))` as each ends, from worker processes of one torch thread each."""
    with worker_pool(fn, min(workers, len(arguments)), reporter or Silent()) as pool:
        futures = {pool.submit(_in_the_worker, argument): i for i, argument in enumerate(arguments)}
        try:
            for future in as_completed(futures):
                yield futures[future], tree_map(_from_numpy, future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def worker_pool(fn: Callable[..., Any], workers: int, reporter: Reporter) -> Iterator[ProcessPoolExecutor]:
    """Spawned workers that know `fn`, whose progress reaches `reporter`."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(queue, reporter), daemon=True)
    listener.start()
    try:
        with ProcessPoolExecutor(workers, context, _start_worker, (to_bytes(fn), queue)) as pool:
            yield pool
    finally:
        queue.put(None)
        listener.join()


def to_bytes(fn: Callable[..., Any]) -> bytes:
    """What a worker needs to call `fn`. Bytes in memory only, never a file.

    Not torch's own sharing, which opens one file descriptor per tensor and runs out of them.
    """
    try:
        return pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            "strategy 'processes' needs a model, or a function that builds it, which a new process can import: "
            f"a function at the top of a module, not a lambda or a nested one ({error})."
        ) from error


def _listen(queue: Any, reporter: Reporter) -> None:
    while (news := queue.get()) is not None:
        reporter.update(*news)


def _start_worker(fn: bytes, queue: Any) -> None:
    global _in_worker, _reporter, _work
    torch.set_num_threads(1)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _in_worker, _reporter, _work = True, Queued(queue), pickle.loads(fn)


def _leave_with_parent() -> None:
    """End this worker when its parent is gone, even by a kill: nobody would collect its work."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _in_the_worker(argument: Any) -> Any:
    return tree_map(_to_numpy, _work(argument, _reporter))


def _to_numpy(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def _from_numpy(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
