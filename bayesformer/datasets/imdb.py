"""Movie reviews from IMDB (Maas et al. 2011): positive or negative, as token numbers.

The files `imdb/train.jsonl.xz` and `imdb/test.jsonl.xz` (JSON lines with `text` and `label`) are those of a
data folder (`places`). Words are lower case without punctuation; the vocabulary is that of the training
part, by frequency. A review keeps its last words, where the verdict usually is.
"""

from __future__ import annotations

import json
import lzma
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bayesformer.core.errors import DamagedFileError
from bayesformer.core.seeds import generator
from bayesformer.data import Data
from bayesformer.datasets.places import locate

Padding: TypeAlias = Literal["end", "start"]
PADDING, UNKNOWN = 0, 1
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


class Reviews(NamedTuple):
    """Three disjoint parts and the words they are written in."""

    train: Data
    validation: Data
    test: Data
    vocabulary: tuple[str, ...]  # word of each token number


def load(
    train: int, validation: int, test: int, words: int, length: int, seed: int = 0, padding: Padding = "end"
) -> Reviews:
    """Random reviews, half of them positive in the long run; validation comes from the training file."""
    source, held_out = read("train"), read("test")
    if train + validation > len(source) or test > len(held_out):
        raise ValueError(
            f"train + validation must be at most {len(source)} and test at most {len(held_out)}; "
            f"got {train} + {validation} and {test}."
        )
    order = torch.randperm(len(source), generator=generator(seed, "imdb", "train")).tolist()
    chosen = [source[i] for i in order[: train + validation]]
    tested = [held_out[i] for i in torch.randperm(len(held_out), generator=generator(seed, "imdb", "test"))[:test]]
    counts = Counter(word for tokens, _ in chosen[:train] for word in tokens)
    # Ties in frequency are broken by the alphabet, so that the numbers never depend on the order of reading.
    known = sorted(counts, key=lambda word: (-counts[word], word))[: words - 2]
    numbers = {word: i + 2 for i, word in enumerate(known)}
    parts = (chosen[:train], chosen[train:], tested)
    first, second, third = (encode(part, numbers, length, padding) for part in parts)
    return Reviews(first, second, third, ("<pad>", "<unknown>", *known))


def read(part: str) -> list[tuple[list[str], int]]:
    """Words and label of every review of "train" or "test"."""
    return [(words_of(text), label) for text, label in review_texts(part)]


def review_texts(part: str) -> list[tuple[str, int]]:
    """Text, as it was written, and label of every review of "train" or "test"."""
    path = locate(f"imdb/{part}.jsonl.xz", "reviews")
    try:
        with lzma.open(path, "rt", encoding="utf8") as lines:
            rows = [json.loads(line) for line in lines]
        return [(str(row["text"]), int(row["label"])) for row in rows]
    except (lzma.LZMAError, EOFError, json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
        raise DamagedFileError(f"reviews {path} cannot be read: {type(error).__name__}: {error}.") from error


def words_of(text: str) -> list[str]:
    """Lower-case words without markup."""
    return WORD.findall(text.replace("<br />", " ").lower())


def encode(
    reviews: Sequence[tuple[list[str], int]], numbers: dict[str, int], length: int, padding: Padding = "end"
) -> Data:
    """The last `length` words of each review as numbers, padded at the end, or at the start for recurrent networks."""
    ids = torch.full((len(reviews), length), PADDING)
    for row, (tokens, _) in zip(ids, reviews, strict=True):
        last = torch.tensor([numbers.get(word, UNKNOWN) for word in tokens[-length:]], dtype=torch.long)
        if padding == "end":
            row[: len(last)] = last
        else:
            row[length - len(last) :] = last
    labels = torch.tensor([label for _, label in reviews])
    return Data({"input_ids": ids, "attention_mask": mask_of(ids)}, labels)


def mask_of(ids: Tensor) -> Tensor:
    """(N, T): 1 at words and 0 at padding, as a mask."""
    return (ids != PADDING).long()
