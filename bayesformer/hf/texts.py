"""Text and labels as examples of token numbers, each of its own length: batches are padded when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def encode(
    rows: Iterable[Any],
    tokenizer: Any,
    text: str | tuple[str, str] = "text",
    label: str | None = "label",
    max_length: int = 128,
) -> list[dict[str, Any]]:
    """Examples {"input_ids", "attention_mask", ..., "labels"} for `bf.fit`, from a Hugging Face dataset or from dicts.

    Args:
        rows: mappings with the columns named below, or plain texts.
        tokenizer: of the model.
        text: the column with the text, or two columns for pairs of sentences.
        label: the column with the label; None takes the tokens themselves, as a language model learns them.
        max_length: tokens of an example, at most.
    """
    if not callable(tokenizer):
        raise ValueError(f"tokenizer must be that of the model; got {type(tokenizer).__name__}.")
    if isinstance(rows, str):
        raise ValueError("rows must be a list of texts or of mappings; got one text.")
    columns = (text,) if isinstance(text, str) else tuple(text)
    found = []
    for number, row in enumerate(rows):
        given: Mapping[str, Any] = {columns[0]: row} if isinstance(row, str) else row
        missing = next((name for name in columns if name not in given), None)
        if missing is not None:
            raise ValueError(f"rows must have the column {missing!r}; number {number} has {list(given)}.")
        example = dict(tokenizer(*(given[name] for name in columns), truncation=True, max_length=max_length))
        if not example["input_ids"]:
            raise ValueError(f"rows must have at least one token each; number {number} has none.")
        if label is None or isinstance(row, str):
            example["labels"] = list(example["input_ids"])
        else:
            if label not in given:
                raise ValueError(f"rows must have the column {label!r}; number {number} has {list(given)}.")
            example["labels"] = given[label]
        found.append(example)
    if not found:
        raise ValueError("rows must have at least one row; got none.")
    return found
