"""Stochastic variance reduced gradients: a batch corrects the gradient over all data, taken some steps before."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.core.types import Batch, Params, WholeLogJoint
from bayesformer.core.vectors import THETA


class Snapshot(NamedTuple):
    """Weights at which value and gradient over all data are known."""

    params: Params  # θ̃
    gradient: Params  # ∇U(θ̃) over all N examples
    value: Tensor  # (), U(θ̃)
    age: Tensor  # (), int64 on the CPU: steps since it was taken; -1 before the first


def blank_snapshot(params: Params) -> Snapshot:
    """A snapshot of nothing, to be taken before the first gradient."""
    theta = params[THETA]
    empty = {THETA: torch.zeros_like(theta)}
    age = torch.full((), -1, dtype=torch.int64, device="cpu")
    return Snapshot({THETA: theta.clone()}, empty, theta.new_zeros(()), age)


def is_due(snapshot: Snapshot, period: int) -> bool:
    """Whether `period` gradients were made from the snapshot, or none was taken yet."""
    return not 0 <= int(snapshot.age) < period


def take(log_joint: WholeLogJoint, params: Params, snapshot: Snapshot) -> tuple[Tensor, Tensor]:
    """Write a new snapshot at `params` over the old one; value () and gradient (P,) there, exact."""
    value, gradient = log_joint.over_all(params)
    snapshot.params[THETA].copy_(params[THETA])
    snapshot.gradient[THETA].copy_(gradient[THETA])
    snapshot.value.copy_(value)
    snapshot.age.fill_(1)
    return snapshot.value.clone(), snapshot.gradient[THETA].clone()


def estimate(
    log_joint: WholeLogJoint, params: Params, batch: Batch, snapshot: Snapshot
) -> tuple[Tensor, Tensor, Tensor]:
    """Value (), outputs and gradient (P,) at θ from a batch b and the snapshot θ̃.

        g = ∇U_b(θ) - ∇U_b(θ̃) + ∇U(θ̃)

    Johnson & Zhang (2013), and for Langevin dynamics Dubey et al. (2016), algorithm 2. Unbiased for a batch drawn at
    random; its noise is that of the difference, 0 at the snapshot. Two gradients of the batch.
    """
    then, _, gradient = log_joint.value_and_grad(snapshot.params, batch)
    correction = snapshot.gradient[THETA] - gradient[THETA]
    shift = snapshot.value - then
    value, outputs, gradient = log_joint.value_and_grad(params, batch)
    snapshot.age.add_(1)
    return value + shift, outputs, correction.add_(gradient[THETA])
