"""What a posterior needs of its law over the vector θ of inferred weights."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from bayesformer.core.types import Params


class Law(Protocol):
    """A law over θ (P,) and over the buffers that go with it (running averages, counters, masks)."""

    @property
    def size(self) -> int:
        """P, the number of weights in a draw θ."""
        ...

    @property
    def available(self) -> int | None:
        """How many draws there are, or None where any number can be made."""
        ...

    @property
    def mean(self) -> Tensor:
        """(P,): the mean of the law, where a single pass is made."""
        ...

    @property
    def buffers(self) -> Params:
        """Buffers of every draw, each (L, ...), or (1, ...) where all draws share them; draw l has row l mod L."""
        ...

    def row(self, draw: int, seed: int = 0) -> Tensor:
        """(P,): one draw; it does not depend on which others are asked for."""
        ...

    def rows(self, draws: int, seed: int = 0) -> Tensor:
        """(L, P): the first `draws` draws under a seed."""
        ...

    def tensors(self) -> Params:
        """Everything there is to save, by name."""
        ...


def telling_rows(law: Law, seed: int = 0) -> Tensor:
    """(L, P): as many draws as show which weights differ between draws at all, at least two where there are."""
    components = len(getattr(law, "components", ()))
    return law.rows(max(2, components) if law.available is None else law.available, seed)


def buffers_of(law: Law, draw: int) -> Params:
    """The buffers that belong to one draw of a law, by name and without the axis of draws."""
    return {name: value[draw % len(value)] for name, value in law.buffers.items()}
