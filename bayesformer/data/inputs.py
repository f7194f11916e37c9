"""What a model is called with: one tensor, a tuple of positional values, or a dict of keyword values.

Tensors with at least one dimension have the examples along dim 0. Everything else (a flag such as `use_cache=False`, a
string, None, a tensor without dimensions) is the same for all examples and reaches the model unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor

from bayesformer.core.types import Batch, Inputs

CONSTANTS = (bool, int, float, str, type(None))
"""Types of Python values that a model may take as they are."""

RowName: TypeAlias = Callable[[int], str]
"""What errors call the row of a tensor with this number."""
WHOLE: RowName = "row {}".format
"""of tensors that hold all examples"""
BATCH: RowName = "row {} of a batch".format
"""of a batch whose place among all data is not known"""


def from_row(start: int) -> RowName:
    """Names of rows of a batch that begins with this example of the data."""
    return lambda row: WHOLE(start + row)


def of_examples(numbers: Sequence[int]) -> RowName:
    """Names of rows of a batch that holds these examples; a collate function may have made other rows of them."""
    return lambda row: WHOLE(numbers[row]) if row < len(numbers) else BATCH(row)


def per_example(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a tensor with the examples along dim 0."""
    return isinstance(value, Tensor) and value.dim() > 0


def leaves(inputs: Any) -> Iterator[Any]:
    """Every value of an input, tensors and others, in order."""
    if isinstance(inputs, Mapping):
        for value in inputs.values():
            yield from leaves(value)
    elif isinstance(inputs, tuple | list):
        for value in inputs:
            yield from leaves(value)
    else:
        yield inputs


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """All tensors with at least one dimension in a (nested) input; their first dimension counts examples."""
    return [value for value in leaves(inputs) if per_example(value)]


def first_tensor(inputs: Inputs) -> Tensor:
    """The first tensor of an input; its length is the number of examples."""
    return tensors_of(inputs)[0]


def map_inputs(inputs: Inputs, fn: Any) -> Inputs:
    """The input with `fn` applied to every tensor that has one row per example, in the same form."""
    return _mapped(inputs, fn, per_example)


def inputs_to(inputs: Inputs, device: torch.device | str | None) -> Inputs:
    """The input with every tensor on `device`; None leaves all where they are."""
    if device is None:
        return inputs
    return _mapped(inputs, lambda x: x.to(device), lambda value: isinstance(value, Tensor))


def as_tensors(value: Any) -> Any:
    """The value with numpy arrays as tensors that share their memory, lists as tuples and mappings as dicts."""
    if isinstance(value, np.ndarray):
        return _from_numpy(value)
    if isinstance(value, Mapping):
        return {key: as_tensors(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(as_tensors(part) for part in value)
    return value


def fixed_tensors(value: Any) -> Any:
    """Arrays and lists of numbers as tensors, detached from any graph: what is trained on gets no gradient."""
    return _mapped(as_tensors(value), lambda x: x.detach(), lambda part: isinstance(part, Tensor))


def check_inputs(inputs: Inputs, name: str, row_name: RowName = WHOLE) -> None:
    """Raise unless there is at least one example, all tensors are equally long, and all numbers are finite.

    `row_name` says what a row is called in errors, where the input is a part of the data.
    """
    values = list(leaves(inputs))
    tensors = [value for value in values if per_example(value)]
    known = all(isinstance(value, (Tensor, *CONSTANTS)) for value in values)
    if not tensors or not known:
        alone = not isinstance(inputs, Mapping | tuple | list)
        kinds = type(inputs).__name__ if alone or not values else sorted({type(value).__name__ for value in values})
        advice = " Give lists of numbers as torch.tensor(...)." if not alone and _are_numbers(values) else ""
        if any(isinstance(value, str) for value in values):
            advice = " Tokenise text first: tokenizer(texts, padding=True, return_tensors='pt')."
        raise ValueError(f"{name} must be a tensor, or a tuple or dict of tensors; got {kinds}.{advice}")
    lengths = {len(tensor) for tensor in tensors}
    if len(lengths) > 1:
        raise ValueError(f"{name} must all have the same length; got {sorted(lengths)}.")
    if 0 in lengths:
        raise ValueError(f"{name} must have at least one example; got none.")
    for tensor in tensors:
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = ~torch.isfinite(tensor)
            first = int(bad.flatten(1).any(1).nonzero()[0]) if tensor.dim() > 1 else int(bad.nonzero()[0])
            count = int(bad.sum())
            raise ValueError(f"{name} must be finite; got {count} NaN or infinite values, from {row_name(first)} on.")


def _are_numbers(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _mapped(value: Any, fn: Callable[[Tensor], Any], chosen: Callable[[Any], bool]) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(part, fn, chosen) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_mapped(part, fn, chosen) for part in value)
    return fn(value) if chosen(value) else value


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind not in "biufc":
        raise ValueError(f"arrays must hold numbers; got an array of dtype {array.dtype}.")
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def parts_of(batch: Batch, size: int) -> Iterator[Batch]:
    """The examples of a batch, at most `size` at a time, as views."""
    for start in range(0, len(batch.targets), size):
        place = slice(start, start + size)
        mask = None if batch.mask is None else batch.mask[place]
        yield Batch(map_inputs(batch.inputs, lambda x, place=place: x[place]), batch.targets[place], mask)
