"""Uncertainty of whole answers, from several that are sampled for one question; no other model is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesformer.generation.result import Generation


@dataclass(frozen=True)
class SampledAnswers:
    """Answers sampled for B questions, n for each, and what they say together."""

    generation: Generation  # of B · n sequences, the answers of a question side by side
    answers: int  # n
    predictive_entropy: Tensor  # (B,), nats: -mean log p(answer), Monte Carlo entropy over answers
    normalised_entropy: Tensor  # (B,), nats per token: the same with every answer divided by its length
    lexical_similarity: Tensor  # (B,), 0 to 1: mean Rouge-L between pairs of answers; low is uncertain
    self_certainty: Tensor  # (B,), mean over tokens and answers; low is uncertain

    @property
    def text(self) -> list[tuple[str, ...]] | None:
        """The answers of every question, where a tokenizer was given."""
        found = self.generation.text
        if found is None:
            return None
        return [found[start : start + self.answers] for start in range(0, len(found), self.answers)]


def score_answers(generation: Generation, answers: int) -> SampledAnswers:
    """Scores of sampled answers; p(answer) is the product of the averaged probabilities of its tokens.

    Predictive entropy and its length-normalised form: Malinin & Gales (2021). Lexical similarity: Fomicheva et al.
    (2020), by Rouge-L F1 over words, or over tokens where there is no text.
    """
    groups = len(generation.tokens) // answers
    words: list[Sequence[Any]]
    if generation.text is None:
        words = [row[on].tolist() for row, on in zip(generation.tokens, generation.counted, strict=True)]
    else:
        words = [text.split() for text in generation.text]
    similarity = [_similarity(words[g * answers : (g + 1) * answers]) for g in range(groups)]

    def per_question(values: Tensor) -> Tensor:
        return values.view(groups, answers).mean(1)

    return SampledAnswers(
        generation,
        answers,
        per_question(-generation.sum("log_prob")),
        per_question(-generation.mean("log_prob")),
        torch.tensor(similarity, dtype=torch.float64, device=generation.tokens.device),
        per_question(generation.mean("self_certainty")),
    )


def _similarity(answers: Sequence[Sequence[Any]]) -> float:
    pairs = [rouge_l(a, b) for i, a in enumerate(answers) for b in answers[:i]]
    return sum(pairs) / len(pairs) if pairs else 1.0


def rouge_l(first: Sequence[Any], second: Sequence[Any]) -> float:
    """F1 of the longest common subsequence of two sequences (Lin 2004); two empty ones are equal."""
    if not first or not second:
        return float(not first and not second)
    row = [0] * (len(second) + 1)  # lengths of common subsequences of a prefix of `first` with prefixes of `second`
    for a in first:
        before = row
        row = [0]
        for j, b in enumerate(second):
            row.append(before[j] + 1 if a == b else max(before[j + 1], row[j]))
    return 2 * row[-1] / (len(first) + len(second))
