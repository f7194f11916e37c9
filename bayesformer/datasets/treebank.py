"""English sentences with part-of-speech tags: Universal Dependencies English, version 1.2 (Silveira et al. 2014).

Prepared as in the master's thesis that Cinquin et al. (2021) is the paper of: words are lemmas, here those of the
treebank; punctuation and digits are removed; words that occur fewer than 5 times in the training part become UNK1 to
UNK4 by their number of occurrences, words that do not occur there UNK0; sentences are padded to 40 words, and longer
ones are split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from bayesformer.core.errors import DamagedFileError
from bayesformer.data import Data
from bayesformer.datasets.contents import read_content
from bayesformer.datasets.places import locate
from bayesformer.datasets.sources import UD_ENGLISH, DataSource

LENGTH = 40  # words per sequence
RARE = 5  # occurrences in the training part from which on a word is known
PADDING, UNSEEN = 0, 1
SPECIAL = ("<pad>", *(f"<unk{count}>" for count in range(RARE)))
TAGS = (
    "ADJ", "ADP", "ADV", "AUX", "CONJ", "DET", "INTJ", "NOUN", "NUM", "PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM",
    "VERB", "X",
)  # fmt: skip
OTHER = TAGS.index("X")  # the tag of padding, where padding is counted

Sentence: TypeAlias = list[tuple[str, str]]
"""Words without punctuation and digits, each with its tag."""


class Tagged(NamedTuple):
    """Three parts of the treebank as numbers, and the words of the first."""

    train: Data
    validation: Data
    test: Data
    vocabulary: tuple[str, ...]  # word of each number
    numbers: dict[str, int]  # number of each word of the training part, rare ones included


class Ambiguity(NamedTuple):
    """Sentences that a reader finds ambiguous in their parts of speech, or not."""

    sentences: tuple[str, ...]
    lemmas: tuple[tuple[str, ...], ...]
    ambiguous: Tensor  # (N,) boolean


def load(source: DataSource = UD_ENGLISH, length: int = LENGTH) -> Tagged:
    """The treebank: inputs are numbers of words (N, 40) with a mask, targets numbers of tags, counted at words only."""
    parts = [read(part, source) for part in ("train", "dev", "test")]
    counts = Counter(word for sentence in parts[0] for word, _ in sentence)
    known = sorted((word for word, count in counts.items() if count >= RARE), key=lambda word: (-counts[word], word))
    numbers = {word: len(SPECIAL) + i for i, word in enumerate(known)}
    numbers |= {word: UNSEEN + count for word, count in counts.items() if count < RARE}
    train, validation, test = (encode(part, numbers, length) for part in parts)
    return Tagged(train, validation, test, (*SPECIAL, *known), numbers)


def read(part: str, source: DataSource = UD_ENGLISH) -> list[Sentence]:
    """The sentences of "train", "dev" or "test" that have a word, with punctuation and digits removed."""
    found = [[(letters(lemma), tag) for _, lemma, tag, _ in rows] for rows in _blocks(part, source)]
    sentences = [[(word, tag) for word, tag in sentence if word] for sentence in found]
    return [sentence for sentence in sentences if sentence]


def read_forms(part: str, source: DataSource = UD_ENGLISH) -> list[Sentence]:
    """All sentences of "train", "dev" or "test" as they were written, word by word, punctuation included."""
    return [[(form, tag) for form, _, tag, _ in rows] for rows in _blocks(part, source)]


def _blocks(part: str, source: DataSource) -> list[list[list[str]]]:
    """Rows of form, lemma and two tags, by sentence."""
    file = f"ud_english/v1.2-{part}.tsv.xz"
    path = locate(file, "sentences")
    text = read_content(path, "sentences", source.file(file).sha256).decode("utf8")
    blocks = [[line.split("\t") for line in block.split("\n")] for block in text.strip("\n").split("\n\n")]
    if wrong := next((row for rows in blocks for row in rows if len(row) != 4 or row[2] not in TAGS), None):
        raise DamagedFileError(f"sentences {path} must be lines of form, lemma and two tags: got {wrong}.")
    return blocks


def letters(lemma: str) -> str:
    """A lemma without punctuation, digits and other signs; nothing is left of a number."""
    return "".join(character for character in lemma if character.isalpha())


def encode(sentences: Sequence[Sentence], numbers: dict[str, int], length: int = LENGTH) -> Data:
    """Sentences as numbers, split where they are longer than `length` and padded where they are shorter."""
    pieces = [piece for sentence in sentences for piece in _split(sentence, length)]
    ids, tags = torch.full((len(pieces), length), PADDING), torch.full((len(pieces), length), OTHER)
    for row, answer, piece in zip(ids, tags, pieces, strict=True):
        row[: len(piece)] = torch.tensor([numbers.get(word, UNSEEN) for word, _ in piece])
        answer[: len(piece)] = torch.tensor([TAGS.index(tag) for _, tag in piece])
    return Data(inputs_of(ids), tags, ids != PADDING)


def inputs_of(ids: Tensor) -> dict[str, Tensor]:
    """What a tagger takes: numbers of words (N, T), and 1 where there is one."""
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long()}


def _split(sentence: Sentence, length: int) -> Iterator[Sentence]:
    for start in range(0, len(sentence), length):
        yield sentence[start : start + length]


def ambiguity_corpus() -> Ambiguity:
    """The 30 sentences of Table A.8 of the thesis, 19 of them ambiguous, with lemmas as the treebank has them."""
    text = (resources.files("bayesformer.datasets") / "ambiguity_corpus.tsv").read_text(encoding="utf8")
    rows = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    sentences, lemmas, labels = zip(*rows, strict=True)
    return Ambiguity(
        sentences,
        tuple(tuple(words.split()) for words in lemmas),
        torch.tensor([label == "ambiguous" for label in labels]),
    )


def encode_words(words: Sequence[Sequence[str]], numbers: dict[str, int], length: int = LENGTH) -> Tensor:
    """(N, T): lemmas as numbers, UNK0 where the training part does not have them."""
    ids = torch.full((len(words), length), PADDING)
    for row, sentence in zip(ids, words, strict=True):
        row[: len(sentence)] = torch.tensor([numbers.get(word, UNSEEN) for word in sentence])
    return ids
