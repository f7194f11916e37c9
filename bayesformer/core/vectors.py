"""What every inference algorithm needs: gradients of a log joint, noise, and sums over all weights.

Parameters are a dict of tensors, or one vector {"theta": (P,)}, or a matrix {"theta": (L, P)} whose rows are
members of their own. These helpers treat the three alike, so an algorithm is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bayesformer.core.compat import transformed
from bayesformer.core.draws import normal_like
from bayesformer.core.types import Batch, LogJoint, Params

__all__ = [
    "PIECE",
    "THETA",
    "blank",
    "count",
    "dot",
    "is_long",
    "is_matrix",
    "normal_like",
    "per_member",
    "pieces",
    "transformed",
    "value_and_grad",
]

THETA = "theta"
"""Name of the one vector that stands for all trainable weights, where they are kept flat."""


def value_and_grad(log_joint: LogJoint) -> Callable[[Params, Batch], tuple[Tensor, Tensor, Params]]:
    """Value, outputs and gradient of a log joint: its own fast way if it has one, else torch.func."""
    own = getattr(log_joint, "value_and_grad", None)
    if own is not None:
        return own
    transformed = torch.func.grad_and_value(log_joint, has_aux=True)

    def fallback(params: Params, batch: Batch) -> tuple[Tensor, Tensor, Params]:
        gradient, (value, outputs) = transformed(params, batch)
        return value, outputs, gradient

    return fallback


PIECE = 1 << 18  # numbers per piece: a few of them stay in the cache


def pieces(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same stretch of several vectors at a time, to work on in place.

    On a CPU every temporary of a long vector is memory fetched from the system anew, which costs more than the
    arithmetic; those of a piece stay in the cache. Elsewhere, and for short vectors, the whole is one piece.
    """
    if is_long(vectors[0]):
        yield from zip(*(vector.split(PIECE) for vector in vectors), strict=True)
    else:
        yield vectors


def is_long(vector: Tensor) -> bool:
    """Whether it comes in several pieces."""
    return vector.device.type == "cpu" and vector.dim() == 1 and len(vector) > PIECE


def is_matrix(params: Params) -> bool:
    """Whether these are members in rows."""
    return list(params) == [THETA] and params[THETA].dim() == 2


def dot(a: Params, b: Params) -> Tensor:
    """Σ a b over all weights: () or, for members in rows, (L,)."""
    if is_matrix(a):
        return (a[THETA] * b[THETA]).sum(-1)
    if list(a) == [THETA]:
        return torch.dot(a[THETA], b[THETA])  # without a temporary
    return torch.stack([(a[k] * b[k]).sum() for k in a]).sum()


def count(params: Params) -> int:
    """The number of weights of one member, P."""
    return params[THETA].shape[-1] if THETA in params else sum(p.numel() for p in params.values())


def per_member(value: Tensor, params: Params) -> Tensor:
    """A number per member, (L,), shaped to multiply rows; any other scalar as it is."""
    return value.unsqueeze(-1) if is_matrix(params) and value.dim() == 1 else value


def blank(params: Params) -> Tensor:
    """NaN per member, (L,), or (): the log joint before the first step."""
    one = next(iter(params.values()))
    return one.new_full(one.shape[:-1] if is_matrix(params) else (), torch.nan)
