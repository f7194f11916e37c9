"""Draws that were made: one trained network, members of an ensemble, states of chains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bayesformer.core.types import Params


@dataclass(frozen=True)
class Samples:
    """An equal mixture of L points, each with its own buffers."""

    theta: Tensor  # (L, P)
    buffers: Params = field(default_factory=dict)  # each (L, ...), or (1, ...) where all draws share them

    @property
    def size(self) -> int:
        """P, the number of weights in a draw θ."""
        return self.theta.shape[1]

    @property
    def available(self) -> int:
        """L, the number of draws that are stored."""
        return len(self.theta)

    @property
    def mean(self) -> Tensor:
        """(P,): the average of the draws; one draw is its own, without a copy."""
        return self.theta[0] if len(self.theta) == 1 else self.theta.mean(0)

    def row(self, draw: int, seed: int = 0) -> Tensor:  # noqa: ARG002
        """(P,): one of the draws, not copied."""
        return self.theta[draw]

    def rows(self, draws: int, seed: int = 0) -> Tensor:  # noqa: ARG002
        """(L, P): the first `draws`, not copied."""
        return self.theta[:draws]

    def tensors(self) -> Params:
        """The draws and their buffers by name, as a file stores them."""
        return {"theta": self.theta, **{f"buffer.{name}": value for name, value in self.buffers.items()}}


def shared(buffers: Mapping[str, Tensor]) -> Params:
    """Buffers (L, ...) with one row where all rows are equal: masks and position tables are kept once."""
    found = {}
    for name, rows in buffers.items():
        same = len(rows) > 1 and all(torch.equal(rows[0], row) for row in rows[1:])
        found[name] = rows[:1].clone() if same else rows
    return found
