"""What half precision leaves of a spread over weights: a draw closer to the mean than half a step rounds back to it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from bayesformer.laws import GaussianLaw
from bayesformer.model.skeleton import Skeleton

log = logging.getLogger("bayesformer")


def rounding_facts(skeleton: Skeleton, law: GaussianLaw) -> dict[str, Any]:
    """{"rounded_spread": share} where inferred weights compute in half precision, else nothing; says so in the log.

    The share is of the weights in half precision that have a spread: those whose standard deviation is below half the
    distance to the next number that their precision has.
    """
    staged = [leaf for leaf in skeleton.weights.values() if skeleton.is_staged(leaf)]
    places, sd = skeleton.space.slices, law.sd
    lost = spread = 0
    kinds: dict[str, None] = {}
    for leaf in staged:
        where = places[leaf.name]
        steps = half_steps(law.mean[where], leaf.tensor.dtype)
        lost += int(((sd[where] > 0) & (sd[where] < steps)).sum())
        spread += int((sd[where] > 0).sum())
        kinds[str(leaf.tensor.dtype).removeprefix("torch.")] = None
    if not spread:
        return {}
    if lost:
        log.warning(
            "%d of %d weights in %s have a spread below half a step of that precision: most of their draws "
            "round back to the mean; keep them in float32 to have it.",
            lost,
            spread,
            " and ".join(kinds),
        )
    return {"rounded_spread": lost / spread}


def half_steps(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance from each value to the next larger number of a floating dtype, in the shape of `values`."""
    exponent = torch.frexp(values.abs()).exponent - 1  # |w| lies in [2^e, 2^(e + 1))
    return torch.ldexp(torch.full_like(values, torch.finfo(dtype).eps / 2), exponent)
