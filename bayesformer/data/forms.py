"""From what people have to batches: the one place that looks at the form of data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from bayesformer.core.types import Batch
from bayesformer.data.batches import Batches
from bayesformer.data.collating import collate as collate_items
from bayesformer.data.column_tables import Columns, ColumnTable, collate_rows, is_table
from bayesformer.data.in_memory import Data, InMemory, join
from bayesformer.data.indexed import Indexed
from bayesformer.data.inputs import as_tensors
from bayesformer.data.labels import drop_labels, labels_in, split_labels
from bayesformer.data.ragged import Padding, is_ragged
from bayesformer.data.streams import Stream, Streamed, length_of
from bayesformer.data.torch_datasets import (
    Items,
    examples_of,
    is_indexable,
    is_loader,
    loading_of,
    merges_graphs,
    rows_of,
)
from bayesformer.data.unlabelled import InputBatches, ReadInputs, TensorInputs

Collate: TypeAlias = Callable[[list[Any]], Any]
"""Makes a batch of a list of examples, as a DataLoader's collate_fn or a transformers data collator."""

DataLike: TypeAlias = (
    Batches | Data | tuple[Any, ...] | Mapping[str, Any] | Dataset[Any] | Stream | Iterable[Any] | list[Any]
)
"""Every form of data: see `as_batches`."""

FORMS = (
    "Data, a pair (inputs, targets), a dict with labels or targets, a torch Dataset or DataLoader, a Hugging Face "
    "dataset, a list of examples, or bf.Stream(iterable, num_data=...)"
)


def as_batches(
    data: DataLike,
    name: str = "data",
    *,
    num_data: int | None = None,
    collate: Collate | None = None,
    tokenizer: Any = None,
    keys: Collection[str] | None = None,
) -> Batches:
    """Batches of any form of data, read when they are needed.

    - `Data`, (inputs, targets), (inputs, targets, boolean mask), a dict of tensors or arrays with labels: `InMemory`
    - a map-style Dataset or a list with examples (x, y), (x1, x2, ..., y), dicts with labels, `Batch` or graphs of
      PyTorch Geometric (for a `GraphModel`); a Hugging Face dataset; a dict of lists; a DataLoader with a plain order
      (its collate_fn and batch size are kept): `Indexed`
    - an IterableDataset, an iterator, a `Stream`, a DataLoader with a sampler of its own: `Streamed`

    Args:
        data: the data.
        name: what error messages call them.
        num_data: N of a stream; must agree with the length of anything else.
        collate: makes a batch of a list of examples.
        tokenizer: pads ragged examples by its own `pad`.
        keys: names of the model's inputs; columns of a table under other names are left out.
    """
    if isinstance(data, Batches):
        return data
    if isinstance(data, Stream):
        inner = num_data if data.num_data is None else data.num_data
        examples: Any = data.examples
        return as_batches(examples, name, num_data=inner, collate=collate, tokenizer=tokenizer, keys=keys)
    tensors = _as_data(data, name)
    batches = InMemory(tensors, name) if tensors is not None else _read(data, name, num_data, collate, tokenizer, keys)
    if num_data is not None and batches.num_data != num_data:
        raise ValueError(f"num_data must be the number of examples of {name}, {batches.num_data}; got {num_data}.")
    return batches


def as_inputs(
    inputs: Any,
    name: str = "inputs",
    *,
    num_data: int | None = None,
    collate: Collate | None = None,
    tokenizer: Any = None,
    keys: Collection[str] | None = None,
) -> InputBatches:
    """Inputs of the same forms for prediction, read batch by batch; targets are left out where there are any.

    A tensor, or a tuple or dict of tensors, is what the model is called with. Of examples of a Dataset or list that are
    tuples of two or more, the last entry is the target, as in training.
    """
    if isinstance(inputs, InMemory):
        return TensorInputs(inputs.data.inputs, name, inputs.data.targets, inputs.data.mask)
    if isinstance(inputs, Stream):
        num_data, inputs = inputs.num_data or num_data, inputs.examples
    if isinstance(inputs, Data | Batch):
        return TensorInputs(as_tensors(inputs.inputs), name, *labels_in(inputs))
    if type(inputs) is TensorDataset:
        return TensorInputs(drop_labels(inputs.tensors, name), name, *labels_in(inputs.tensors))
    if isinstance(inputs, Tensor | np.ndarray | tuple) or (isinstance(inputs, Mapping) and not _is_lists(inputs)):
        pair = isinstance(inputs, tuple) and len(inputs) > 1 and isinstance(inputs[0], Mapping | tuple | list)
        if pair or isinstance(inputs, Mapping):
            return TensorInputs(drop_labels(inputs, name), name, *labels_in(inputs))
        return TensorInputs(as_tensors(inputs), name)
    reader = inputs if isinstance(inputs, Batches) else _read(inputs, name, num_data, collate, tokenizer, keys)
    if not isinstance(reader, Indexed | Streamed):
        raise ValueError(f"{name} must be data that can be read in order; got {type(reader).__name__}.")
    return ReadInputs(reader)


