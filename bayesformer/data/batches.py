"""Data as a sequence of batches: the one interface between what users have and everything that reads data."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch

from bayesformer.core.seeds import fold
from bayesformer.core.types import Batch

if TYPE_CHECKING:
    from bayesformer.data.in_memory import Data


class Batches(ABC):
    """Examples that are read batch by batch, when a batch is asked for and not before.

    One subclass for each way of reading: `InMemory` (tensors), `Indexed` (anything that is read by index) and
    `Streamed` (anything that is read in its own order).
    """

    name: str
    """what error messages call the data"""
    num_data: int | None
    """N, the number of examples; None for a stream whose N was not given"""
    resumable: Literal["exact", "epoch"]
    """whether `epoch(start=k)` gives the batches of an uninterrupted epoch, or only whole epochs are repeatable"""
    batch_size: int | None = None
    """the data's own batch size, as a DataLoader has; it replaces the `batch_size` of every method below"""
    realisations: int = 1
    """how many readings of random data `in_order` gives, one after the other"""
    _stream: int = fold(0, "in order")
    """of the random numbers that reading in order draws"""

    @abstractmethod
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
        """The training batches of one epoch.

        Args:
            batch_size: examples per batch; the last batch may be smaller.
            seed: with `epoch` and `member`, names the order and the randomness of random data.
            epoch: number of the epoch, from 0.
            member: number of the ensemble member or chain that is trained.
            replacement: draw every example independently from all N; the epoch has as many batches as without.
            start: number of the first batch; the ones before are skipped, without reading them where N is indexable.
            device: where the batches are put; None leaves them where they are.
            join_single: join a last batch of one example to the batch before (BatchNorm cannot train on one).
        """

    @abstractmethod
    def in_order(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Batch]:
        """Every example once, in the data's own order, for evaluation and prediction."""

    @property
    def rows(self) -> int | None:
        """How many examples one pass of `in_order` gives; None where neither that nor N is known."""
        return self.num_data

    @property
    def readings(self) -> float:
        """Rows of a pass over N. A sum over all data is the sum over a pass divided by this.

        It is not 1 for several readings of random data, for a sampler that draws another number of examples than there
        are, and for a stream that ends before `num_data`: whatever is summed then stands for N examples all the same.
        """
        return 1.0 if self.rows is None or self.num_data is None else self.rows / self.num_data

    @abstractmethod
    def steps(self, batch_size: int, *, join_single: bool = False) -> int | None:
        """The number of batches in one epoch; None if that is not known."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash that tells different data apart, so that a checkpoint is continued with its own data only.

        Of every value for tensors; of type, N and a few examples for other data; of type and N for streams.
        """

    @abstractmethod
    def first(self, count: int) -> Batch:
        """At most `count` examples, for checks before training. A stream gives them again in its next epoch."""

    @property
    def tensors(self) -> Data | None:
        """The data as tensors where they are tensors already (members can then be trained in lockstep), else None."""
        return None

    @property
    def is_random(self) -> bool:
        """Whether examples differ from epoch to epoch: reading draws random numbers (augmentation), or a sampler."""
        return False

    def realisation(self, number: int) -> Batches:
        """The data as another reading gives them in order, by a stream of its own; the same unless random."""
        if number == 0 or not self.is_random:
            return self
        other = copy.copy(self)
        other._stream = fold(0, "in order", number)
        return other

    @property
    def restarts(self) -> bool:
        """Whether every reading gives the examples from the first one on; only some streams do not."""
        return True

    def padded_with(self, token: int) -> Batches:  # noqa: ARG002
        """The same data, with token numbers filled up by `token` where it is this library that pads them."""
        return self

    def require_passes(self, count: int) -> None:  # noqa: B027
        """Refuse data that are known to give fewer passes than this, before any work is done; only iterators do."""

    def require_num_data(self) -> int:
        """N, or an error that says how to give it."""
        if self.num_data is None:
            raise ValueError(
                f"{self.name} must say how many examples it has, since the prior is weighed against their number: "
                f"a stream has no length. Give bf.Stream({self.name}, num_data=...)."
            )
        return self.num_data
