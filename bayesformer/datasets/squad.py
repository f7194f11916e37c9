"""Questions on Wikipedia paragraphs: SQuAD 1.1 (Rajpurkar et al. 2016), its development set, split by article.

The file is `squad/dev-v1.1.json.xz` in the folder that BAYESFORMER_DATA names. The training set is not used: the
articles of the development set, in the order of the file, are split instead, so that no paragraph is in two parts.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import NamedTuple

from bayesformer.core.errors import DamagedFileError
from bayesformer.datasets.contents import read_content
from bayesformer.datasets.places import locate

SCIENCE = (
    "Chloroplast", "Computational_complexity_theory", "Ctenophora", "Force", "Geology", "Immune_system", "Oxygen",
    "Pharmacy", "Steam_engine",
)  # fmt: skip
"""articles whose subject is a science"""


class Question(NamedTuple):
    """A question, the paragraph that answers it, and the answers as (words, place of their first letter)."""

    question: str
    text: str
    answers: tuple[tuple[str, int], ...]


class Article(NamedTuple):
    """A title, the paragraphs, and all questions on them."""

    title: str
    paragraphs: tuple[str, ...]
    questions: tuple[Question, ...]


@lru_cache(maxsize=1)
def articles() -> tuple[Article, ...]:
    """The 48 articles in the order of the file."""
    path = locate("squad/dev-v1.1.json.xz", "questions", fetched=False)
    try:
        data = json.loads(read_content(path, "questions"))["data"]
        return tuple(
            Article(
                article["title"],
                tuple(part["context"] for part in article["paragraphs"]),
                tuple(
                    Question(
                        asked["question"],
                        part["context"],
                        tuple((answer["text"], int(answer["answer_start"])) for answer in asked["answers"]),
                    )
                    for part in article["paragraphs"]
                    for asked in part["qas"]
                ),
            )
            for article in data
        )
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise DamagedFileError(
            f"questions {path} are not in SQuAD's layout: {type(error).__name__}: {error}."
        ) from error
