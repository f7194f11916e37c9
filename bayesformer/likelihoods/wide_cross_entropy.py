"""The cross-entropy of a vocabulary, with one tensor of the size of the logits on the way back instead of three."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

WIDE = 4096  # classes from which it is used
PIECE = 2**20  # numbers that are looked at at once, 4 MiB in float32


class WideCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[label] of every row, 0 where the label is ignored.

    Nothing but the logits is kept for the gradient, softmax(logits) - onehot(label), which is made some rows at a time.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        """(n,) from logits (n, C) and labels (n,)."""
        ctx.save_for_backward(logits, labels)
        ctx.ignore_index = ignore_index
        parts = [
            F.cross_entropy(logits[a:b], labels[a:b], ignore_index=ignore_index, reduction="none")
            for a, b in _pieces(*logits.shape)
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient in the logits; by differentiable steps where it is to be differentiated again."""
        logits, labels = ctx.saved_tensors
        counted = labels != ctx.ignore_index
        scale = gradients[0].masked_fill(~counted, 0.0).unsqueeze(-1)
        places = labels.masked_fill(~counted, 0).unsqueeze(-1)
        if torch.is_grad_enabled():
            minus = torch.zeros_like(logits).scatter(-1, places, 1.0)
            return (logits.softmax(-1) - minus) * scale, None, None
        found = torch.empty_like(logits)
        for a, b in _pieces(*logits.shape):
            part = found[a:b]
            part.copy_(logits[a:b].softmax(-1))
            part.scatter_add_(-1, places[a:b], -torch.ones_like(scale[a:b]))
            part.mul_(scale[a:b])
        return found, None, None


def _pieces(count: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, PIECE // max(width, 1))
    return pairwise([*range(0, count, step), count])
