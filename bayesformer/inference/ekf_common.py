"""Extended Kalman filters over weights: `ekf.diag` and `ekf.dense`.

A filter reads each example once, in order. Its prior is the state it starts from (mean `params`, sd `sd`), so the
log joint given to it is the likelihood alone: build it with prior=None.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bayesformer.core.compat import tree_leaves, tree_map
from bayesformer.core.types import Batch, LogJoint, Params
from bayesformer.core.vectors import is_matrix, value_and_grad
from bayesformer.model.randomness import plain_attention

Curvature: TypeAlias = Callable[[Params, Batch], Any]
"""`curvature(params, batch)`: minus the Hessian of the mean log-likelihood of the batch."""

Scores: TypeAlias = Callable[[LogJoint, Params, Batch], tuple[Tensor, Tensor, Params]]
"""`scores(log_joint, params, batch)`: value, outputs and gradient of every example, as `scores` and `looped_scores`."""


def scores(log_joint: LogJoint, params: Params, batch: Batch) -> tuple[Tensor, Tensor, Params]:
    """Value, outputs and gradient of every example: (B,), (B, ...) and (B, ...) for each name.

    The log joint sees one example at a time, its batch axis kept as 1. Members in rows put L in front of
    everything. Memory: B times the weights.
    """
    gradient = torch.func.grad_and_value(log_joint, has_aux=True)
    behind = 2 if is_matrix(params) else 1  # where the batch axis of 1 goes

    def one(weights: Params, example: Batch) -> tuple[Tensor, Tensor, Params]:
        grad, (value, outputs) = gradient(weights, example)
        return value, outputs[0] if outputs.dim() else outputs, grad

    axes = tree_map(lambda leaf: 0 if _has_examples(leaf) else None, batch)
    every = torch.vmap(one, in_dims=(None, axes), randomness="different")
    if is_matrix(params):
        every = torch.vmap(every, in_dims=(0, axes), randomness="different")
    with plain_attention():
        return every(params, tree_map(lambda leaf: leaf.unsqueeze(behind) if _has_examples(leaf) else leaf, batch))


def looped_scores(log_joint: LogJoint, params: Params, batch: Batch) -> tuple[Tensor, Tensor, Params]:
    """Values, outputs and gradients of each example, one after the other: for log joints that vmap cannot take."""
    gradient, found = value_and_grad(log_joint), []
    for i in range(examples(params, batch)):
        value, outputs, grad = gradient(params, tree_map(partial(_one, i), batch))
        found.append((value, outputs[0] if outputs.dim() else outputs, {k: g.clone() for k, g in grad.items()}))
    values, outputs_, grads = zip(*found, strict=True)
    return torch.stack(values), torch.stack(outputs_), {k: torch.stack([g[k] for g in grads]) for k in params}


def examples(params: Params, batch: Batch) -> int:
    """B, the examples that each member sees."""
    first = next(leaf for leaf in tree_leaves(batch) if _has_examples(leaf))
    return first.shape[1 if is_matrix(params) else 0]


def check_settings(lr: float | None, transition_sd: float, sd: float | Tensor, temperature: float = 1.0) -> None:
    """Refuse a step size, transition, prior spread or temperature that neither EKF, diagonal or dense, can use."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive; got {temperature}.")
    if lr is not None and not lr > 0:
        raise ValueError(f"lr must be positive, or None for the size of each batch; got {lr}.")
    if not transition_sd >= 0:
        raise ValueError(f"transition_sd must be at least 0; got {transition_sd}.")
    if not torch.is_tensor(sd) and not sd > 0:
        raise ValueError(f"sd must be positive; got {sd}.")


def _one(i: int, leaf: Any) -> Any:
    return leaf[i : i + 1] if _has_examples(leaf) else leaf


def _has_examples(leaf: Any) -> bool:
    """Whether a part of a batch has one row per example: a flag and a tensor without dimensions do not."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0
