"""Uncertainty of a language model about prompts, under several sets of its weights, without keeping a vocabulary.

For every prompt: total and epistemic uncertainty, in nats, as the mean over its positions and at the last one, where
the word that is missing comes; and, where that is known, what the missing word's first token gets. All of it for
growing numbers of members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Logits = Callable[[Tensor], Tensor]
"""token numbers, or what stands for them, to logits (B, T, V)"""


@dataclass(frozen=True)
class PromptScores:
    """Scores of N prompts under the first k members, each (N,)."""

    members: int
    total: Tensor
    epistemic: Tensor
    last_total: Tensor
    last_epistemic: Tensor
    log_prob: Tensor
    """of the missing word's first token; NaN where it is not known"""
    right: Tensor
    """1 where that token is the likeliest, 0 where not, NaN where it is not known"""

    def as_lists(self) -> dict[str, Any]:
        """For a file, rounded far below what matters."""
        names = ("total", "epistemic", "last_total", "last_epistemic", "log_prob", "right")
        return {name: [round(value, 6) for value in getattr(self, name).tolist()] for name in names}


def score_prompts(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[int] | None,
    prepare: Callable[[Tensor], Tensor],
    members: Sequence[Logits],
    counts: Sequence[int],
    batch: int = 8,
) -> list[PromptScores]:
    """Scores under the first k members for every k of `counts`.

    Args:
        prompts: token numbers of each; they are padded on the right, which a causal model does not see.
        answers: the token that should come next, of each prompt, or None.
        prepare: from padded token numbers (B, T) to what members are given, computed once for all of them.
        members: models as functions.
        counts: numbers of members, ascending; the last is all of them.
        batch: prompts at a time.
    """
    found = {k: torch.full((6, len(prompts)), torch.nan, dtype=torch.float64) for k in counts}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        lengths = torch.tensor([len(prompts[i]) for i in rows])
        ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
        for row, i in enumerate(rows):
            ids[row, : len(prompts[i])] = torch.tensor(prompts[i])
        given = prepare(ids)
        wanted = None if answers is None else torch.tensor([answers[i] for i in rows])
        for k, values in _running(given, lengths, wanted, members, counts):
            found[k][:, rows] = values
    return [PromptScores(k, *found[k]) for k in counts]


def _running(
    given: Tensor, lengths: Tensor, wanted: Tensor | None, members: Sequence[Logits], counts: Sequence[int]
) -> Any:
    """(k, (6, B)) for every k of `counts`: sums over members are kept, never a member's own vocabulary."""
    inside = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)  # (B, T)
    ends = torch.cumsum(lengths, 0) - 1  # places of last positions among those that count
    summed, entropies = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    for number, member in enumerate(members, 1):
        with torch.no_grad():
            logs = torch.log_softmax(member(given)[inside].float(), -1)  # (positions, V)
        probabilities = logs.exp()
        entropies = entropies + -(probabilities * logs).sum(-1).double()
        summed = summed + probabilities
        if number not in counts:
            continue
        mean = summed / number
        total = -torch.special.xlogy(mean, mean).sum(-1).double()
        # the mutual information of one member is 0, and not what rounding makes of it
        epistemic = torch.zeros_like(total) if number == 1 else (total - entropies / number).clamp_min(0)
        yield (
            number,
            torch.stack(
                [
                    *(
                        torch.stack([part.mean() for part in value.split(lengths.tolist())])
                        for value in (total, epistemic)
                    ),
                    total[ends],
                    epistemic[ends],
                    *_answered(mean[ends], wanted),
                ]
            ),
        )


def _answered(mean: Tensor, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
    if wanted is None:
        unknown = torch.full((len(mean),), torch.nan, dtype=torch.float64)
        return unknown, unknown
    own = mean.gather(1, wanted.unsqueeze(1)).squeeze(1)
    return own.double().log(), (mean.argmax(1) == wanted).double()
