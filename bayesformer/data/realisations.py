"""Random data read several times over, so that sums over all data are averages over what reading draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bayesformer.core.types import Batch
from bayesformer.data.batches import Batches

EXAMPLES = 2**13  # read in all, where that is between the fewest and the most readings
FEWEST, MOST = 4, 64  # readings


class Realisations(Batches):
    """Several readings of random data as one data set, in which every example counts once, as the mean of them.

    Augmented examples have a log-likelihood that is another function of the weights in every reading. What training
    ascends is its expectation, and a sum over one reading is a noisy estimate of that: its mode is off by as many
    posterior standard deviations whatever N is. The average of R readings is off by 1/√R of it, and always the same
    function.
    """

    def __init__(self, data: Batches, realisations: int) -> None:
        self.data, self.realisations = data, realisations
        self.name, self.resumable, self.batch_size = data.name, data.resumable, data.batch_size
        self.num_data = data.num_data

    @property
    def rows(self) -> int | None:
        """Those of all readings together."""
        return None if self.data.rows is None else self.realisations * self.data.rows

    def in_order(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Batch]:
        """Every reading of all examples, one after the other."""
        for number in range(self.realisations):
            yield from self.data.realisation(number).in_order(batch_size, device)

    def epoch(self, batch_size: int, **options: Any) -> Iterator[Batch]:
        """Training batches of one epoch of the underlying data: each example once, with a new random augmentation."""
        return self.data.epoch(batch_size, **options)

    def steps(self, batch_size: int, *, join_single: bool = False) -> int | None:
        """Those of an epoch of the data themselves."""
        return self.data.steps(batch_size, join_single=join_single)

    def fingerprint(self) -> str:
        """That of the data themselves, whatever the number of readings."""
        return self.data.fingerprint()

    def first(self, count: int) -> Batch:
        """The first `count` examples of the first reading."""
        return self.data.first(count)

    def realisation(self, number: int) -> Batches:
        """One of the readings, as data of their own."""
        return self.data.realisation(number)


def averaged(data: Batches) -> Batches:
    """The data, for sums over all of them: several readings of random ones, fewer the more examples there are."""
    if not data.is_random:
        return data
    return Realisations(data, min(MOST, max(FEWEST, EXAMPLES // (data.rows or data.require_num_data()))))
