"""Forward passes at the mean of the weights and at points around it, on one shell.

A pass gives a signal: what enters the last linear layer where that layer's own noise is handled in closed form, and
the outputs otherwise. Deviations of the signal from that at the mean become deviations of the outputs by the last
layer's mean weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bayesformer.core.types import Inputs
from bayesformer.laws import Law
from bayesformer.model.calling import apply, note_calls
from bayesformer.model.shell import Shell


class MeanPass(NamedTuple):
    """One pass at the mean of the weights."""

    outputs: Tensor  # (B, ..., C)
    signal: Tensor  # (B, ..., D): features of the last layer, or the outputs


class DrawnPasses:
    """Passes on a shell that one thread uses; between calls the shell holds the mean of the weights.

    `head` is the last linear layer where its noise is apart, or None; it belongs to the shell's module.
    """

    def __init__(self, shell: Shell, law: Law, head: nn.Linear | None = None) -> None:
        self.shell, self.law, self.head = shell, law, head
        self.dtype = shell.space.dtype
        self.kept: dict[tuple[int, int], Tensor] = {}  # draws of weights that are used for every batch

    def at_mean(self, inputs: Inputs) -> MeanPass:
        """The outputs and the signal at the mean of the weights, without a graph."""
        return self._pass(inputs)

    def deviations(
        self, inputs: Inputs, mean: MeanPass, draws: int, seed: int, step: float = 1.0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each draw θ_k the signal at θ_k less that at the mean, and the same at θ* + step (θ_k - θ*), over step.

        The second is the tangent J (θ_k - θ*) for a small step, at the price of one forward pass; with a step of 1 it
        is the first, and no pass is made for it. Of a very wide law the step is shorter still: a hundredth of the
        length of the mean weights.
        """
        with self._mean_restored():
            for draw in range(draws):
                row = self._row(draw, seed, draws)
                real = self._at(row, inputs) - mean.signal
                if step == 1.0:
                    yield real, real
                else:
                    short = min(step, SHORT * float(self.law.mean.norm() / (row - self.law.mean).norm()) or step)
                    near = torch.lerp(self.law.mean, row, short)
                    yield real, (self._at(near, inputs) - mean.signal) / short

    def spread(self, deviation: Tensor) -> Tensor:
        """(..., C): what a deviation of the signal does to the outputs."""
        return deviation if self.head is None else deviation @ self.weight.mT

    @property
    def weight(self) -> Tensor:
        """(C, D): the mean weights of the last layer."""
        assert self.head is not None
        return self.head.weight.detach().to(self.dtype)

    def _at(self, theta: Tensor, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            self.shell.load(theta)
        return self._pass(inputs).signal

    def _pass(self, inputs: Inputs) -> MeanPass:
        seen: list[tuple[Tensor, Tensor]] = []
        hook = None
        if self.head is not None:
            hook = note_calls(self.head, seen)
        try:
            with torch.inference_mode(False), torch.no_grad():
                outputs = apply(self.shell.module, inputs).to(self.dtype)
        finally:
            if hook is not None:
                hook.remove()
        if self.head is None:
            return MeanPass(outputs, outputs)
        return MeanPass(outputs, seen[-1][0].detach().to(self.dtype))

    def _row(self, draw: int, seed: int, draws: int) -> Tensor:
        """A draw of the weights; those of a rule, which come back with every batch, are kept where they are small."""
        key = (draw, seed)
        if key in self.kept:
            return self.kept[key]
        row = self.law.row(draw, seed)
        if draws * len(row) <= KEPT_NUMBERS and seed == RULE_SEED:
            self.kept[key] = row
        return row

    @contextmanager
    def _mean_restored(self) -> Iterator[None]:
        try:
            yield
        finally:
            with torch.no_grad():
                self.shell.load(self.law.mean)


SHORT = 0.01  # of the length of the mean weights, which a tangent's step is at most
KEPT_NUMBERS = 2**24  # numbers of drawn weights that are kept, 64 MiB in float32
RULE_SEED = 1_000_003  # of the draws that the rule makes on every batch; a calibration uses other ones
