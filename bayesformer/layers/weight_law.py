"""The posterior of a `Variational` network as a law over the weights of the plain model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bayesformer.core.types import Params
from bayesformer.laws import Diagonal, GaussianLaw, LocationScaleLaw
from bayesformer.layers.families import FAMILIES, GaussianWeights
from bayesformer.layers.variational import Variational
from bayesformer.model.space import Space

INNER = "model."
"""What the names of a plain model's parameters and buffers begin with inside a `Variational`."""


def weight_law(
    random: Variational, values: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> tuple[Space, GaussianLaw | LocationScaleLaw]:
    """The learned weights of the plain model as a Space, and their law; weights that stayed points have no spread.

    Args:
        random: gives the family and the names of the random weights.
        values: its parameters by name, as trained.
        buffers: its buffers by name, each (1, ...).
    """
    space = Space.of(random.model)
    mean = space.pack({name: values[INNER + name] for name in space.names})
    scale = softplus(_joined(values, "rho", random.space))
    inner = {name.removeprefix(INNER): value for name, value in buffers.items() if name.startswith(INNER)}
    place = space.places(random.space, mean.device)
    if random.family is GaussianWeights:
        whole = GaussianLaw(mean[place], (slice(0, len(scale)),), (Diagonal(scale.square()),), inner)
        return space, whole.at(mean, place)
    index = torch.arange(space.size, device=mean.device)[place]
    family = next(name for name, kind in FAMILIES.items() if kind is random.family)
    df = 2 + softplus(_joined(values, "raw_df", random.space)) if "raw_df" in random.family.raw else None
    return space, LocationScaleLaw(mean, family, index, scale, df, inner)


def _joined(values: Mapping[str, Tensor], name: str, space: Space) -> Tensor:
    """(Q,): a raw parameter of all random weights, in the order of their space."""
    own: Params = {weight: values[f"{name}.{i}"] for i, weight in enumerate(space.names)}
    return space.pack(own)
