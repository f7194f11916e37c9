"""Sequences of unequal lengths, padded to the longest of their batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesformer.core.types import Batch
from bayesformer.data.labels import label_key

IGNORED = -100
"""The integer label that likelihoods leave out, as torch's cross entropy does."""
TOKENS = ("input_ids", "decoder_input_ids")
"""Inputs that are token numbers."""
SEQUENCES = ("input_ids", "inputs_embeds", "input_values")
"""Inputs from whose lengths an attention mask can be made."""


@dataclass(frozen=True)
class Padding:
    """How ragged examples are padded: by a tokenizer's own `pad`, or on the right with `token` and zeros."""

    tokenizer: Any = None
    """pads the inputs if given, on its own side with its own padding token"""
    always_mask: bool = False
    """make an attention mask for batches of equal lengths as well"""
    token: int = 0
    """what fills up token numbers without a tokenizer: some models look for their padding token"""

    @property
    def left(self) -> bool:
        """Whether padding comes before the sequence."""
        return getattr(self.tokenizer, "padding_side", "right") == "left"


def pad_columns(columns: Mapping[str, Any], padding: Padding, name: str) -> Any:
    """A dict batch, with ragged columns (lists of tensors (T_i, ...)) padded to tensors (B, T, ...).

    With a tokenizer, columns of inputs may also be lists of token lists, as its `pad` takes them.

    Token numbers are padded with `padding.token`, other inputs with 0, or all of them by the tokenizer, and integer
    labels with -100. Real-valued labels are padded with 0, and a `Batch` is returned whose mask leaves the padding out.
    An attention mask is made where there is none.
    """
    key = label_key(columns)
    inputs = {k: value for k, value in columns.items() if k != key}
    inputs = _pad_by_tokenizer(inputs, padding.tokenizer) if padding.tokenizer else _pad_inputs(inputs, padding, name)
    if key is None:
        return inputs
    labels = columns[key]
    if not isinstance(labels, list):
        return {**inputs, key: labels}
    if not labels[0].is_floating_point():
        return {**inputs, key: pad_rows(labels, IGNORED, padding.left)}
    mask = pad_rows([torch.ones(len(row), dtype=torch.bool, device=row.device) for row in labels], 0, padding.left)
    return Batch(inputs, pad_rows(labels, 0, padding.left), mask)


def pad_rows(rows: Sequence[Tensor], value: float, left: bool = False) -> Tensor:
    """(B, T, ...): rows (T_i, ...) filled up with `value` to the longest."""
    if len({(row.dim(), row.shape[1:]) for row in rows}) > 1:
        shapes = sorted({tuple(row.shape) for row in rows})
        raise ValueError(f"sequences can be padded if they differ in length only; got shapes {shapes}.")
    longest = max(len(row) for row in rows)
    padded = rows[0].new_full((len(rows), longest, *rows[0].shape[1:]), value)
    for line, row in zip(padded, rows, strict=True):
        begin = longest - len(row) if left else 0
        line[begin : begin + len(row)] = row
    return padded


def is_ragged(items: Sequence[Any]) -> bool:
    """Whether the token lists of dict examples have unequal lengths."""
    first = items[0] if len(items) else None
    if not isinstance(first, Mapping):
        return False
    lengths = {key: len(value) for key, value in first.items() if key in SEQUENCES and hasattr(value, "__len__")}
    return any(len(item[key]) != count for key, count in lengths.items() for item in items if key in item)


def _pad_inputs(inputs: dict[str, Any], padding: Padding, name: str) -> dict[str, Any]:
    ragged = [key for key, value in inputs.items() if isinstance(value, list)]
    source = next((key for key in SEQUENCES if key in inputs), None)
    if ragged and source is None and "attention_mask" not in inputs:
        shapes = sorted({tuple(row.shape) for row in inputs[ragged[0]]})
        raise ValueError(
            f"{ragged[0]!r} of {name} must have one shape, since an attention mask for padding can be made from "
            f"{', '.join(SEQUENCES)} only; got {shapes}. Give a DataLoader whose "
            "collate_fn makes a batch of a list of examples."
        )
    fill = {key: padding.token if key in TOKENS else 0 for key in ragged}
    padded = {key: pad_rows(value, fill[key]) if key in ragged else value for key, value in inputs.items()}
    if "attention_mask" in inputs or source is None or not (source in ragged or padding.always_mask):
        return padded
    rows = inputs[source]
    ones = [torch.ones(len(row), dtype=torch.int64, device=row.device) for row in rows]
    return {**padded, "attention_mask": pad_rows(ones, 0)}


def _pad_by_tokenizer(inputs: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    flags = {key: value[0] for key, value in inputs.items() if isinstance(value[0], bool | str | type(None))}
    rest = {key: value for key, value in inputs.items() if key not in flags}
    return {**dict(tokenizer.pad(rest, return_tensors="pt")), **flags}
