"""Seeds for every stream of randomness, derived rather than carried.

A stream is named by what it is for (member 3, epoch 7, data order), so that a resumed run, a worker process
and a loop all draw the same numbers without any generator state being saved or sent.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from bayesformer.core.draws import drawing_from

GLOBAL_STREAMS = threading.RLock()
"""Held by whoever seeds the global streams of torch, numpy and `random`, or reads them to put them back."""


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


@contextmanager
def global_streams(seed: int, torch_too: bool = True) -> Iterator[None]:
    """The global streams of numpy, `random` and (`torch_too`) torch seeded, and restored afterwards.

    A lock of the process is held, so that threads of this library wait for each other. A user's own thread that
    draws from a global stream meanwhile disturbs the numbers that are drawn here.
    """
    with GLOBAL_STREAMS, torch.random.fork_rng(enabled=torch_too):
        numpy_state, random_state = numpy.random.get_state(), random.getstate()  # noqa: NPY002
        try:
            numpy.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 (a model's own code uses it)
            random.seed(seed)
            if torch_too:
                seed_torch(seed)
            yield
        finally:
            numpy.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(random_state)


def seed_torch(seed: int) -> None:
    """Seed torch's global stream as torch.manual_seed does; skips its lazy CUDA seeding if there is no accelerator."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # torch.manual_seed spends .7 ms on preparing seeds for CUDA, XPU and others
        torch.default_generator.manual_seed(seed)
