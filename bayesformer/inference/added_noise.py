"""Gaussian noise after every step of another algorithm, where its own has not the shape that is wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesformer.core.draws import normal_like
from bayesformer.core.types import Batch, Transform
from bayesformer.core.vectors import THETA


def with_noise(transform: Transform, root: Tensor) -> Transform:
    """The algorithm with θ ← θ + R z, z ~ N(0, I), after each of its steps, for one vector θ (P,) and R (P, P).

    Known exactly: steps φ ← (1 - h) φ with noise of covariance C, and R Rᵀ added to it, are stationary at the
    covariance (C + R Rᵀ) / (1 - (1 - h)²).
    """

    def update(state: Any, batch: Batch, inplace: bool = False) -> tuple[Any, Any]:
        state, aux = transform.update(state, batch, inplace=inplace)
        with torch.no_grad():
            state.params[THETA].add_(root @ normal_like(state.params[THETA]))
        return state, aux

    return Transform(transform.init, update)
