"""Data with every batch changed by a function, for example given the decoder inputs that a model makes of labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bayesformer.core.types import Batch
from bayesformer.data.batches import Batches


class Mapped(Batches):
    """The batches of other data, each passed through `change` when it is read."""

    def __init__(self, data: Batches, change: Callable[[Batch], Batch]) -> None:
        self.data, self.change = data, change
        self.name, self.num_data, self.resumable = data.name, data.num_data, data.resumable
        self.batch_size, self.realisations = data.batch_size, data.realisations

    def epoch(self, batch_size: int, **options: Any) -> Iterator[Batch]:
        """The training batches of one epoch, changed."""
        return map(self.change, self.data.epoch(batch_size, **options))

    def in_order(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Batch]:
        """Every example once, in order, each batch as `change` returns it."""
        return map(self.change, self.data.in_order(batch_size, device))

    def steps(self, batch_size: int, *, join_single: bool = False) -> int | None:
        """As many as the other data have."""
        return self.data.steps(batch_size, join_single=join_single)

    @property
    def rows(self) -> int | None:
        """As many as a pass over the other data gives."""
        return self.data.rows

    def require_passes(self, count: int) -> None:
        """Refuse what the other data refuse."""
        self.data.require_passes(count)

    @property
    def is_random(self) -> bool:
        """Whether reading the other data was seen to draw random numbers."""
        return self.data.is_random

    def realisation(self, number: int) -> Batches:
        """Another reading of the other data, changed in the same way."""
        return Mapped(self.data.realisation(number), self.change)

    @property
    def restarts(self) -> bool:
        """Whether the other data can be read from the first example again."""
        return self.data.restarts

    def padded_with(self, token: int) -> Mapped:
        """The same change of the other data, padded with `token`."""
        return Mapped(self.data.padded_with(token), self.change)

    def fingerprint(self) -> str:
        """That of the other data: the change belongs to the model."""
        return self.data.fingerprint()

    def first(self, count: int) -> Batch:
        """The first `count` examples, as `change` returns them."""
        return self.change(self.data.first(count))