def as_data(data: DataLike, name: str = "data") -> Data:
    """All of the data as tensors in memory, for what needs them at once."""
    batches = as_batches(data, name)
    if batches.tensors is not None:
        return batches.tensors
    return Data(*join(list(batches.in_order(batches.num_data or 256)), name))


def _as_data(data: Any, name: str) -> Data | None:
    """The data as tensors if that is what they are already."""
    if isinstance(data, Data):
        return data
    if isinstance(data, Batch):
        return Data(*data)
    if type(data) is TensorDataset:  # a subclass may change what an item is
        return Data(*split_labels(data.tensors, name))
    if isinstance(data, Mapping) and not _is_lists(data):
        return Data(*split_labels(_checked(data, name), name))
    if isinstance(data, tuple):
        return _from_tuple(data, name)
    return None


def _named(name: str, *parts: Any) -> Data:
    """`Data` of these parts; other data than the training data are named in its errors."""
    try:
        return Data(*parts)
    except ValueError as error:
        raise ValueError(str(error) if name == "data" else f"{name}: {error}") from error


def _from_tuple(data: tuple[Any, ...], name: str) -> Data:
    if len(data) == 2:
        return _named(name, *data)
    mask = as_tensors(data[2]) if len(data) == 3 else None
    if len(data) == 3 and (mask is None or (isinstance(mask, Tensor) and mask.dtype == torch.bool)):
        return _named(name, data[0], data[1], mask)
    got = ", ".join(str(part.dtype) if isinstance(part, Tensor) else type(part).__name__ for part in data)
    raise ValueError(
        f"{name} must be a pair (inputs, targets), or (inputs, targets, mask) with a boolean mask; got {len(data)} "
        f"entries ({got}). Several inputs are a tuple or dict of their own: ((ids, attention_mask), labels) or "
        "{'input_ids': ids, 'attention_mask': attention_mask, 'labels': labels}."
    )


def _checked(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Refuse a mapping from splits to datasets, as Hugging Face loads them."""
    tables = [key for key, value in data.items() if is_table(value) or isinstance(value, Dataset)]
    if tables:
        raise ValueError(f"{name} must be one dataset; got several: {', '.join(tables)}. Give {name}[{tables[0]!r}].")
    return data


def _is_lists(data: Mapping[str, Any]) -> bool:
    """Whether a mapping holds columns as Python lists, as a tokenizer gives them."""
    return any(isinstance(value, list) for value in data.values())


def _read(
    data: Any, name: str, num_data: int | None, collate: Collate | None, tokenizer: Any, keys: Collection[str] | None
) -> Indexed | Streamed:
    """Data that are read when they are needed."""
    if collate is None and hasattr(data, "collate_fn") and is_loader(data) and not merges_graphs(data):
        collate = data.collate_fn
    if hasattr(data, "edge_index"):
        raise ValueError(
            f"{name} must be {FORMS}; got a graph, {type(data).__name__}. A graph is one example: its tensors with "
            "an axis of length 1, {'x': data.x[None], 'edge_index': data.edge_index[None], 'labels': data.y[None]}"
            ", with labels -100 for nodes that do not count, and a module that takes that axis away."
        )
    padding = Padding(tokenizer, always_mask=isinstance(data, list) and is_ragged(data))
    if is_loader(data):
        loading = loading_of(data)
        if loading is not None:
            return Indexed(Items(data.dataset, name, collate, padding), name, loading)
        if merges_graphs(data):
            raise ValueError(
                f"{name} must be a list or Dataset of graphs, or a DataLoader of PyTorch Geometric without a sampler "
                "of its own; its batches are merged graphs, which cannot be cut into examples. Give its dataset."
            )
        return Streamed(data, examples_of(data) if num_data is None else num_data, None, name, rows_of(data))
    if isinstance(data, Mapping):
        data = ColumnTable(data, name)
    if is_table(data):
        return Indexed(Columns(data, name, collate, padding, keys), name)
    if is_indexable(data) and not isinstance(data, str | bytes | Tensor | np.ndarray):
        return Indexed(Items(data, name, collate, padding), name)
    if hasattr(data, "__iter__") and not isinstance(data, str | bytes | Tensor | np.ndarray):
        count = length_of(data) if num_data is None else num_data
        default = partial(collate_rows, keys=keys) if hasattr(data, "column_names") else collate_items
        return Streamed(data, count, collate or partial(default, padding=padding, name=name), name)
    advice = " Tokenise text first, as a list of examples." if isinstance(data, str) else ""
    raise ValueError(f"{name} must be {FORMS}; got {type(data).__name__}.{advice}")
