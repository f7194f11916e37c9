"""More data for a Laplace posterior: it becomes the prior, N(m, P⁻¹), of what comes after."""

from __future__ import annotations

from typing import Any

from bayesformer.posterior import Posterior


def laplace_update(posterior: Posterior, data: Any, *, training: Any = None, seed: int = 0) -> Posterior:
    """Being moved to the new ground."""
    raise NotImplementedError
