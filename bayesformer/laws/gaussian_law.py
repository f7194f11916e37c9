"""A Gaussian over θ whose covariance is made of blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from bayesformer.core.seeds import fold
from bayesformer.core.slices import as_slice
from bayesformer.core.types import Params
from bayesformer.laws.block import Block
from bayesformer.laws.dense import Dense
from bayesformer.laws.deviations import Deviations
from bayesformer.laws.diagonal import Diagonal
from bayesformer.laws.kronecker import Eigenbasis, Kronecker
from bayesformer.laws.location_scale import LocationScaleLaw, location_scale
from bayesformer.laws.low_rank import LowRank
from bayesformer.laws.samples import Samples

SAME = ".same"  # end of the name of a part that is that of an earlier block, whose number the file has instead
KINDS: dict[str, type[Any]] = {
    "diagonal": Diagonal,
    "dense": Dense,
    "low_rank": LowRank,
    "kronecker": Kronecker,
    "deviations": Deviations,
    "eigenbasis": Eigenbasis,
}


@dataclass(frozen=True)
class GaussianLaw:
    """θ = mean + noise of every block at its places; weights in no block have no spread."""

    mean: Tensor  # (P,)
    places: tuple[slice | Tensor, ...]  # where each block's weights lie in θ; no weight is in two blocks
    blocks: tuple[Block, ...]
    buffers: Params = field(default_factory=dict)  # each (1, ...), those of the mean

    @property
    def size(self) -> int:
        """P, the number of weights in a draw θ."""
        return len(self.mean)

    @property
    def available(self) -> None:
        """Any number of draws can be made."""
        return

    def row(self, draw: int, seed: int = 0) -> Tensor:
        """(P,): draw number `draw` from the stream of `seed`."""
        theta = self.mean.clone()
        source = torch.Generator(theta.device).manual_seed(fold(seed, "weights", draw))
        for place, block in zip(self.places, self.blocks, strict=True):
            theta[place] += block.draw(theta, source)
        return theta

    def rows(self, draws: int, seed: int = 0) -> Tensor:
        """(L, P): the first draws from the stream of `seed`."""
        return torch.stack([self.row(draw, seed) for draw in range(draws)])

    def variance(self) -> Tensor:
        """(P,): the variance of every weight."""
        spread = torch.zeros_like(self.mean)
        for place, block in zip(self.places, self.blocks, strict=True):
            spread[place] = block.diagonal().to(spread)
        return spread

    @property
    def sd(self) -> Tensor:
        """(P,): the standard deviation of every weight."""
        return self.variance().sqrt()

    def at(self, base: Tensor, place: slice | Tensor) -> GaussianLaw:
        """The same law at some places of a longer vector `base` (Q,), whose other weights have no spread."""
        mean = base.clone()
        mean[place] = self.mean
        where = torch.arange(len(base), device=base.device)[place]
        return GaussianLaw(mean, tuple(as_slice(where[own]) for own in self.places), self.blocks, self.buffers)

    def distance(self, theta: Tensor) -> Tensor:
        """(): (θ - mean)ᵀ Σ⁻¹ (θ - mean) over the weights that have spread, differentiable in θ (P,)."""
        terms = [
            (theta[place] - self.mean[place]) @ block.precision_times(theta[place] - self.mean[place])
            for place, block in zip(self.places, self.blocks, strict=True)
        ]
        return torch.stack(terms).sum()

    def precision(self) -> Tensor:
        """(P, P): Σ⁻¹ in full, for a few thousand weights; every weight must have a spread."""
        whole, seen = torch.zeros(self.size, self.size, dtype=self.mean.dtype, device=self.mean.device), 0
        for place, block in zip(self.places, self.blocks, strict=True):
            index = torch.arange(self.size, device=self.mean.device)[place]
            eye = torch.eye(block.size, dtype=self.mean.dtype, device=self.mean.device)
            whole[index[:, None], index] = block.precision_times(eye)
            seen += block.size
        if seen < self.size:
            raise ValueError(f"every weight must have a spread to have a precision; {self.size - seen} have none.")
        return whole

    def tensors(self) -> Params:
        """The mean, every block's place and parts, and the buffers, to save."""
        found = {"mean": self.mean, **{f"buffer.{name}": value for name, value in self.buffers.items()}}
        seen: dict[tuple[Any, ...], int] = {}
        for i, (place, block) in enumerate(zip(self.places, self.blocks, strict=True)):
            kind, parts = to_tensors(block)
            if isinstance(place, slice):
                found[f"block.{i}.slice"] = torch.tensor([place.start, place.stop], device=self.mean.device)
            else:
                found[f"block.{i}.index"] = place
            for name, part in parts.items():
                first = seen.setdefault((name, part.data_ptr(), part.shape, part.stride()), i)
                held = first < i and part.numel() > 0  # blocks may share a part, which a file holds once
                found[f"block.{i}.{kind}.{name}{SAME if held else ''}"] = (
                    torch.tensor(first, device=self.mean.device) if held else part
                )
        return found


