"""Extended Kalman filters over weights: `ekf.diag` and `ekf.dense`.

A filter reads each example once, in order. Its prior is the state it starts from (mean `params`, sd `sd`), so the
log joint given to it is the likelihood alone: build it with prior=None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bayesformer.core.types import Batch, LogJoint, Params
from bayesformer.core.vectors import is_matrix
from bayesformer.model.randomness import plain_attention

Curvature: TypeAlias = Callable[[Params, Batch], Any]
"""`curvature(params, batch)`: minus the Hessian of the mean log-likelihood of the batch."""


def scores(log_joint: LogJoint, params: Params, batch: Batch) -> tuple[Tensor, Tensor, Params]:
    """Value, outputs and gradient of every example: (B,), (B, ...) and (B, ...) for each name.

    The log joint sees one example at a time, its batch axis kept as 1. Members in rows put L in front of
    everything. Memory: B times the weights.
    """
    gradient = torch.func.grad_and_value(log_joint, has_aux=True)

    def one(weights: Params, example: Batch) -> tuple[Tensor, Tensor, Params]:
        grad, (value, outputs) = gradient(weights, tree_map(_alone, example))
        return value, outputs[0] if outputs.dim() else outputs, grad

    axes = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, batch)
    every = torch.vmap(one, in_dims=(None, axes), randomness="different")
    if is_matrix(params):
        every = torch.vmap(every, in_dims=(0, axes), randomness="different")
    with plain_attention():
        return every(params, batch)


def examples(params: Params, batch: Batch) -> int:
    """B, the examples that each member sees."""
    first = next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    return first.shape[1 if is_matrix(params) else 0]


def check_settings(lr: float | None, transition_sd: float, sd: float) -> None:
    """The rules that diagonal and dense share."""
    if lr is not None and not lr > 0:
        raise ValueError(f"lr must be positive, or None for the size of each batch; got {lr}.")
    if not transition_sd >= 0:
        raise ValueError(f"transition_sd must be at least 0; got {transition_sd}.")
    if not sd > 0:
        raise ValueError(f"sd must be positive; got {sd}.")


def _alone(leaf: Any) -> Any:
    return leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf
