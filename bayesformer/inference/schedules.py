"""Learning rates as functions of the step, which counts from 1. Tensors in, tensors out: no device sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Schedule: TypeAlias = Callable[[Tensor], Tensor]


def constant(lr: float) -> Schedule:
    """η_t = η."""
    return lambda step: torch.full_like(step, lr)


def warmup_inverse_sqrt(lr: float, warmup: int) -> Schedule:
    """Linear to `lr` over `warmup` steps, then falling with the inverse square root of the step.

        η_t = η min(t / w, √(w / t))

    Vaswani et al. (2017), section 5.3, with the peak given directly instead of through the model's width.
    """
    if warmup < 1:
        raise ValueError(f"warmup must be at least 1 step; got {warmup}.")
    return lambda step: lr * torch.minimum(step / warmup, (warmup / step).sqrt())
