"""All data as one batch: what a full-batch algorithm is given in the place of a batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bayesformer.core.types import Batch
from bayesformer.data.batches import Batches
from bayesformer.data.inputs import tensors_of

KEPT = 2**30  # bytes of batches that are kept once they were read


class WholeData:
    """Stands for all examples in a fixed order; iterating gives batches that together hold each of them once.

    An objective evaluates it as one sum over all examples, chunk after chunk, so that memory is that of a chunk. What
    was read and moved to the device is kept as long as it is at most 1 GiB, larger data are read anew in every pass.

    Args:
        data: which must give the same examples in every reading.
        batch_size: examples per chunk; the data's own batch size replaces it.
        device: where chunks are put.
    """

    def __init__(self, data: Batches, batch_size: int, device: torch.device | str | None = None) -> None:
        if not data.restarts:
            raise ValueError(
                f"{data.name} must be readable again and again for gradients of all data; it can be read once only. "
                "Give an object whose __iter__ starts again, a dataset that is read by index, or tensors."
            )
        self.data, self.batch_size, self.device = data, batch_size, device
        self._batches: list[Batch] | None = None
        self._too_large = False

    def __iter__(self) -> Iterator[Batch]:
        if self._batches is not None:
            yield from self._batches
            return
        kept, size = list[Batch](), 0
        for batch in self.data.in_order(self.batch_size, self.device):
            if not self._too_large:
                kept.append(batch)
                size += _bytes(batch)
                self._too_large = size > KEPT
            if self._too_large:
                kept.clear()
            yield batch
        if not self._too_large:
            self._batches = kept


def _bytes(batch: Batch) -> int:
    every = [*tensors_of(batch.inputs), batch.targets, *([] if batch.mask is None else [batch.mask])]
    return sum(tensor.numel() * tensor.element_size() for tensor in every)
