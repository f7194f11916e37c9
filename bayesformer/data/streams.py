"""Batches of data that can be read in their own order only: IterableDatasets, generators, DataLoaders with samplers.

Reading is done with private random streams named by (seed, member, epoch), so that a stream that draws from the global
ones is repeatable. Resuming inside an epoch reads what was already seen again and leaves it out.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, Literal

import torch

from bayesformer.core.global_random import PrivateStream
from bayesformer.core.seeds import fold
from bayesformer.core.types import Batch
from bayesformer.data.batches import Batches
from bayesformer.data.in_memory import batch_to, update_hash
from bayesformer.data.inputs import BATCH, CONSTANTS, as_tensors, first_tensor, from_row, leaves, map_inputs
from bayesformer.data.labels import drop_labels, split_labels
from bayesformer.data.order import num_steps
from bayesformer.data.ragged import Padding

log = logging.getLogger("bayesformer")
COUNTED = 256  # examples per batch of a pass that only counts them
COMPARED = 4  # units of two readings that tell whether a stream starts again


@dataclass(frozen=True)
class Stream:
    """A stream of examples and their number, which training needs: the prior is weighed against N examples.

    An epoch is the whole stream, or its first `num_data` examples if it goes on. A stream that ends before stands for
    `num_data` examples all the same, whatever the method: sums over it are scaled. `examples` is an iterable that
    starts again in every epoch, or a function without arguments that opens one; an iterator can be read once. An item
    is one example: a source of whole batches is given as `Stream(DataLoader(source, batch_size=None), num_data=...)`.
    """

    examples: Iterable[Any] | Callable[[], Iterable[Any]]
    num_data: int | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.examples, "__iter__") and not hasattr(self.examples, "__getitem__"):
            if not callable(self.examples):
                raise ValueError(
                    f"examples must be an iterable or a function that opens one; got {type(self.examples).__name__}."
                )
            object.__setattr__(self, "examples", Opened(self.examples))
        if self.num_data is not None and self.num_data < 1:
            raise ValueError(f"num_data must be the number of examples, at least 1; got {self.num_data}.")


@dataclass(frozen=True)
class Opened:
    """An iterable that calls a function whenever it is opened, so that a generator function can be read again."""

    opens: Callable[[], Iterable[Any]]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.opens())


class Streamed(Batches):
    """Batches of an iterable. `collate_fn` makes a batch of a list of examples; None if it gives whole batches.

    `rows` is how many examples a pass gives, where that is known before one was made.
    """

    resumable: Literal["exact", "epoch"] = "epoch"

    def __init__(
        self,
        source: Iterable[Any],
        num_data: int | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        name: str,
        rows: int | None = None,
    ) -> None:
        self.source, self.num_data, self.collate_fn, self.name = source, num_data, collate_fn, name
        self.batch_size = None if collate_fn is not None else getattr(source, "batch_size", None)
        self._kept: Iterator[Any] | None = None  # what was read in advance of a stream that cannot start again
        self._ahead: list[Any] = []
        self._rows = rows
        self._warned = False  # that the stream ended before N examples

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
        """The training batches of one epoch, see `Batches.epoch`; whole batches of a loader are left as they are."""
        if replacement:
            raise ValueError(
                f"{self.name} cannot be drawn with replacement, since it is read in its own order: give a dataset that "
                "is read by index, or use a method that takes every example once per epoch."
            )
        own = PrivateStream(fold(seed, member, epoch, "examples"))
        found = islice(self._raw(own, batch_size, epoch, join_single), start, None)
        return (batch_to(split_labels(raw, self.name, BATCH), device) for raw in found)

    def in_order(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Batch]:
        """The stream from its beginning; how many examples it gave is remembered for `rows`."""
        seen = 0
        for raw in self.raw_in_order(batch_size):
            batch = batch_to(split_labels(raw, self.name, from_row(seen)), device)
            seen += len(batch.targets)
            yield batch
        self._rows = seen

    def raw_in_order(self, batch_size: int) -> Iterator[Any]:
        """The stream from its beginning as it is: not split into inputs and targets."""
        return self._raw(PrivateStream(self._stream), batch_size, 0, False)

    @cached_property
    def is_random(self) -> bool:
        """Whether the sampler of a loader draws other examples in another reading: with replacement, or some of them.

        A loader that shuffles and drops what is left over after its last whole batch is not meant.
        """
        sampler, batches = getattr(self.source, "batch_sampler", None), length_of(self.source)
        every = length_of(getattr(self.source, "dataset", None))
        if sampler is None or batches is None or every is None or not self.restarts:
            return False
        drawn = lambda: [[repr(index) for index in batch] for batch in islice(sampler, batches)]  # noqa: E731
        one, other = (PrivateStream(fold(0, "in order", number))(drawn) for number in (1, 2))
        first, second = (Counter(chain.from_iterable(batches)) for batches in (one, other))
        left_over = every - first.total() < max(map(len, one), default=0) and len(first) == first.total()
        return first != second and not left_over

    def steps(self, batch_size: int, *, join_single: bool = False) -> int | None:
        """The number of batches in one epoch, where it is known."""
        if self.collate_fn is None and (batches := length_of(self.source)) is not None:
            return batches
        if self.num_data is None:
            return None
        return num_steps(self.num_data, self.batch_size or batch_size, join_single=join_single)

    @property
    def rows(self) -> int | None:
        """How many examples one pass gives: counted in a pass of its own unless one was made, or cannot be spared."""
        if self._rows is None and self.num_data is not None and self.restarts:
            self._rows = sum(count_of(raw, self.name) for raw in self.raw_in_order(COUNTED))
        return self.num_data if self._rows is None else self._rows

    def require_passes(self, count: int) -> None:
        """Refuse an iterator, which is used up by one pass, where more are needed."""
        if count > 1 and isinstance(self.source, Iterator):
            raise ValueError(
                f"{self.name} must be readable {count} times, for the epochs of training and sums over all data; got "
                f"an iterator, {type(self.source).__name__}, which can be read once only. Give an iterable that starts "
                "again, or the function that makes the iterator: bf.Stream(function, num_data=...)."
            )

    def padded_with(self, token: int) -> Streamed:
        """This stream itself, padded with `token`: it may have been read in part, so that there is no other like it."""
        made = self.collate_fn
        if isinstance(made, partial) and isinstance(padding := made.keywords.get("padding"), Padding):
            self.collate_fn = partial(made, padding=replace(padding, token=token))
        return self

    def fingerprint(self) -> str:
        """A hash of type and N: reading a stream could use it up."""
        source = getattr(self.source, "dataset", self.source)
        kind = f"{type(self.source).__qualname__}/{type(source).__module__}.{type(source).__qualname__}"
        return hashlib.sha256(f"{kind}/{self.num_data}/{self.batch_size}".encode()).hexdigest()[:16]

    @property
    def restarts(self) -> bool:
        """Whether the stream starts again when it is opened again, seen by its first examples."""
        self._look_ahead(COMPARED)
        return self._kept is None

    def first(self, count: int) -> Batch:
        """The first examples, at most `count`; the next epoch begins with them."""
        raw = self.raw_first(count)
        batch = split_labels(raw, self.name)
        if len(batch.targets) <= count:
            return batch
        mask = None if batch.mask is None else batch.mask[:count]
        return Batch(map_inputs(batch.inputs, lambda x: x[:count]), batch.targets[:count], mask)

    def raw_first(self, count: int) -> Any:
        """The first batch of at least one example, not split into inputs and targets."""
        units = 1 if self.collate_fn is None else count
        self._look_ahead(units)
        if not self._ahead:
            raise ValueError(f"{self.name} must have at least one example; got none.")
        collate_fn, items = self.collate_fn, self._ahead[:units]
        return items[0] if collate_fn is None else PrivateStream(fold(0, "in order"))(lambda: collate_fn(items))

    def _look_ahead(self, count: int) -> None:
        """Read `count` units; what cannot be read again is kept for the next epoch.

        An iterator is read once. Whether any other stream starts again is seen by opening it a second time: if its
        first units are others, or fewer, then both readings are parts of a single pass.
        """
        if self._kept is not None:
            self._ahead += islice(self._kept, max(0, count - len(self._ahead)))
            return
        self._ahead, iterator = self._opened(max(count, COMPARED))
        if iterator is self.source:
            self._kept = iterator
            return
        again, iterator = self._opened(len(self._ahead))
        if not self._ahead or [_digest(unit) for unit in again] == [_digest(unit) for unit in self._ahead]:
            return
        self._ahead += again
        self._kept = iterator

    def _opened(self, count: int) -> tuple[list[Any], Iterator[Any]]:
        def read() -> tuple[list[Any], Iterator[Any]]:
            iterator = iter(self.source)
            return list(islice(iterator, count)), iterator

        return PrivateStream(fold(0, "in order"))(read)

    def _open(self, epoch: int) -> Iterator[Any]:
        if self._kept is not None:
            ahead, rest, self._ahead, self._kept = self._ahead, self._kept, [], None
            return chain(ahead, rest)
        if hasattr(self.source, "set_epoch"):  # Hugging Face streams and distributed samplers reshuffle by it
            self.source.set_epoch(epoch)
        return iter(self.source)

    def _raw(self, own: PrivateStream, batch_size: int, epoch: int, join_single: bool) -> Iterator[Any]:
        """Batches as the stream gives them, each read when it is asked for."""
        units = own(lambda: self._open(epoch))
        whole = self.collate_fn is None
        batches = self._whole(own, units) if whole else self._grouped(own, units, batch_size, join_single)
        empty = True
        for raw in batches:
            empty = False
            yield raw
        if empty:
            raise ValueError(
                f"{self.name} gave no example in epoch {epoch}: it can be read once only, or is empty. Give an object "
                "whose __iter__ starts again, as an IterableDataset's does."
            )

    def _grouped(self, own: PrivateStream, units: Iterator[Any], size: int, join_single: bool) -> Iterator[Any]:
        """Examples in batches; two examples are read in advance to see whether the last batch would be a single one."""
        collate_fn, ahead = self.collate_fn, deque[Any]()
        assert collate_fn is not None
        units, seen = islice(units, self.num_data), 0

        def read() -> Any:
            ahead.extend(islice(units, size - len(ahead) + (2 if join_single else 0)))
            single = join_single and size > 1 and len(ahead) == size + 1
            items = [ahead.popleft() for _ in range(min(size + single, len(ahead)))]
            nonlocal seen
            seen += len(items)
            return collate_fn(items) if items else None

        while (raw := own(read)) is not None:
            yield raw
        self._note_end(seen)

    def _whole(self, own: PrivateStream, units: Iterator[Any]) -> Iterator[Any]:
        """Whole batches until the loader ends, or N examples were seen of one that may not end."""
        limit = self.num_data if length_of(self.source) is None else None
        seen, end = 0, object()
        while (limit is None or seen < limit) and (raw := own(lambda: next(units, end))) is not end:
            yield raw
            seen += count_of(raw, self.name)
        if limit is not None:
            self._note_end(seen)

    def _note_end(self, seen: int) -> None:
        """Say once that the stream ended before N examples; none at all are an error of the caller's."""
        if self._warned or self.num_data is None or not 0 < seen < self.num_data:
            return
        self._warned = True
        log.warning(
            "%s ended after %d examples; num_data is %d. They stand for num_data examples, against which the prior is "
            "weighed. If each was a whole batch, give bf.Stream(DataLoader(source, batch_size=None), num_data=...).",
            self.name,
            seen,
            self.num_data,
        )


def count_of(raw: Any, name: str) -> int:
    """How many examples a batch has, as the data give it."""
    return len(first_tensor(drop_labels(raw, name)))


def length_of(source: Any) -> int | None:
    """`len(source)`, or None if it has no length; a DataLoader of a stream raises TypeError when asked."""
    try:
        return len(source)
    except TypeError:
        return None


def _digest(unit: Any) -> str:
    """A hash of an example or batch; objects that are neither tensors nor plain values count by their type."""
    digest = hashlib.sha256()
    for value in leaves(as_tensors(unit)):
        known = isinstance(value, (torch.Tensor, *CONSTANTS))
        update_hash(digest, value if known else type(value).__qualname__)
    return digest.hexdigest()
