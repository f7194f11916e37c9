"""Inputs for prediction: every form of data, its targets left out, batch by batch in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from bayesformer.core.types import Inputs
from bayesformer.data.inputs import check_inputs, first_tensor, inputs_to, map_inputs
from bayesformer.data.labels import drop_labels
from bayesformer.data.order import bounds


class InputBatches(Protocol):
    """Inputs that are read batch by batch; only one batch is held at a time."""

    num_data: int | None
    """the number of examples; None for a stream whose number was not given"""

    def in_order(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Inputs]:
        """Every example once, in the data's own order. A DataLoader keeps its own batch size."""
        ...

    def first(self, count: int) -> Inputs:
        """At most `count` examples, for checks; a stream gives them again when it is read."""
        ...


class TensorInputs:
    """Inputs held as tensors; a batch is a view of them."""

    def __init__(self, inputs: Inputs, name: str = "inputs") -> None:
        check_inputs(inputs, name)
        self.inputs = inputs
        self.num_data: int | None = len(first_tensor(inputs))

    def in_order(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Inputs]:
        """Inputs of every example once, in order, in batches of `batch_size`."""
        for begin, end in bounds(len(first_tensor(self.inputs)), batch_size):
            yield inputs_to(map_inputs(self.inputs, lambda x, a=begin, b=end: x[a:b]), device)

    def first(self, count: int) -> Inputs:
        """Inputs of the first `count` examples, or of all there are if they are fewer."""
        return map_inputs(self.inputs, lambda x: x[:count])


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


class ReadInputs:
    """Inputs read from a dataset or stream; its targets, if any, are left out."""

    def __init__(self, reader: RawReader) -> None:
        self.reader, self.num_data = reader, reader.num_data

    def in_order(self, batch_size: int, device: torch.device | str | None = None) -> Iterator[Inputs]:
        """Every example once, in the data's own order."""
        for raw in self.reader.raw_in_order(batch_size):
            yield inputs_to(drop_labels(raw, self.reader.name), device)

    def first(self, count: int) -> Inputs:
        """The first examples, at most `count`."""
        return map_inputs(drop_labels(self.reader.raw_first(count), self.reader.name), lambda x: x[:count])
