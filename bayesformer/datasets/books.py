"""Books as sequences of tokens: the first three quarters to learn, a tenth to choose by, the rest to judge by.

The files are `books/NAME.txt.xz`, plain text, in the folder that BAYESFORMER_DATA names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesformer.datasets.contents import read_content
from bayesformer.datasets.places import locate

SHARES = (0.75, 0.85)
"""where validation and test begin in the text"""


class Book(NamedTuple):
    """Token numbers of three disjoint parts of a book, each (N, T)."""

    train: Tensor
    validation: Tensor
    test: Tensor


def book_text(name: str) -> str:
    """The text of a book by the name of its file."""
    return read_content(locate(f"books/{name}.txt.xz", "book", fetched=False), "book").decode("utf8")


def load_book(name: str, tokenizer: Any, length: int, counts: tuple[int, int, int]) -> Book:
    """Sequences of `length` tokens, `counts` of train, validation and test, evenly spaced over their part."""
    text = book_text(name)
    cuts = [0, *(int(share * len(text)) for share in SHARES), len(text)]
    parts = [
        windows(torch.tensor(tokenizer(text[a:b])["input_ids"]), length, count)
        for a, b, count in zip(cuts, cuts[1:], counts, strict=False)
    ]
    return Book(*parts)


def windows(tokens: Tensor, length: int, count: int) -> Tensor:
    """(count, length): pieces of a text (T,) that do not overlap, evenly spaced."""
    room = len(tokens) // length
    if count < 1 or count > room:
        raise ValueError(f"count must be between 1 and {room}, the pieces of {length} tokens there are; got {count}.")
    starts = (torch.arange(count) * room // count) * length
    return torch.stack([tokens[start : start + length] for start in starts.tolist()])
