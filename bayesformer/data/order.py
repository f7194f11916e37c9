"""Which examples make up each batch of an epoch, derived from the seed alone.

Nothing here reads data: batch k of an epoch is known without the batches before it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bayesformer.core.seeds import generator


def epoch_order(num_data: int, *, seed: int, epoch: int, member: int = 0, replacement: bool = False) -> Tensor:
    """(N,): the examples in the order in which a member sees them in one epoch, as indices on the CPU.

    A permutation, or N independent uniform draws with `replacement`, from the stream (seed, member, epoch, "order").
    """
    source = generator(seed, member, epoch, "order")
    if replacement:
        return torch.randint(num_data, (num_data,), generator=source, device="cpu")
    return torch.randperm(num_data, generator=source, device="cpu")


def bounds(
    num_data: int, batch_size: int, *, start: int = 0, join_single: bool = False, drop_last: bool = False
) -> Iterator[tuple[int, int]]:
    """Where each batch begins and ends in the order of an epoch, from batch number `start` on.

    The last batch may be smaller; `drop_last` leaves it out. With `join_single`, a last batch of one example is joined
    to the one before it, because BatchNorm cannot train on one example.
    """
    count = num_steps(num_data, batch_size, join_single=join_single, drop_last=drop_last)
    for number in range(start, count):
        last = number == count - 1 and not drop_last
        yield number * batch_size, num_data if last else (number + 1) * batch_size


def num_steps(num_data: int, batch_size: int, *, join_single: bool = False, drop_last: bool = False) -> int:
    """The number of batches in one epoch of N examples."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive; got {batch_size}.")
    if drop_last:
        return num_data // batch_size
    count = -(-num_data // batch_size)
    return count - 1 if join_single and count > 1 and batch_size > 1 and num_data % batch_size == 1 else count
