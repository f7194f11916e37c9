"""Slices: of many rows, a few at a time, so that what is computed from them stays in the cache; and of places."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CACHED = 2**19  # numbers worked on at a time, 2 MiB in float32: about what the nearer caches of a CPU core take


def cache_sized_slices(count: int, numbers: int, most: int | None = None) -> Iterator[slice]:
    """Slices of `count` rows in order, each of so few rows that `numbers` numbers of every row are at most `most`.

    A slice has at least one row. `most` is `CACHED` by default.
    """
    step = max(1, (CACHED if most is None else most) // max(1, numbers))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def as_slice(index: Tensor) -> slice | Tensor:
    """The places (p,), p > 0, as a slice if each is the one before it plus 1; otherwise the index as it is."""
    start = int(index[0])
    neighbours = torch.equal(index, torch.arange(start, start + len(index), device=index.device))
    return slice(start, start + len(index)) if neighbours else index
