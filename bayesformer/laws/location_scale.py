"""Independent weights of a location-scale family that need not be Gaussian: Cauchy, Laplace, logistic, Student-t."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bayesformer.core.draws import drawing_from
from bayesformer.core.seeds import fold
from bayesformer.core.standard_noise import STANDARD_NOISE
from bayesformer.core.types import Params

PREFIX = "family."


@dataclass(frozen=True)
class LocationScaleLaw:
    """θ = mean + scale · noise at some places, with independent standard noise of one family; elsewhere θ = mean."""

    mean: Tensor  # (P,), the locations; the mean only where the family has one
    family: str  # a key of STANDARD_NOISE
    place: Tensor  # (Q,) int64, where the random weights lie in θ
    scale: Tensor  # (Q,)
    df: Tensor | None = None  # (Q,), degrees of freedom of a Student-t
    buffers: Params = field(default_factory=dict)  # each (1, ...)

    @property
    def size(self) -> int:
        """P, how many numbers one draw of all weights has."""
        return len(self.mean)

    @property
    def available(self) -> None:
        """None: any number of draws can be made."""
        return

    def row(self, draw: int, seed: int = 0) -> Tensor:
        """(P,): draw number `draw` from the stream of `seed`."""
        theta = self.mean.clone()
        shape = () if self.df is None else (self.df,)
        with drawing_from(torch.Generator(theta.device).manual_seed(fold(seed, "weights", draw))):
            noise = STANDARD_NOISE[self.family](self.scale, *shape)
        theta[self.place] += self.scale * noise
        return theta

    def rows(self, draws: int, seed: int = 0) -> Tensor:
        """(L, P): the first draws from the stream of `seed`."""
        return torch.stack([self.row(draw, seed) for draw in range(draws)])

    def tensors(self) -> Params:
        """Locations, places, scales and the buffers, to save; the family is part of their names."""
        parts = {"place": self.place, "scale": self.scale, **({} if self.df is None else {"df": self.df})}
        found = {"mean": self.mean, **{f"buffer.{name}": value for name, value in self.buffers.items()}}
        return found | {f"{PREFIX}{self.family}.{name}": part for name, part in parts.items()}


def location_scale(tensors: Mapping[str, Tensor], buffers: Params) -> LocationScaleLaw | None:
    """The law whose `tensors()` these are; None if they are those of another law."""
    parts = {name.split(".")[2]: part for name, part in tensors.items() if name.startswith(PREFIX)}
    if not parts:
        return None
    family = next(name.split(".")[1] for name in tensors if name.startswith(PREFIX))
    return LocationScaleLaw(tensors["mean"], family, parts["place"], parts["scale"], parts.get("df"), buffers)
