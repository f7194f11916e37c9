"""What every inference algorithm needs of a log joint: its value and gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bayesformer.types import Batch, LogJoint, Params

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