def gaussian(
    mean: Tensor,
    sd: Tensor | None = None,
    factor: Tensor | None = None,
    tril: Tensor | None = None,
    buffers: Params | None = None,
) -> GaussianLaw:
    """The law with covariance diag(sd²) + factorᵀ factor + tril trilᵀ over all weights; absent parts are 0.

    sd is (P,), factor (K, P), tril (P, P) lower triangular.
    """
    return GaussianLaw(mean, *_parts(mean, sd, factor, tril), buffers or {})


def _parts(
    mean: Tensor, sd: Tensor | None, factor: Tensor | None, tril: Tensor | None
) -> tuple[tuple[slice, ...], tuple[Block, ...]]:
    everywhere = (slice(0, len(mean)),)
    if tril is not None:
        if sd is None and factor is None:
            return everywhere, (Dense(tril),)
        covariance = tril @ tril.mT + (0 if sd is None else sd.square().diag())
        covariance = covariance if factor is None else covariance + factor.mT @ factor
        return everywhere, (Dense(torch.linalg.cholesky(covariance)),)
    if factor is not None:
        return everywhere, (Deviations(torch.zeros_like(mean) if sd is None else sd, factor),)
    return (everywhere, (Diagonal(sd.square()),)) if sd is not None else ((), ())


def to_tensors(block: Block) -> tuple[str, Params]:
    """The kind of a block and its parts, to save."""
    kind = next(name for name, known in KINDS.items() if type(block) is known)
    parts = {f.name: getattr(block, f.name) for f in fields(block)}  # type: ignore[arg-type]
    return kind, {name: part for name, part in parts.items() if part is not None}


def one_from_tensors(tensors: Mapping[str, Tensor]) -> Samples | GaussianLaw | LocationScaleLaw:
    """The law, no mixture, that `tensors()` described; also in the form of files from before there were blocks."""
    buffers = {k.removeprefix("buffer."): v for k, v in tensors.items() if k.startswith("buffer.")}
    if "theta" in tensors:
        return Samples(tensors["theta"], buffers)
    family = location_scale(tensors, buffers)
    if family is not None:
        return family
    if any(name.startswith("block.") for name in tensors):
        return _of_blocks(tensors, buffers)
    return gaussian(tensors["mean"], tensors.get("sd"), tensors.get("factor"), tensors.get("tril"), buffers)


def _of_blocks(tensors: Mapping[str, Tensor], buffers: Params) -> GaussianLaw:
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
            kinds[int(number)], parts[int(number)][".".join(part)] = kind, tensor
    order = sorted(places)
    for own in (parts[i] for i in order):
        for name in [name for name in own if name.endswith(SAME)]:
            own[name.removesuffix(SAME)] = parts[int(own.pop(name))][name.removesuffix(SAME)]
    blocks = tuple(KINDS[kinds[i]](**parts[i]) for i in order)
    return GaussianLaw(tensors["mean"], tuple(places[i] for i in order), blocks, buffers)
