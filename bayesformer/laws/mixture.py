"""An equal mixture of Gaussians over θ: several modes, each with a spread of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from bayesformer.core.types import Params
from bayesformer.laws.gaussian_law import GaussianLaw, one_from_tensors
from bayesformer.laws.location_scale import LocationScaleLaw
from bayesformer.laws.samples import Samples, shared

PREFIX, BUFFER = "component.", "buffer."


@dataclass(frozen=True)
class MixtureLaw:
    """M Gaussians of equal weight. Draw l is of component l mod M: any M draws in a row have one of each."""

    components: tuple[GaussianLaw, ...]
    buffers: Params = field(default_factory=dict)  # each (M, ...), or (1, ...) where all components share them

    def __post_init__(self) -> None:
        if len({law.size for law in self.components}) != 1:
            raise ValueError(f"components must be laws over the same weights; got {[c.size for c in self.components]}.")

    @classmethod
    def of(cls, laws: Sequence[GaussianLaw]) -> MixtureLaw:
        """The mixture of laws that have buffers of their own."""
        joined = {name: torch.cat([law.buffers[name] for law in laws]) for name in laws[0].buffers}
        return cls(tuple(replace(law, buffers={}) for law in laws), shared(joined))

    @property
    def size(self) -> int:
        """P, the number of weights in a draw θ."""
        return self.components[0].size

    @property
    def available(self) -> None:
        """Any number of draws can be made."""
        return

    @cached_property
    def mean(self) -> Tensor:
        """(P,): the average of the components' means."""
        return torch.stack([law.mean for law in self.components]).mean(0)

    def row(self, draw: int, seed: int = 0) -> Tensor:
        """(P,): draw number `draw` from the stream of `seed`."""
        return self.components[draw % len(self.components)].row(draw, seed)

    def rows(self, draws: int, seed: int = 0) -> Tensor:
        """(L, P): the first draws from the stream of `seed`."""
        return torch.stack([self.row(draw, seed) for draw in range(draws)])

    def tensors(self) -> Params:
        """The tensors of every component, under its number, and the buffers, to save."""
        found = {f"{BUFFER}{name}": value for name, value in self.buffers.items()}
        for number, law in enumerate(self.components):
            found |= {f"{PREFIX}{number}.{name}": value for name, value in law.tensors().items()}
        return found


def from_tensors(tensors: Mapping[str, Tensor]) -> Samples | GaussianLaw | LocationScaleLaw | MixtureLaw:
    """The law that `tensors()` of any law described."""
    parts: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith(PREFIX):
            number, _, own = name.removeprefix(PREFIX).partition(".")
            parts.setdefault(int(number), {})[own] = value
    if not parts:
        return one_from_tensors(tensors)
    laws = [one_from_tensors(parts[number]) for number in sorted(parts)]
    buffers = {name.removeprefix(BUFFER): value for name, value in tensors.items() if name.startswith(BUFFER)}
    return MixtureLaw(tuple(law for law in laws if isinstance(law, GaussianLaw)), buffers)
