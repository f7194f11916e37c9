"""Data held as tensors: any examples can be taken in one indexing operation, for one member or several in lockstep."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bayesformer.core.types import Batch, Inputs
from bayesformer.data.batches import Batches
from bayesformer.data.inputs import check_inputs, first_tensor, fixed_tensors, inputs_to, leaves, map_inputs, tensors_of
from bayesformer.data.order import bounds, epoch_order, num_steps


@dataclass(frozen=True)
class Data:
    """N examples held as tensors. `mask` is True where a target counts; None means everywhere.

    Numpy arrays become tensors, and tensors are taken without the graph they come from. Values of `inputs` that are no
    tensors (flags, strings, None) are given to the model unchanged with every batch.
    """

    inputs: Inputs
    targets: Tensor
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        for field in ("inputs", "targets", "mask"):
            object.__setattr__(self, field, fixed_tensors(getattr(self, field)))
        check_inputs(self.inputs, "inputs")
        check_targets(self.targets, self.mask, len(self))
        if self.mask is not None and not self.mask.any():
            raise ValueError("mask must keep at least one target; it keeps none.")

    def __len__(self) -> int:
        return len(first_tensor(self.inputs))

    def take(self, index: Tensor | slice) -> Batch:
        """The examples at `index` as one batch: (B, ...) for an index (B,), (L, B, ...) for an index (L, B)."""
        mask = None if self.mask is None else self.mask[index]
        return Batch(map_inputs(self.inputs, lambda x: x[index]), self.targets[index], mask)

    def subset(self, index: Tensor | slice) -> Data:
        """The examples at `index`, as data of their own."""
        return Data(*self.take(index))

    def chunks(self, size: int) -> Iterator[Batch]:
        """All examples in order, `size` at a time."""
        for start in range(0, len(self), size):
            yield self.take(slice(start, start + size))

    def to(self, device: torch.device | str) -> Data:
        """The same data with every tensor on another device."""
        return Data(*batch_to(Batch(self.inputs, self.targets, self.mask), device))

    def fingerprint(self) -> str:
        """A hash of every value: says whether two runs saw the same data."""
        digest = hashlib.sha256()
        for value in [*leaves(self.inputs), self.targets, *([] if self.mask is None else [self.mask])]:
            update_hash(digest, value)
        return digest.hexdigest()[:16]


class InMemory(Batches):
    """Batches of `Data`. Tensors stay on their device; each batch is moved where it is wanted."""

    resumable: Literal["exact", "epoch"] = "exact"

    def __init__(self, data: Data, name: str = "data") -> None:
        self.data, self.name, self.num_data = data, name, len(data)

    @property
    def tensors(self) -> Data:
        """The data that were given, all of them in memory."""
        return self.data

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
        order = epoch_order(len(self.data), seed=seed, epoch=epoch, member=member, replacement=replacement)
        return self._along(order, batch_size, start, device, join_single)

    def lockstep(
        self,
        batch_size: int,
        *,
        seed: int,
        epoch: int,
        members: Sequence[int],
        replacement: bool = False,
        start: int = 0,
        device: torch.device | str | None = None,
        join_single: bool = False,
    ) -> Iterator[Batch]:
        """Batches (L, B, ...) for L members trained together: row l is what `epoch` gives member l."""
        count = len(self.data)
        orders = [epoch_order(count, seed=seed, epoch=epoch, member=m, replacement=replacement) for m in members]
        return self._along(torch.stack(orders), batch_size, start, device, join_single)  # (L, N)

    def in_order(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Batch]:
        """All examples in order, as views of the tensors where they are not moved."""
        for begin, end in bounds(len(self.data), batch_size):
            yield batch_to(self.data.take(slice(begin, end)), device)

    def steps(self, batch_size: int, *, join_single: bool = False) -> int:
        """The number of batches in one epoch."""
        return num_steps(len(self.data), batch_size, join_single=join_single)

    def fingerprint(self) -> str:
        """The hash of every value of inputs, targets and mask."""
        return self.data.fingerprint()

    def first(self, count: int) -> Batch:
        """The first `count` examples as one batch, or all there are if they are fewer."""
        return self.data.take(slice(0, count))

    def _along(
        self, order: Tensor, batch_size: int, start: int, device: torch.device | str | None, join_single: bool
    ) -> Iterator[Batch]:
        order = order.to(self.data.targets.device)
        for begin, end in bounds(len(self.data), batch_size, start=start, join_single=join_single):
            yield batch_to(self.data.take(order[..., begin:end]), device)


def batch_to(batch: Batch, device: torch.device | str | None) -> Batch:
    """The batch with every tensor on `device`; None leaves all where they are."""
    if device is None:
        return batch
    mask = None if batch.mask is None else batch.mask.to(device)
    return Batch(inputs_to(batch.inputs, device), batch.targets.to(device), mask)


def join(parts: Sequence[Batch], name: str) -> Batch:
    """Several batches as one; values that are no tensors are those of the first."""
    if len(parts) == 1:
        return parts[0]
    shapes = [[tuple(t.shape[1:]) for t in [*tensors_of(part.inputs), part.targets]] for part in parts]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"{name} must have batches of one shape to be held in memory; got {shapes[0]} and others.")
    columns = zip(*(tensors_of(part.inputs) for part in parts), strict=True)
    joined = iter([torch.cat(column) for column in columns])
    inputs = map_inputs(parts[0].inputs, lambda _: next(joined))
    masks = [part.mask for part in parts if part.mask is not None]
    return Batch(inputs, torch.cat([part.targets for part in parts]), torch.cat(masks) if masks else None)


def check_targets(targets: Any, mask: Any, count: int) -> None:
    """Raise unless targets are a tensor of `count` rows and the mask is boolean with their leading shape."""
    if isinstance(targets, Tensor) and targets.dim() == 0:
        raise ValueError(
            "targets must be a tensor with one row per example; got a single number, the target of one example. A "
            "DataLoader with batch_size=None gives examples one by one: give it a batch_size, or its dataset itself."
        )
    if not isinstance(targets, Tensor):
        raise ValueError(f"targets must be a tensor with one row per example; got {type(targets).__name__}.")
    if len(targets) != count:
        raise ValueError(f"targets must be as many as inputs; got {len(targets)} targets, {count} inputs.")
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise ValueError(f"mask must be a boolean tensor; got {type(mask).__name__}.")
    if mask.dtype != torch.bool or mask.shape != targets.shape[: mask.dim()]:
        raise ValueError(
            f"mask must be boolean with the leading shape of targets {tuple(targets.shape)}; "
            f"got {mask.dtype} {tuple(mask.shape)}."
        )


def update_hash(digest: Any, value: Any) -> None:
    """Add a value to a hashlib digest: dtype, shape and bytes of a tensor, the text of anything else."""
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(f"{type(value).__name__}{value!r}".encode())
