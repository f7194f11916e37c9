"""Extractive question answering: questions on texts as two positions, the first and the last token of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesformer.evaluate.language_scores import best_spans
from bayesformer.likelihoods.predictive import CategoricalPredictive


@dataclass(frozen=True)
class EncodedQuestions:
    """Questions ready for `bf.fit`, and what it takes to read answers off predictions."""

    data: dict[str, Tensor]  # inputs (N, T) and labels (N, 2): the first and the last token of the answer
    allowed: Tensor  # (N, T), boolean: tokens of the text
    offsets: Tensor  # (N, T, 2): where each token begins and ends in the text
    contexts: tuple[str, ...]
    truths: tuple[tuple[str, ...], ...]

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The data without labels, for `Posterior.predict`."""
        return {name: value for name, value in self.data.items() if name != "labels"}

    def answers(self, predictive: CategoricalPredictive, longest: int = 30) -> list[str]:
        """The most probable piece of each text, by the averaged probabilities (N, 2, T) of its ends."""
        start, end = predictive.log_mean.unbind(1)
        first, last = best_spans(start, end, self.allowed.to(start.device), longest)
        found = []
        for row, (i, j) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
            found.append(self.contexts[row][int(self.offsets[row, i, 0]) : int(self.offsets[row, j, 1])])
        return found


def encode_questions(
    rows: Sequence[tuple[str, str, Sequence[tuple[str, int]]]], tokenizer: Any, max_length: int = 256
) -> EncodedQuestions:
    """Questions on texts, all padded to one length; those whose answer is cut off are left out.

    Args:
        rows: (question, text, answers), answers as (words, place of their first letter in the text); the first one is
            learned, all count as right.
        tokenizer: a fast tokenizer, which knows where tokens stand in the text.
        max_length: tokens of question and text together.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"tokenizer must be a fast one, which knows where tokens are; got {type(tokenizer).__name__}.")
    kept: list[tuple[Any, list[int], str, tuple[str, ...]]] = []
    for question, text, answers in rows:
        words, place = answers[0]
        encoded = tokenizer(
            question,
            text,
            truncation="only_second",
            max_length=max_length,
            padding="max_length",
            return_offsets_mapping=True,
        )
        span = _span(encoded, place, place + len(words))
        if span is not None:
            kept.append((encoded, span, text, tuple(answer for answer, _ in answers)))
    if not kept:
        raise ValueError(f"rows must have at least one answer within max_length={max_length} tokens; got none.")
    names = [name for name in kept[0][0] if name != "offset_mapping"]
    data = {name: torch.tensor([row[0][name] for row in kept], device="cpu") for name in names}
    data["labels"] = torch.tensor([row[1] for row in kept], device="cpu")
    allowed = [[part == 1 for part in row[0].sequence_ids(0)] for row in kept]
    return EncodedQuestions(
        data,
        torch.tensor(allowed, device="cpu"),
        torch.tensor([row[0]["offset_mapping"] for row in kept], device="cpu"),
        tuple(row[2] for row in kept),
        tuple(row[3] for row in kept),
    )


def _span(encoded: Any, begin: int, end: int) -> list[int] | None:
    """First and last token of the letters from `begin` to `end` of the text; None if they were cut off."""
    inside = [
        number
        for number, (part, (a, b)) in enumerate(zip(encoded.sequence_ids(0), encoded["offset_mapping"], strict=True))
        if part == 1 and a < end and b > begin
    ]
    if not inside or encoded["offset_mapping"][inside[-1]][1] < end:
        return None
    return [inside[0], inside[-1]]
