"""Batches of data that are read by index: torch Datasets, lists, tables.

Examples are read when their batch is asked for, each once per epoch. Where reading draws random numbers (augmentation,
a collator that masks tokens), every example has a stream of its own, named (seed, member, epoch, index), so that a
resumed epoch, another batch size or worker processes give the same examples. Examples drawn twice in one epoch (with
replacement) are augmented alike.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bayesformer.core.global_random import borrowed, get_states
from bayesformer.core.seeds import fold
from bayesformer.core.types import Batch
from bayesformer.data.batches import Batches
from bayesformer.data.in_memory import batch_to, update_hash
from bayesformer.data.inputs import leaves, of_examples
from bayesformer.data.labels import split_labels
from bayesformer.data.order import bounds, epoch_order, num_steps


class ItemSource(Protocol):
    """Something whose examples are read by index and put together to a batch."""

    def __len__(self) -> int:
        """The number of examples, N."""
        ...

    def read(self, indices: list[int], seeds: Sequence[int] | None) -> Any:
        """The examples as one batch, not yet split into inputs and targets.

        `seeds` has one seed per example for the global random streams; None leaves these alone.
        """
        ...

    def describe(self) -> str:
        """The type of the data, for the fingerprint."""
        ...

    def padded_with(self, token: int) -> ItemSource:
        """The same examples, with token numbers filled up by `token` where they are padded here."""
        ...


@dataclass(frozen=True)
class Loading:
    """How a DataLoader reads: its own batch size and worker processes."""

    batch_size: int | None = None
    drop_last: bool = False
    num_workers: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    """further arguments of DataLoader that matter with workers"""


class Indexed(Batches):
    """Batches of a `ItemSource`, in an order derived from the seed."""

    resumable: Literal["exact", "epoch"] = "exact"

    def __init__(self, source: ItemSource, name: str = "data", loading: Loading | None = None) -> None:
        if len(source) == 0:
            raise ValueError(f"{name} must have at least one example; got none.")
        self.source, self.name, self.num_data = source, name, len(source)
        self.loading = loading or Loading()
        self.batch_size = self.loading.batch_size
        self._random = False  # whether reading was seen to draw from a global random stream

    def epoch(
        self,
        batch_size: int,
        *,
        seed: int,
        epoch: int,
        member: int = 0,
        replacement: bool = False,
        start: int = 0,
        device: torch.device | str | None = None,
        join_single: bool = False,
    ) -> Iterator[Batch]:
        """The training batches of one epoch, see `Batches.epoch`."""
        size, count = self.batch_size or batch_size, len(self.source)
        order = epoch_order(count, seed=seed, epoch=epoch, member=member, replacement=replacement)
        places = bounds(count, size, start=start, join_single=join_single, drop_last=self.loading.drop_last)
        yield from self._batches(order, list(places), fold(seed, member, epoch, "examples"), device)

    def in_order(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Batch]:
        """Every example once, in order; random data are read with a fixed seed."""
        count = len(self.source)
        places = list(bounds(count, self.batch_size or batch_size))
        yield from self._batches(torch.arange(count, device="cpu"), places, self._stream, device)

    def raw_in_order(self, batch_size: int) -> Iterator[Any]:
        """Every example once, in order, as the data give it: not split into inputs and targets."""
        count = len(self.source)
        places = bounds(count, self.batch_size or batch_size)
        return self._read_all(torch.arange(count, device="cpu"), places, self._stream)

    def _batches(
        self, order: Tensor, places: list[tuple[int, int]], stream: int, device: torch.device | str | None
    ) -> Iterator[Batch]:
        for (begin, end), raw in zip(places, self._read_all(order, iter(places), stream), strict=True):
            yield batch_to(split_labels(raw, self.name, of_examples(order[begin:end].tolist())), device)

    def steps(self, batch_size: int, *, join_single: bool = False) -> int:
        """The number of batches in one epoch."""
        size, drop_last = self.batch_size or batch_size, self.loading.drop_last
        return num_steps(len(self.source), size, join_single=join_single, drop_last=drop_last)

    def padded_with(self, token: int) -> Indexed:
        """The same data, padded with `token`, see `Batches.padded_with`."""
        other = copy.copy(self)
        other.source = self.source.padded_with(token)
        return other

    def fingerprint(self) -> str:
        """A hash of type, N and up to four examples spread over the data."""
        count = len(self.source)
        digest = hashlib.sha256(f"{self.source.describe()}/{count}/{self.batch_size}/{self.loading.drop_last}".encode())
        for index in sorted({0, count // 3, 2 * count // 3, count - 1}):
            for value in leaves(self._read([index], self._stream)):
                update_hash(digest, value)
        return digest.hexdigest()[:16]

    def first(self, count: int) -> Batch:
        """The first `count` examples as one batch, or all there are if they are fewer."""
        return split_labels(self.raw_first(count), self.name)

    @property
    def is_random(self) -> bool:
        """Whether reading an example was seen to draw from a global random stream."""
        return self._random

    def raw_first(self, count: int) -> Any:
        """The first `count` examples as the data give them: not split into inputs and targets."""
        return self._read(list(range(min(count, len(self.source)))), self._stream)

    def _read_all(self, order: Tensor, places: Iterator[tuple[int, int]], stream: int) -> Iterator[Any]:
        parts = (order[begin:end].tolist() for begin, end in places)
        if not self.loading.num_workers:
            return (self._read(indices, stream) for indices in parts)
        return iter(
            DataLoader(
                _WholeBatches(self.source, stream),  # type: ignore[arg-type]
                batch_size=None,
                sampler=list(parts),
                num_workers=self.loading.num_workers,
                collate_fn=_unchanged,
                generator=torch.Generator("cpu").manual_seed(stream),  # else workers' seeds are drawn from the caller's
                **dict(self.loading.options),
            )
        )

    def _read(self, indices: list[int], stream: int) -> Any:
        """One batch. Examples are seeded once reading any of them was seen to draw random numbers."""
        with borrowed() as before:
            if not self._random:
                raw = self.source.read(indices, None)
                if before.same(get_states()):
                    return raw
                self._random = True
            return self.source.read(indices, _seeds(stream, indices))


@dataclass(frozen=True)
class _WholeBatches:
    """What a worker process reads from: an item is a whole batch, its examples always seeded."""

    source: ItemSource
    stream: int

    def __getitem__(self, indices: list[int]) -> Any:
        return self.source.read(indices, _seeds(self.stream, indices))


def _seeds(stream: int, indices: Sequence[int]) -> list[int]:
    return [fold(stream, index) for index in indices]


def _unchanged(raw: Any) -> Any:
    return raw
