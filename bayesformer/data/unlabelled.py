"""Inputs for prediction: every form of data, its targets left out, batch by batch in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bayesformer.core.types import Inputs
from bayesformer.data.inputs import WHOLE, RowName, check_inputs, first_tensor, from_row, inputs_to, map_inputs
from bayesformer.data.labels import drop_labels, labels_in
from bayesformer.data.order import bounds


class Asked(NamedTuple):
    """Some inputs, and their labels where the data have any, with the mask that says which of these count."""

    inputs: Inputs
    labels: Tensor | None = None
    mask: Tensor | None = None


class InputBatches(Protocol):
    """Inputs that are read batch by batch; only one batch is held at a time."""

    num_data: int | None
    """the number of examples; None for a stream whose number was not given"""

    def in_order(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Inputs]:
        """Every example once, in the data's own order. A DataLoader keeps its own batch size."""
        ...

    def labelled(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Asked]:
        """Batches of inputs in the data's own order, with their labels and masks; None where the data have none."""
        ...

    def first(self, count: int) -> Inputs:
        """At most `count` examples, for checks; a stream gives them again when it is read."""
        ...

    def first_labelled(self, count: int) -> Asked:
        """At most `count` examples with their labels and masks, for checks."""
        ...

    def padded_with(self, token: int) -> InputBatches:
        """The same inputs, with token numbers filled up by `token` where it is this library that pads them."""
        ...


class TensorInputs:
    """Inputs held as tensors; a batch is a view of them."""

    def __init__(
        self, inputs: Inputs, name: str = "inputs", labels: Tensor | None = None, mask: Tensor | None = None
    ) -> None:
        check_inputs(inputs, name)
        self.inputs, self.labels, self.mask = inputs, labels, mask
        self.num_data: int | None = len(first_tensor(inputs))

    def in_order(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Inputs]:
        """Inputs of every example once, in order, in batches of `batch_size`."""
        for asked in self.labelled(batch_size, device):
            yield asked.inputs

    def labelled(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Asked]:
        """Batches of inputs, in order, with their labels and masks; those are None where the data have none."""
        for begin, end in bounds(len(first_tensor(self.inputs)), batch_size):
            inputs = inputs_to(map_inputs(self.inputs, lambda x, a=begin, b=end: x[a:b]), device)
            own = (None if x is None else x[begin:end].to(device or x.device) for x in (self.labels, self.mask))
            yield Asked(inputs, *own)

    def first(self, count: int) -> Inputs:
        """Inputs of the first `count` examples, or of all there are if they are fewer."""
        return map_inputs(self.inputs, lambda x: x[:count])

    def first_labelled(self, count: int) -> Asked:
        """The first `count` examples with their labels and masks; those are None where the data have none."""
        return next(self.labelled(count))

    def padded_with(self, token: int) -> TensorInputs:  # noqa: ARG002
        """These inputs: tensors have been padded already."""
        return self


class RawReader(Protocol):
    """What `Indexed` and `Streamed` offer beyond labelled batches."""

    name: str
    num_data: int | None

    def raw_in_order(self, batch_size: int) -> Iterator[Any]:
        """Batches as the data give them."""
        ...

    def raw_first(self, count: int) -> Any:
        """The first examples as the data give them."""
        ...

    def padded_with(self, token: int) -> RawReader:
        """The same data, padded with `token`."""
        ...


class ReadInputs:
    """Inputs read from a dataset or stream; its targets, if any, are left out."""

    def __init__(self, reader: RawReader) -> None:
        self.reader, self.num_data = reader, reader.num_data

    def in_order(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Inputs]:
        """Every example once, in the data's own order."""
        for asked in self.labelled(batch_size, device):
            yield asked.inputs

    def labelled(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Asked]:
        """Batches of inputs in the data's own order, with their labels; None where the data have none."""
        seen = 0
        for raw in self.reader.raw_in_order(batch_size):
            asked = asked_in(raw, self.reader.name, device, from_row(seen))
            seen += len(first_tensor(asked.inputs))
            yield asked

    def first(self, count: int) -> Inputs:
        """The first examples, at most `count`."""
        return self.first_labelled(count).inputs

    def first_labelled(self, count: int) -> Asked:
        """At most `count` examples with their labels; None where the data have none."""
        inputs, *labels = asked_in(self.reader.raw_first(count), self.reader.name)
        return Asked(map_inputs(inputs, lambda x: x[:count]), *(None if x is None else x[:count] for x in labels))

    def padded_with(self, token: int) -> ReadInputs:
        """The same inputs, padded with `token`."""
        return ReadInputs(self.reader.padded_with(token))


def asked_in(raw: Any, name: str, device: torch.device | str | None = None, row_name: RowName = WHOLE) -> Asked:
    """Inputs with their labels and mask, where there are any."""
    labels = (x if x is None or device is None else x.to(device) for x in labels_in(raw))
    return Asked(inputs_to(drop_labels(raw, name, row_name), device), *labels)
