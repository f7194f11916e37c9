"""A weight that is drawn when something is first computed from it.

A layer that draws its outputs itself never looks at its weight, so most of such draws would be for nothing. But
a weight can be used past its layer's forward: nn.MultiheadAttention takes the matrix of its output projection,
and it must be random then too. Whether that will happen cannot be seen beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

METADATA: set[Callable[..., Any]] = {
    *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "ndim", "requires_grad")),
    *(getattr(Tensor, name) for name in ("is_floating_point", "size", "dim")),
}
"""Questions that are answered without a draw; models ask them of their first parameter."""


class Lazy(Tensor):
    """In the place of a weight like `like`; `draw` is called once, at the first operation."""

    _draw: Callable[[], Tensor]
    _drawn: Tensor | None

    def __new__(cls, like: Tensor, draw: Callable[[], Tensor]) -> Lazy:
        """Without memory of its own."""
        made = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )
        made._draw, made._drawn = draw, None
        return made

    @property
    def drawn(self) -> Tensor:
        """The weight: the same at every use."""
        if self._drawn is None:
            self._drawn = self._draw()
        return self._drawn

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run any operation on the drawn weights."""
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, given = tree_map_only(Lazy, lambda lazy: lazy.drawn, (args, dict(kwargs or {})))
        return func(*args, **given)

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]  # for what would get past the first
