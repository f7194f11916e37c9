"""How many members run: one after the other, several in one vmapped pass, or spread over worker processes.

Members are those of an ensemble, chains, or draws of a posterior. Which way is taken follows from the problem and the
device, never from a measured time, so that equal seeds give equal results. A worker has one torch thread: results in
processes equal those of a loop on one thread bit for bit. A loop on more threads, and a vmapped pass, add up in another
order, and differ by about 1e-7 of a value per pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bayesformer.core.errors import unknown_name
from bayesformer.core.progress import Reporter, Silent
from bayesformer.core.serving import in_worker
from bayesformer.core.workers import Workers, check_workers, cores, run_in_processes

Strategy: TypeAlias = Literal["auto", "looped", "batched", "processes"]
Chosen: TypeAlias = Literal["looped", "batched", "processes"]
STRATEGIES = ("auto", "looped", "batched", "processes")

CHUNK = 10  # members per vmapped pass: more leave the cache, fewer do not fill a device

# Limits of the vmapped pass on a CPU. Measured on one thread (2 MiB of L2, 32 MiB of L3) as the ratio of seconds per
# member and training step, batched over looped; below 1 the vmapped pass is faster.
#
#   members   ratio                        weights of a chunk   ratio        largest tensor       ratio
#   2         1.1 to 1.3                   up to 2.0 million    .3 to .9     up to 66,000         .3 to .9
#   3         .8 to 1.0                    2.7 to 4.0 million   .75 to 1.1   100,000 to 130,000   .6 to 1.0
#   4         .6 to .9, predicting 1.4     7.9 million          1.4 to 2.9   200,000              .9 to 1.3
#   5         .5 to .9
FEWEST = 5  # members
WEIGHTS = 2**21  # weights of a chunk of members, 8 MiB
LARGEST = 2**16  # numbers in the largest tensor of a member, 256 KiB

# On an accelerator one pass pays as long as it fits.
BYTES_OF_A_WEIGHT = 16  # weight, gradient and two moments
LARGE_TENSORS = 64  # tensors of the largest size that a training step keeps
SHARE_OF_MEMORY = 0.5  # of the device, for one pass


class MemberTask(Protocol):
    """Work that is done once per member."""

    def single(self, member: int, reporter: Reporter) -> Any:
        """The result of one member, run alone."""
        ...

    def batched(self, members: Sequence[int], reporter: Reporter) -> Any:
        """The results of several members as one."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that the work happens on."""
        ...

    @property
    def weights(self) -> int:
        """P, the number of inferred weights of one member; 0 if all members use the same weights."""
        ...

    def largest(self) -> int:
        """Numbers in the largest tensor that a forward pass of one member makes on one batch (`largest_tensor`)."""
        ...

    def why_not_batched(self) -> str | None:
        """The reason this task cannot be batched, found without randomness or clocks; None if it can."""
        ...

    def shared(self) -> Mapping[str, Tensor]:
        """Tensors on the CPU that worker processes may map instead of getting copies."""
        ...


def choose(
    members: int,
    weights: int,
    largest: Callable[[], int],
    device: torch.device,
    workers: int = 1,
    veto: Callable[[], str | None] = lambda: None,
) -> Chosen:
    """The strategy for some members, from sizes alone.

    Processes if more than one worker was asked for; one vmapped pass if the members are many and small enough to share
    the cache of a CPU, or fit an accelerator; else the loop. Draws that have the same weights always go together.

    Args:
        members: how many.
        weights: of one member; 0 if all members have the same ones.
        largest: numbers in the largest tensor of one member's forward pass; asked only if it decides.
        device: where the members run. Workers are for the CPU.
        workers: processes that were asked for.
        veto: the reason why these members cannot be batched, or None; asked last, since it tries.
    """
    if members == 1:
        return "looped"
    if workers > 1 and device.type == "cpu":
        return "processes"
    fits = _fits_cache if device.type == "cpu" else _fits_device
    if weights and not fits(members, weights, largest, device):
        return "looped"
    return "batched" if veto() is None else "looped"


def _fits_cache(members: int, weights: int, largest: Callable[[], int], device: torch.device) -> bool:  # noqa: ARG001
    return members >= FEWEST and min(members, CHUNK) * weights <= WEIGHTS and largest() <= LARGEST


def _fits_device(members: int, weights: int, largest: Callable[[], int], device: torch.device) -> bool:
    memory = memory_of(device)
    if memory is None:
        return True
    each = BYTES_OF_A_WEIGHT * weights + 4 * LARGE_TENSORS * largest()
    return min(members, CHUNK) * each <= SHARE_OF_MEMORY * memory


def memory_of(device: torch.device) -> int | None:
    """Bytes of memory that an accelerator has, free or not; None if torch does not say."""
    if device.type in ("cuda", "xpu"):
        return int(getattr(torch, device.type).get_device_properties(device).total_memory)
    return torch.mps.recommended_max_memory() if device.type == "mps" else None


def largest_tensor(run: Callable[[], object]) -> int:
    """Numbers in the largest tensor that any operation of `run` returns, in this thread."""
    with _Sizes() as sizes:
        run()
    return sizes.largest


def all_tensors(run: Callable[[], object]) -> int:
    """Numbers in all tensors that operations of `run` return, views among them, in this thread."""
    with _Sizes() as sizes:
        run()
    return sizes.total


class _Sizes(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.largest, self.total = 0, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest, self.total = max(self.largest, result.numel()), self.total + result.numel()
        return result


def decide(
    task: MemberTask,
    members: Sequence[int],
    strategy: Strategy = "auto",
    workers: int | Workers | None = None,
    veto: str | None = None,
) -> Chosen:
    """The strategy for these members, for `run_as`; `veto` is a reason of the caller's why "auto" must not batch."""
    check_strategy(strategy)
    if not members:
        raise ValueError("members must hold at least one member; got none.")
    if strategy == "auto":
        count = _count(workers, strategy)
        return choose(
            len(members), task.weights, task.largest, task.device, count, lambda: veto or task.why_not_batched()
        )
    if strategy == "processes":
        return "looped" if in_worker() else "processes"
    reason = task.why_not_batched() if strategy == "batched" else None
    if reason:
        raise ValueError(f"strategy 'batched' is not possible here: {reason}. Use 'looped' or 'processes'.")
    return strategy


def run_as(
    task: MemberTask,
    members: Sequence[int],
    chosen: Chosen,
    workers: int | Workers | None = None,
    reporter: Reporter | None = None,
) -> list[Any]:
    """The task's results for all members, in their order, by a strategy that was decided on."""
    reporter = reporter or Silent()
    if chosen == "batched":
        return [task.batched(members[i : i + CHUNK], reporter) for i in range(0, len(members), CHUNK)]
    if chosen == "processes":
        processes = workers if isinstance(workers, Workers) else _count(workers, chosen)
        found = dict(run_in_processes(task.single, members, processes, reporter, task.shared()))
        return [found[i] for i in range(len(members))]
    return [task.single(member, reporter) for member in members]


def _count(workers: int | Workers | None, strategy: Strategy) -> int:
    """How many processes are asked for; a worker starts none of its own."""
    if workers is None:
        return cores() if strategy == "processes" else 1
    count = workers.count if isinstance(workers, Workers) else check_workers(workers)
    return 1 if in_worker() else count


def check_strategy(strategy: str) -> None:
    """Refuse a strategy that does not exist."""
    if strategy not in STRATEGIES:
        raise unknown_name("strategy", strategy, STRATEGIES)
