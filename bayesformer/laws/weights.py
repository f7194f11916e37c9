"""Laws over the flat vector of trainable weights: draws that were made, or a Gaussian to draw from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from bayesformer.core.seeds import fold
from bayesformer.core.types import Params
from bayesformer.laws import blocks as gaussians
from bayesformer.laws.blocks import Block


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


class _Drawn(ABC):
    """A law with a mean that can be drawn from as often as wanted."""

    mean: Tensor  # (P,)

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
        found = self.mean.expand(draws, -1).clone()
        for i, theta in enumerate(found):
            source = torch.Generator(theta.device).manual_seed(fold(seed, "weights", i))
            self._add_noise(theta, source)
        return found

    @abstractmethod
    def _add_noise(self, theta: Tensor, source: torch.Generator) -> None:
        """From the mean to a draw, in place."""

    def _noise(self, size: int, source: torch.Generator) -> Tensor:
        return torch.empty(size, dtype=self.mean.dtype, device=self.mean.device).normal_(generator=source)


@dataclass(frozen=True)
class GaussianWeights(_Drawn):
    """θ = mean + sd ε + factor' ε₂ (+ tril ε₃): diagonal, diagonal plus low rank, or dense.

    The covariance is diag(sd²) + factorᵀ factor + tril trilᵀ; parts that are absent are 0.
    """

    mean: Tensor  # (P,)
    sd: Tensor | None = None  # (P,)
    factor: Tensor | None = None  # (K, P)
    tril: Tensor | None = None  # (P, P)
    buffers: Params = field(default_factory=dict)

    def _add_noise(self, theta: Tensor, source: torch.Generator) -> None:
        if self.sd is not None:
            theta += self.sd * self._noise(self.size, source)
        if self.factor is not None:
            theta += self._noise(len(self.factor), source) @ self.factor
        if self.tril is not None:
            theta += self.tril @ self._noise(self.size, source)

    def tensors(self) -> Params:
        """The parts that are there."""
        parts = {"mean": self.mean, "sd": self.sd, "factor": self.factor, "tril": self.tril}
        return {name: part for name, part in parts.items() if part is not None}


@dataclass(frozen=True)
class BlockGaussian(_Drawn):
    """A Gaussian whose covariance is made of blocks over separate weights; weights in no block have no spread."""

    mean: Tensor  # (P,)
    places: tuple[slice | Tensor, ...]  # where each block's weights lie in the flat vector
    blocks: tuple[Block, ...]
    buffers: Params = field(default_factory=dict)

    def _add_noise(self, theta: Tensor, source: torch.Generator) -> None:
        for place, block in zip(self.places, self.blocks, strict=True):
            theta[place] += block.colour(self._noise(block.size, source))

    def variance(self) -> Tensor:
        """(P,): the variance of every weight."""
        spread = torch.zeros_like(self.mean)
        for place, block in zip(self.places, self.blocks, strict=True):
            spread[place] = block.diagonal()
        return spread

    def tensors(self) -> Params:
        """The mean, and every block's place and parts."""
        found = {"mean": self.mean}
        for i, (place, block) in enumerate(zip(self.places, self.blocks, strict=True)):
            kind, parts = gaussians.to_tensors(block)
            where = torch.tensor([place.start, place.stop]) if isinstance(place, slice) else place
            how = "slice" if isinstance(place, slice) else "index"
            found[f"block.{i}.{how}"] = where
            found |= {f"block.{i}.{kind}.{name}": part for name, part in parts.items()}
        return found

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> BlockGaussian:
        """The law that `tensors()` described."""
        places: dict[int, slice | Tensor] = {}
        parts: dict[int, dict[str, Tensor]] = defaultdict(dict)
        kinds: dict[int, str] = {}
        for name, tensor in tensors.items():
            if not name.startswith("block."):
                continue
            _, number, kind, *part = name.split(".")
            if kind == "slice":
                places[int(number)] = slice(*tensor.tolist())
            elif kind == "index":
                places[int(number)] = tensor
            else:
                kinds[int(number)], parts[int(number)][part[0]] = kind, tensor
        order = sorted(places)
        blocks = tuple(gaussians.from_tensors(kinds[i], parts[i]) for i in order)
        return cls(tensors["mean"], tuple(places[i] for i in order), blocks)


def from_tensors(tensors: Mapping[str, Tensor]) -> Weights:
    """The law that `tensors()` described."""
    if "theta" in tensors:
        buffers = {k.removeprefix("buffer."): v for k, v in tensors.items() if k.startswith("buffer.")}
        return Samples(tensors["theta"], buffers)
    if any(name.startswith("block.") for name in tensors):
        return BlockGaussian.from_tensors(tensors)
    return GaussianWeights(tensors["mean"], tensors.get("sd"), tensors.get("factor"), tensors.get("tril"))
