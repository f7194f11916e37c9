"""Random numbers of the library's own code, from generators that belong to the running thread's context.

`with drawing_from(generator)` says where they come from: a single generator, or one for each row of the leading
axis, so that members or draws that are computed together get the numbers that each would get alone. Outside of any
`drawing_from` they come from torch's global stream, as in a user's own training loop. The generators are held by a
ContextVar: other threads neither see nor disturb them.

What a user's model draws by functions of torch is in `bayesformer/model/randomness.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from bayesformer.core.compat import standard_gamma, transformed

Generators: TypeAlias = torch.Generator | Sequence[torch.Generator]


class Source(NamedTuple):
    """Where the draws of the running code come from, and how dropout is to behave."""

    generators: tuple[torch.Generator, ...] = ()
    """one, or one per row of the leading axis; empty for torch's global stream"""
    dropout_rate: float | None = None
    """the rate of every dropout in the place of its own; None leaves them"""
    rates: list[float] | None = None
    """if given, the rate of every dropout that is computed is appended"""


_source: ContextVar[Source] = ContextVar("bayesformer_source", default=Source())  # noqa: B039 (immutable)


@contextmanager
def drawing_from(
    generators: Generators, dropout_rate: float | None = None, rates: list[float] | None = None
) -> Iterator[None]:
    """Let all draws of the library in this thread come from these, see `Source`; () is torch's global stream."""
    given = (generators,) if isinstance(generators, torch.Generator) else tuple(generators)
    token = _source.set(Source(given, dropout_rate, rates))
    try:
        yield
    finally:
        _source.reset(token)


def source() -> Source:
    """What is in force in this thread."""
    return _source.get()


def dropout_rate(own: float) -> float:
    """The rate to drop with where a model asks for `own`."""
    _, replaced, rates = _source.get()
    rate = own if replaced is None else replaced
    if rates is not None:
        rates.append(rate)
    return rate


def normal_like(like: Tensor) -> Tensor:
    """Standard normal numbers in the shape of `like`, without its history."""
    return draw(like, torch.randn, Tensor.normal_)


def uniform_like(like: Tensor) -> Tensor:
    """Uniform numbers of the open interval (0, 1) in the shape of `like`: a logarithm of them is never infinite.

    torch.rand gives an exact 0 once in 2²⁴ numbers, in attention that is an infinite logit every few hundred passes.
    """
    low, high = _ends(like.dtype)
    if transformed():
        return draw(like, torch.rand, Tensor.uniform_).clamp(low, high)
    return draw(like, torch.rand, lambda x, generator: x.uniform_(low, high, generator=generator))


def log_uniform_like(like: Tensor) -> Tensor:
    """log U of uniform numbers of the open interval (0, 1) in the shape of `like`: below 0, and finite."""
    return uniform_like(like).log_()


def gamma_of(shape: Tensor) -> Tensor:
    """Draws from Gamma(shape, 1), differentiable in the shape."""
    generators = source().generators
    if len(generators) < 2:
        return standard_gamma(shape, *generators)
    rows = zip(_rows(shape, generators), generators, strict=True)
    return torch.stack([standard_gamma(row, generator) for row, generator in rows])


def signs(shape: Sequence[int], like: Tensor) -> Tensor:
    """±1 with equal chances, in the given shape and the dtype and device of `like`."""
    return draw(like.new_empty(shape), torch.rand, Tensor.uniform_).lt(0.5).to(like.dtype).mul(2).sub(1)


def dropout(x: Tensor, rate: float, generator: torch.Generator | None = None) -> Tensor:
    """Entries of `x` set to 0 with probability `rate`, the others divided by 1 - rate."""
    if rate == 0:
        return x
    return x * dropout_mask(x, rate, generator)


def dropout_mask(like: Tensor, rate: float, generator: torch.Generator | None = None) -> Tensor:
    """0 with probability `rate`, else 1 / (1 - rate), in the shape of `like`; from `generator`, or from those in force.

    On a CPU comparing uniform numbers takes a third of the time of torch's Bernoulli numbers.
    """
    if rate == 1:
        return torch.zeros_like(like, memory_format=torch.preserve_format)
    if like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64) and not transformed():
        uniform = draw(like, torch.rand, Tensor.uniform_, generator)
        return uniform.ge_(rate).div_(1 - rate)
    kept = 1 - rate
    return draw(like, _bernoulli(kept), lambda x, generator: x.bernoulli_(kept, generator=generator), generator) / kept


def draw(
    like: Tensor,
    make: Callable[..., Tensor],
    fill: Callable[..., Tensor],
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random numbers in the shape and the memory order of `like`.

    Args:
        like: gives shape, dtype and device.
        make: `make(shape, dtype=, device=, generator=)`, used inside transforms of torch.func, which refuse to fill.
        fill: `fill(x, generator=)`, in place.
        generator: in the place of those in force.
    """
    generators = source().generators if generator is None else (generator,)
    if transformed():
        if len(generators) > 1:
            raise RuntimeError(f"inside vmap one generator serves all members; got {len(generators)}.")
        one = generators[0] if generators else None
        return make(like.shape, dtype=like.dtype, device=like.device, generator=one)
    if len(generators) < 2:
        return _filled(like, fill, generators[0] if generators else None)
    rows = zip(_rows(like, generators), generators, strict=True)
    return torch.stack([_filled(row, fill, own) for row, own in rows])


def _filled(like: Tensor, fill: Callable[..., Tensor], generator: torch.Generator | None) -> Tensor:
    if like.is_contiguous():
        return fill(torch.empty_like(like, requires_grad=False), generator=generator)
    # Filling strided memory is slow: it is filled as one piece, in the order of the memory of `like`.
    strides = torch.empty_like(like, device="meta").stride()
    noise = fill(torch.empty(like.numel(), dtype=like.dtype, device=like.device), generator=generator)
    return noise.as_strided(like.shape, strides)


def _rows(like: Tensor, generators: tuple[torch.Generator, ...]) -> Tensor:
    if like.dim() == 0 or len(like) != len(generators):
        raise RuntimeError(
            f"with {len(generators)} generators the leading axis must be theirs; got a shape of {tuple(like.shape)}."
        )
    return like


def _bernoulli(kept: float) -> Callable[..., Tensor]:
    def make(shape: torch.Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> Tensor:
        return torch.rand(shape, device=device, generator=generator).lt(kept).to(dtype)

    return make


def _ends(dtype: torch.dtype) -> tuple[float, float]:
    """The first and last number used of (0, 1): below 1 floats are eps / 2 apart, so that 1 - eps / 4 would be 1."""
    eps = torch.finfo(dtype).eps
    return eps / 4, 1 - eps / 2
