"""Scientific statements that a model should know, and prompts that it should not (Duffield et al. 2024, 5.3).

The file `statements_en_sm/statements.tsv` has 100 statements in English and in Samoan. What is asked is the next word
of a statement whose last word is missing. Beside the other language there are contrasts that cannot be told by the
number of tokens:

    joined      the first half of one statement and the second half of another
    invented    a statement in which one word is replaced by an invented one of as many tokens
    wikipedia   sentences on other subjects, with as many tokens
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bayesformer.core.seeds import generator
from bayesformer.datasets.contents import read_content
from bayesformer.datasets.places import locate
from bayesformer.datasets.squad import SCIENCE, articles

ONSETS = tuple("b bl br d dr f fl g gl gr k kl kr l m n p pl pr r s sk sl sn sp st t tr v z".split())  # noqa: SIM905
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "oo", "ou")
CODAS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "rk", "rn", "s", "sk", "st", "t", "x", "zz")
CONTRASTS = ("samoan", "joined", "invented", "wikipedia")


class Statement(NamedTuple):
    """A statement without its last word, that word, and the same in Samoan."""

    prompt: str
    word: str
    samoan: str
    samoan_word: str


def statements() -> list[Statement]:
    """The statements in the order of the file."""
    path = locate("statements_en_sm/statements.tsv", "statements", fetched=False)
    lines = read_content(path, "statements").decode("utf8").strip("\n").split("\n")[1:]
    found = []
    for line in lines:
        english, prompt, samoan = line.split("\t")
        other, last = without_last_word(samoan)
        found.append(Statement(prompt.strip(), english[len(prompt) :].strip(" ."), other, last))
    return found


def without_last_word(sentence: str) -> tuple[str, str]:
    """A sentence without its last word and full stop, and that word."""
    rest, _, last = sentence.strip().rstrip(".").rpartition(" ")
    return rest, last


def joined(prompts: Sequence[str], seed: int = 0) -> list[str]:
    """The first half of the words of each prompt, then the second half of another's."""
    order = torch.randperm(len(prompts), generator=generator(seed, "joined")).tolist()
    found = []
    for place, own in enumerate(order):
        first, second = prompts[own].split(), prompts[order[(place + 1) % len(order)]].split()
        found.append(" ".join([*first[: len(first) // 2], *second[len(second) // 2 :]]))
    return found


def invented(prompts: Sequence[str], count: Callable[[str], int], seed: int = 0) -> list[str]:
    """Each prompt with its longest word replaced by an invented one, and as many tokens, by `count`, as before.

    A word of one token takes the next, or the one before, with it: no invented word has one token.
    """
    source = generator(seed, "invented")
    found = []
    for prompt in prompts:
        words = prompt.split()
        place = max(range(len(words)), key=lambda i: len(words[i]))
        options = [(place, place + 1), (place, place + 2), (max(0, place - 1), place + 1)]
        found.append(next(_replaced(words, spans=options, count=count, source=source), prompt))
    return found


def _replaced(
    words: list[str], spans: Sequence[tuple[int, int]], count: Callable[[str], int], source: torch.Generator
) -> Iterator[str]:
    aim = count(" ".join(words))
    for first, last in spans:
        for _ in range(60):
            candidate = " ".join([*words[:first], invented_word(source), *words[last:]])
            if count(candidate) == aim:
                yield candidate


def invented_word(source: torch.Generator) -> str:
    """Two or three syllables that are no English word but by chance."""
    choose = lambda parts: parts[int(torch.randint(len(parts), (), generator=source))]  # noqa: E731
    syllables = [choose(ONSETS) + choose(VOWELS) for _ in range(int(torch.randint(1, 3, (), generator=source)))]
    return "".join(syllables) + choose(ONSETS) + choose(VOWELS) + choose(CODAS)


def wikipedia(prompts: Sequence[str], count: Callable[[str], int], seed: int = 0) -> list[str]:
    """One Wikipedia sentence per prompt, each used once, without its last word: a contrast to prompts of science.

    Sentences come from the SQuAD articles that are not about science, shuffled by `seed`. Each prompt gets an unused
    one whose number of tokens, by `count`, is equal or else nearest to its own.
    """
    texts = [text for article in articles() if article.title not in SCIENCE for text in article.paragraphs]
    sentences = [s for text in texts for s in re.split(r"(?<=[a-z)]\.)\s+(?=[A-Z])", text) if s.endswith(".")]
    plain = [without_last_word(s)[0] for s in sentences if 30 <= len(s) <= 250 and s.isascii()]
    shuffled = torch.randperm(len(plain), generator=generator(seed, "wikipedia")).tolist()
    by_count: dict[int, list[str]] = {}
    for place in shuffled:
        by_count.setdefault(count(plain[place]), []).append(plain[place])
    return [_nearest(by_count, count(prompt)) for prompt in prompts]


def _nearest(by_count: dict[int, list[str]], aim: int) -> str:
    best = min((n for n, left in by_count.items() if left), key=lambda n: (abs(n - aim), n))
    return by_count[best].pop()


def science_text() -> str:
    """Paragraphs of the articles on sciences."""
    return "\n\n".join(text for article in articles() if article.title in SCIENCE for text in article.paragraphs)


def prompt_sets(tokenizer: Any) -> dict[str, list[str]]:
    """The prompts of the statements ("english") and of every contrast, as many of each."""
    known = statements()
    english = [statement.prompt for statement in known]
    count = lambda text: len(tokenizer(text)["input_ids"])  # noqa: E731
    return {
        "english": english,
        "samoan": [statement.samoan for statement in known],
        "joined": joined(english),
        "invented": invented(english, count),
        "wikipedia": wikipedia(english, count),
    }
