"""Seeds for every stream of randomness, derived rather than carried.

A stream is named by what it is for (member 3, epoch 7, data order), so that a resumed run, a worker process
and a loop all draw the same numbers without any generator state being saved or sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def fold(seed: int, *names: int | str) -> int:
    """A 63-bit seed for the stream `names` under `seed`."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *names: int | str) -> torch.Generator:
    """A CPU generator for the stream."""
    return torch.Generator().manual_seed(fold(seed, *names))


@contextmanager
def stream(seed: int, *names: int | str) -> Iterator[None]:
    """The global random stream set to the named one, and restored afterwards."""
    with torch.random.fork_rng():
        seed_torch(fold(seed, *names))
        yield


def seed_torch(seed: int) -> None:
    """What torch.manual_seed does. That also leaves word for accelerators that are not there, most of a millisecond."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
