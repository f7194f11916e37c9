"""Where families get their randomness: the global stream, or one stream per draw.

Draws made together must be the draws made one by one. So while `streams` is in force, the noise of draw l, row l
of a tensor (L, ...), comes from a generator of its own, in the order in which draw l alone would ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy
import torch
from torch import Tensor

from bayesformer.core.vectors import transformed

_streams: Sequence[torch.Generator] = ()  # one per draw while several are made together


@contextmanager
def streams(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Let row l of all noise come from generator l."""
    global _streams  # noqa: PLW0603 (like torch's own global stream, which it stands in for)
    before, _streams = _streams, generators
    try:
        yield
    finally:
        _streams = before


def normal(like: Tensor) -> Tensor:
    """Standard normal noise in the shape of `like`, in memory of its own."""
    if transformed():  # under vmap, noise must be made like a tensor that is mapped
        return torch.randn_like(like.detach())
    return _filled(like, Tensor.normal_)


def log_uniform(like: Tensor) -> Tensor:
    """log U of a uniform on the open interval (0, 1), never 0 and never infinite.

    torch.rand gives an exact 0 once in 2²⁴ numbers: in attention that is an infinite logit every few hundred passes.
    """
    if transformed():
        half = torch.finfo(like.dtype).eps / 4  # below 1 floats are eps / 2 apart; 1 - half would be 1
        return torch.rand_like(like.detach()).clamp(half, 1 - 2 * half).log_()
    return _filled(like, uniform_).log_()


MANY = 1 << 13  # numbers, from which on a stream of its own is made sooner than torch's goes on


def uniform_(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Filled with uniform numbers of the open interval (0, 1).

    Many numbers on a CPU come from the bits of SFC64, seeded by torch's generator, which alone takes four times as
    long: 23 bits are the digits of a number in [1, 2), which less 1 - 2⁻²⁴ is the middle of one of 2²³ intervals.
    """
    half = torch.finfo(x.dtype).eps / 4
    if x.device.type != "cpu" or x.dtype != torch.float32 or x.numel() < MANY or torch.compiler.is_compiling():
        return x.uniform_(half, 1 - 2 * half, generator=generator)
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
    bits = torch.from_numpy(numpy.random.SFC64(seed).random_raw((x.numel() + 1) // 2)).view(torch.int32)[: x.numel()]
    digits = bits.bitwise_and_(0x7FFFFF).bitwise_or_(0x3F800000).view(torch.float32)
    return torch.sub(digits, 1 - 2 * half, out=x)


def _filled(like: Tensor, fill: Callable[..., Tensor]) -> Tensor:
    if not _streams:
        return _one(like, fill)
    return torch.stack([_one(row, fill, generator=own) for row, own in zip(like, _streams, strict=True)])


def _one(like: Tensor, fill: Callable[..., Tensor], **options: torch.Generator) -> Tensor:
    """Filled as one piece of memory, which is what is fast, in the order of the memory of `like`."""
    strides = torch.empty_like(like, device="meta").stride()
    noise = fill(torch.empty(like.numel(), dtype=like.dtype, device=like.device), **options)
    return noise.as_strided(like.shape, strides)
