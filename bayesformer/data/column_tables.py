"""Tables: Hugging Face datasets, and mappings from a column's name to one value per example."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bayesformer.core.global_random import seed_states
from bayesformer.data.collating import collate_columns
from bayesformer.data.labels import LABEL_KEYS, SPAN
from bayesformer.data.ragged import Padding


class Columns:
    """A `ItemSource` that reads all columns of the examples of a batch at once, `table[[3, 0, 7]]`.

    Columns of text are left out, since models take numbers (a tokenised dataset still has its text), and so are those
    whose names are not in `keys`, the names of what the model takes, if they are given. Random transforms of a table
    act on whole batches, and are seeded by its first example.
    """

    def __init__(
        self,
        table: Any,
        name: str,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        padding: Padding | None = None,
        keys: Collection[str] | None = None,
    ) -> None:
        self.table, self.name, self.collate_fn = table, name, collate_fn
        self.padding, self.keys = padding or Padding(), keys

    def __len__(self) -> int:
        return len(self.table)

    def read(self, indices: list[int], seeds: Sequence[int] | None) -> Any:
        """The examples at `indices` as one dict of columns."""
        if seeds is not None:
            seed_states(seeds[0])
        columns = dict(self.table[indices])
        if self.collate_fn is not None:
            return self.collate_fn([{key: column[i] for key, column in columns.items()} for i in range(len(indices))])
        return collate_columns(numbers_of(columns, self.name, self.keys), self.padding, self.name)

    def padded_with(self, token: int) -> Columns:
        """The same table, padded with `token`."""
        return Columns(self.table, self.name, self.collate_fn, replace(self.padding, token=token), self.keys)

    def describe(self) -> str:
        """The type of the table and the names of its columns."""
        names = getattr(self.table, "column_names", ())
        return f"{type(self.table).__module__}.{type(self.table).__qualname__}{sorted(names)}"


class ColumnTable:
    """Columns held as lists, arrays or tensors, read like a Hugging Face dataset."""

    def __init__(self, columns: Mapping[str, Any], name: str) -> None:
        lengths = {key: len(column) for key, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of {name} must all have the same length; got {lengths}.")
        self.columns, self.column_names = dict(columns), list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        return {
            key: [column[i] for i in indices] if isinstance(column, list | tuple) else column[indices]
            for key, column in self.columns.items()
        }


def is_table(data: Any) -> bool:
    """Whether data are read by columns, as a Hugging Face dataset is: `column_names`, a length and `[indices]`."""
    return all(hasattr(data, name) for name in ("column_names", "__len__", "__getitem__"))


def numbers_of(columns: Mapping[str, Any], name: str, keys: Collection[str] | None = None) -> dict[str, Any]:
    """The columns that hold numbers and are labels or named in `keys`, flags as numbers."""
    found: dict[str, Any] = {}
    for key, column in columns.items():
        values = list(column) if isinstance(column, np.ndarray) and column.dtype == object else column
        first = values[0]
        if isinstance(first, str | bytes) or not (keys is None or key in keys or key in (*LABEL_KEYS, *SPAN)):
            continue
        found[key] = np.array(values) if isinstance(first, bool) else values
    if not set(found) - {*LABEL_KEYS, *SPAN}:
        raise ValueError(
            f"{name} must have a column of numbers besides its labels; got {', '.join(columns)}. "
            f"Tokenise text first, as in {name}.map(lambda row: tokenizer(row['text']))."
        )
    return found


def collate_rows(
    rows: Sequence[Mapping[str, Any]], padding: Padding, name: str, keys: Collection[str] | None = None
) -> Any:
    """A batch of the rows that a table gives one by one, when it is streamed."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return collate_columns(numbers_of(columns, name, keys), padding, name)
