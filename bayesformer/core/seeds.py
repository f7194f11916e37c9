"""Seeds for every stream of randomness, derived rather than carried.

A stream is named by what it is for (member 3, epoch 7, data order), so that a resumed run, a worker process
and a loop all draw the same numbers without any generator state being saved or sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bayesformer.core.draws import drawing_from
from bayesformer.core.global_random import global_streams


def fold(seed: int, *names: int | str) -> int:
    """A 63-bit seed for the stream `names` under `seed`."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *names: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for the stream `names` under `seed`, on a device."""
    return torch.Generator(device).manual_seed(fold(seed, *names))


@contextmanager
def stream(seed: int, *names: int | str) -> Iterator[None]:
    """The global streams of torch, numpy and `random` seeded for the stream `names`, restored afterwards.

    For what can only draw from there, such as a function that builds a model. One thread at a time can be inside.
    """
    with global_streams(fold(seed, *names)), drawing_from(()):
        yield
