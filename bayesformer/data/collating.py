"""Many examples as one batch: numbers are stacked, sequences of unequal lengths are padded, flags pass through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesformer.core.types import Batch
from bayesformer.data.graph_rows import collate_graphs, is_graph
from bayesformer.data.inputs import as_tensors
from bayesformer.data.labels import LABEL_KEYS, label_key
from bayesformer.data.ragged import Padding, pad_columns


def collate(items: Sequence[Any], padding: Padding, name: str) -> Any:
    """A batch in the form of its examples: tensor, tuple, dict or `Batch`, each tensor with the examples along dim 0.

    Graphs become a dict for `GraphModel`. Examples that are dicts may hold sequences of unequal lengths, which are
    padded (see `pad_columns`).
    """
    first = items[0]
    if is_graph(first):
        return collate_graphs(items, name)
    if isinstance(first, Batch):
        parts = zip(*items, strict=True)
        return Batch(*(collate_values(part, f"an example of {name}") for part in parts))
    if isinstance(first, Mapping):
        for number, item in enumerate(items):
            if not isinstance(item, Mapping) or item.keys() != first.keys():
                got = list(item) if isinstance(item, Mapping) else type(item).__name__
                raise ValueError(
                    f"examples of {name} must all have the same keys; the first of a batch has {list(first)}, number "
                    f"{number} of it {got}."
                )
        columns = {key: [item[key] for item in items] for key in first}
        return collate_columns(columns, padding, name)
    if isinstance(first, tuple) and len(first) > 1:
        *inputs, targets = zip(*_equally_long(items, f"an example of {name}"), strict=True)
        values = [collate_values(part, f"an example of {name}") for part in inputs]
        return (*values, collate_values(targets, f"a target of {name}", flags=False))
    return collate_values(items, f"an example of {name}")


def collate_columns(columns: Mapping[str, Any], padding: Padding, name: str) -> Any:
    """A batch of columns, {key: one value per example}: tensors, padded where rows are of unequal length."""
    left = set(columns) - {label_key(columns)} if padding.tokenizer is not None else set()  # to the tokenizer
    rows = {
        key: values if key in left else _rows(values, f"{key!r} of {name}", flags=key not in LABEL_KEYS)
        for key, values in columns.items()
    }
    return pad_columns(rows, padding, name)


def collate_values(values: Sequence[Any], where: str, flags: bool = True) -> Any:
    """One value per example as one tensor, or as a tuple or dict of them.

    With `flags`, Python booleans, text and None are settings of the model: equal in all examples, they stay one value.
    """
    first = values[0]
    if isinstance(first, Mapping):
        return {key: collate_values([value[key] for value in values], where) for key in first}
    if isinstance(first, tuple) or (isinstance(first, list) and not _numbers(first)):
        return tuple(collate_values(part, where) for part in zip(*_equally_long(values, where), strict=True))
    rows = _rows(values, where, flags)
    if isinstance(rows, list):
        shapes = sorted({tuple(row.shape) for row in rows})
        raise ValueError(
            f"{where} must have the shape of all others; got {shapes}. Give a DataLoader whose collate_fn makes a "
            "batch of a list of examples, or examples that are dicts with 'input_ids', which are padded."
        )
    return rows


def _rows(values: Any, where: str, flags: bool = True) -> Any:
    """A stacked tensor, a list of tensors where shapes differ, or the common value of flags."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, np.ndarray):
        return as_tensors(values)
    first = values[0]
    if flags and isinstance(first, bool | str | type(None)):
        if any(type(value) is not type(first) or value != first for value in values):
            raise ValueError(
                f"{where} is a flag or text, which must be the same in all examples of a batch; got "
                f"{first!r} and others. Give a value for each example as a tensor or a number."
            )
        return first
    if isinstance(first, np.generic):
        return as_tensors(np.stack(values))
    if isinstance(first, int | float):
        return torch.tensor(values, device="cpu")
    tensors = [_tensor(value, where) for value in values]
    return torch.stack(tensors) if len({tensor.shape for tensor in tensors}) == 1 else tensors


def _tensor(value: Any, where: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        return as_tensors(value)
    if isinstance(value, list | tuple) and _numbers(value):
        return torch.tensor(value, device="cpu")
    raise ValueError(
        f"{where} must be a tensor, an array, a number or a list of numbers; got {type(value).__name__}. "
        "Give a DataLoader whose collate_fn makes a batch of a list of examples."
    )


def _numbers(value: Any) -> bool:
    """Whether a list holds numbers, or lists of numbers."""
    return all(_numbers(v) if isinstance(v, list | tuple) else isinstance(v, int | float) for v in value)


def _equally_long(values: Sequence[Any], where: str) -> Sequence[Any]:
    lengths = sorted({len(value) for value in values})
    if len(lengths) > 1:
        raise ValueError(f"{where} must have the same number of entries as all others; got {lengths}.")
    return values
