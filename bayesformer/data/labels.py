"""Which part of an example is the target: the rules are the same for every form of data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bayesformer.core.types import Batch, Inputs
from bayesformer.data.in_memory import Data, check_targets
from bayesformer.data.inputs import WHOLE, RowName, as_tensors, check_inputs, first_tensor, fixed_tensors

LABEL_KEYS = ("labels", "targets", "label", "label_ids")
"""Keys of a dict example that hold its target; the first one present does."""
SPAN = ("start_positions", "end_positions")
"""Keys that hold it in two parts, where a dict has none of these: an answer in a text, as transformers names it."""
KEYS = "labels, targets, label or label_ids"


def label_key(keys: Any) -> str | None:
    """The key that holds the targets, None if there is none."""
    return next((key for key in LABEL_KEYS if key in keys), None)


def split_labels(raw: Any, name: str, row_name: RowName = WHOLE) -> Batch:
    """A batch of inputs and targets from what a collate function gives, checked; `row_name` names its rows.

    A dict has its targets under one of `LABEL_KEYS`, or under both keys of `SPAN`, as (B, 2). Of a tuple or list the
    last entry is the target and all others are inputs, however many; a mask is given by `Batch(inputs, targets, mask)`
    only.
    """
    batch = _split(raw, name)
    check_inputs(batch.inputs, _inputs_of(name), row_name)
    check_targets(batch.targets, batch.mask, len(first_tensor(batch.inputs)))
    return batch


def drop_labels(raw: Any, name: str, row_name: RowName = WHOLE) -> Inputs:
    """The inputs alone, checked: targets are left out where there are any, by the rules of `split_labels`."""
    if isinstance(raw, Batch | Data):
        inputs = as_tensors(raw.inputs)
    elif isinstance(raw, Mapping):
        inputs = {key: value for key, value in _with_span(as_tensors(raw)).items() if key not in LABEL_KEYS}
    elif isinstance(raw, tuple | list):
        parts = as_tensors(raw)
        inputs = parts[0] if len(parts) <= 2 else parts[:-1]
    else:
        inputs = as_tensors(raw)
    check_inputs(inputs, _inputs_of(name), row_name)
    return inputs


def _inputs_of(name: str) -> str:
    return name if name == "inputs" else f"inputs of {name}"


def labels_in(raw: Any) -> tuple[Tensor | None, Tensor | None]:
    """Targets and mask by the same rules, unchecked; None where there are none, or where they are no tensor."""
    found: Any = None
    mask: Any = None
    if isinstance(raw, Batch | Data):
        found, mask = raw.targets, raw.mask
    elif isinstance(raw, Mapping):
        whole = _with_span(as_tensors(raw))
        key = label_key(whole)
        found = None if key is None else whole[key]
    elif isinstance(raw, tuple | list) and len(raw) >= 2:
        found = raw[-1]
    known = tuple(as_tensors(part) for part in (found, mask))
    return tuple(part if isinstance(part, Tensor) else None for part in known)  # type: ignore[return-value]


def _with_span(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A dict whose targets come in two parts with these as labels (B, 2); any other as it is."""
    parts: list[Any] = [values.get(key) for key in SPAN]
    if label_key(values) is not None or not all(isinstance(part, Tensor) for part in parts):
        return values
    others = {key: value for key, value in values.items() if key not in SPAN}
    return {**others, LABEL_KEYS[0]: torch.stack([part.reshape(len(part)) for part in parts], 1)}


def _split(raw: Any, name: str) -> Batch:
    if isinstance(raw, Batch | Data):
        return Batch(*(fixed_tensors(part) for part in (raw.inputs, raw.targets, raw.mask)))
    if isinstance(raw, Mapping):
        values = _with_span(fixed_tensors(raw))
        key = label_key(values)
        if key is None:
            raise ValueError(f"{name} must have a key {KEYS}; got {', '.join(map(str, raw))}.")
        return Batch({k: value for k, value in values.items() if k != key}, values[key])
    if isinstance(raw, tuple | list) and len(raw) >= 2:
        *inputs, targets = fixed_tensors(raw)
        if len(inputs) > 1 and isinstance(targets, Tensor) and targets.dtype == torch.bool:
            raise ValueError(
                f"examples of {name} end with a boolean entry, which may be a mask or a label: "
                "give bf.Batch(inputs, targets, mask) for a mask, or integer labels."
            )
        return Batch(inputs[0] if len(inputs) == 1 else tuple(inputs), targets)
    raise ValueError(
        f"examples of {name} must be pairs (inputs, target) or dicts with {KEYS}; got {type(raw).__name__}."
    )
