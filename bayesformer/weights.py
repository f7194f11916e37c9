"""Laws over the flat vector of trainable weights: draws that were made, or a Gaussian to draw from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from bayesformer.seeds import fold
from bayesformer.types import Params


class Weights(Protocol):
    """What a posterior needs of its law over weights."""

    @property
    def size(self) -> int:
        """P, numbers per draw."""
        ...

    @property
    def available(self) -> int | None:
        """How many draws there are, or None where any number can be made."""
        ...

    @property
    def mean(self) -> Tensor:
        """(P,): the centre."""
        ...

    @property
    def buffers(self) -> Params:
        """Running averages per draw, each (L, ...); empty where a draw has none of its own."""
        ...

    def rows(self, draws: int, seed: int = 0) -> Tensor:
        """(L, P): draws; equal seeds give equal draws."""
        ...

    def tensors(self) -> Params:
        """Everything there is to save."""
        ...


@dataclass(frozen=True)
class Samples:
    """Draws that were made: members of an ensemble, states of chains."""

    theta: Tensor  # (L, P)
    buffers: Params = field(default_factory=dict)  # each (L, ...)

    @property
    def size(self) -> int:
        """P."""
        return self.theta.shape[1]

    @property
    def available(self) -> int:
        """L."""
        return len(self.theta)

    @property
    def mean(self) -> Tensor:
        """The average of the draws."""
        return self.theta.mean(0)

    def rows(self, draws: int, seed: int = 0) -> Tensor:  # noqa: ARG002
        """The first `draws`."""
        return self.theta[:draws]

    def tensors(self) -> Params:
        """Draws and buffers."""
        return {"theta": self.theta, **{f"buffer.{name}": value for name, value in self.buffers.items()}}


@dataclass(frozen=True)
class GaussianWeights:
    """θ = mean + sd ε + factor' ε₂ (+ tril ε₃): diagonal, diagonal plus low rank, or dense.

    The covariance is diag(sd²) + factorᵀ factor + tril trilᵀ; parts that are absent are 0.
    """

    mean: Tensor  # (P,)
    sd: Tensor | None = None  # (P,)
    factor: Tensor | None = None  # (K, P)
    tril: Tensor | None = None  # (P, P)
    buffers: Params = field(default_factory=dict)

    @property
    def size(self) -> int:
        """P."""
        return len(self.mean)

    @property
    def available(self) -> None:
        """Any number."""
        return

    def rows(self, draws: int, seed: int = 0) -> Tensor:
        """Fresh draws from the stream of `seed`; the first draws do not depend on how many follow."""
        return torch.stack([self._draw(fold(seed, "weights", i)) for i in range(draws)])

    def _draw(self, seed: int) -> Tensor:
        source = torch.Generator(self.mean.device).manual_seed(seed)

        def noise(size: int) -> Tensor:
            return torch.empty(size, dtype=self.mean.dtype, device=self.mean.device).normal_(generator=source)

        theta = self.mean.clone()
        if self.sd is not None:
            theta += self.sd * noise(self.size)
        if self.factor is not None:
            theta += noise(len(self.factor)) @ self.factor
        if self.tril is not None:
            theta += self.tril @ noise(self.size)
        return theta

    def tensors(self) -> Params:
        """The parts that are there."""
        parts = {"mean": self.mean, "sd": self.sd, "factor": self.factor, "tril": self.tril}
        return {name: part for name, part in parts.items() if part is not None}


def from_tensors(tensors: Mapping[str, Tensor]) -> Weights:
    """The law that `tensors()` described."""
    if "theta" in tensors:
        buffers = {k.removeprefix("buffer."): v for k, v in tensors.items() if k.startswith("buffer.")}
        return Samples(tensors["theta"], buffers)
    return GaussianWeights(tensors["mean"], tensors.get("sd"), tensors.get("factor"), tensors.get("tril"))
