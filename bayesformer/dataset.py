"""Data in memory: inputs, targets and which targets count.

`as_data` accepts what people have (a pair of tensors, a dict batch with labels, a torch dataset) and checks
it once, so that no step of training has to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from bayesformer.core.types import Batch, Inputs

LABEL_KEYS = ("labels", "targets")


@dataclass(frozen=True)
class Data:
    """N examples held as tensors. `mask` is True where a target counts; None means everywhere."""

    inputs: Inputs
    targets: Tensor
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        check_inputs(self.inputs, "inputs")
        count = len(self)
        if len(self.targets) != count:
            raise ValueError(f"targets must be as many as inputs; got {len(self.targets)} targets, {count} inputs.")
        if self.mask is None:
            return
        if self.mask.dtype != torch.bool or self.mask.shape != self.targets.shape[: self.mask.dim()]:
            raise ValueError(
                f"mask must be boolean with the leading shape of targets {tuple(self.targets.shape)}; "
                f"got {self.mask.dtype} {tuple(self.mask.shape)}."
            )
        if not self.mask.any():
            raise ValueError("mask must keep at least one target; it keeps none.")

    def __len__(self) -> int:
        return len(first_tensor(self.inputs))

    def take(self, index: Tensor | slice) -> Batch:
        """The examples at `index`, as one batch."""
        mask = None if self.mask is None else self.mask[index]
        return Batch(map_inputs(self.inputs, lambda x: x[index]), self.targets[index], mask)

    def subset(self, index: Tensor | slice) -> Data:
        """The examples at `index`, as data."""
        return Data(*self.take(index))

    def chunks(self, size: int) -> Iterator[Batch]:
        """All examples in order, `size` at a time."""
        for start in range(0, len(self), size):
            yield self.take(slice(start, start + size))

    def to(self, device: torch.device | str) -> Data:
        """The same data on another device."""
        mask = None if self.mask is None else self.mask.to(device)
        return Data(map_inputs(self.inputs, lambda x: x.to(device)), self.targets.to(device), mask)

    def fingerprint(self) -> str:
        """A hash of every value: says whether two runs saw the same data."""
        digest = hashlib.sha256()
        for tensor in [*tensors_of(self.inputs), self.targets, *([] if self.mask is None else [self.mask])]:
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


DataLike: TypeAlias = Data | tuple[Any, ...] | Mapping[str, Tensor] | Dataset[Any]


def as_data(data: DataLike, name: str = "data") -> Data:
    """Data from a pair (inputs, targets), a dict with labels, or a map-style torch dataset."""
    if isinstance(data, Data):
        return data
    if isinstance(data, Mapping):
        return _from_mapping(data, name)
    if isinstance(data, tuple) and len(data) in {2, 3}:
        inputs = dict(data[0]) if isinstance(data[0], Mapping) else data[0]
        return Data(inputs, *data[1:])
    if isinstance(data, Dataset) and hasattr(data, "__len__"):
        items = [data[i] for i in range(len(data))]
        if not items:
            raise ValueError(f"{name} must have at least one example; got none.")
        collated = default_collate(items)
        return as_data(tuple(collated) if isinstance(collated, list) else collated, name)
    raise ValueError(
        f"{name} must be Data, a pair (inputs, targets), a dict with {' or '.join(LABEL_KEYS)}, or a torch "
        f"dataset with a length; got {type(data).__name__}."
    )


def check_inputs(inputs: Inputs, name: str) -> None:
    """Not empty, equally long, finite."""
    tensors = tensors_of(inputs)
    if not tensors or not all(isinstance(t, Tensor) for t in tensors):
        kinds = type(inputs).__name__ if not tensors else [type(t).__name__ for t in tensors]
        raise ValueError(f"{name} must be a tensor, or a tuple or dict of tensors; got {kinds}.")
    lengths = {len(t) for t in tensors}
    if len(lengths) > 1:
        raise ValueError(f"{name} must all have the same length; got {sorted(lengths)}.")
    if 0 in lengths:
        raise ValueError(f"{name} must have at least one example; got none.")
    for tensor in tensors:
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(f"{name} must be finite; got {bad} NaN or infinite values.")


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """The tensors of an input, whatever its form."""
    if isinstance(inputs, Tensor):
        return [inputs]
    if isinstance(inputs, Mapping):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, tuple | list) else []


def first_tensor(inputs: Inputs) -> Tensor:
    """A tensor whose length is the number of examples."""
    return tensors_of(inputs)[0]


def map_inputs(inputs: Inputs, fn: Any) -> Inputs:
    """`fn` on every tensor of an input, keeping its form."""
    if isinstance(inputs, Tensor):
        return fn(inputs)
    if isinstance(inputs, Mapping):
        return {key: fn(value) for key, value in inputs.items()}
    return tuple(fn(value) for value in inputs)


def _from_mapping(data: Mapping[str, Tensor], name: str) -> Data:
    keys = [key for key in LABEL_KEYS if key in data]
    if not keys:
        raise ValueError(f"{name} must have a key {' or '.join(LABEL_KEYS)}; got {', '.join(data)}.")
    inputs = {key: value for key, value in data.items() if key != keys[0]}
    return Data(inputs, data[keys[0]])
