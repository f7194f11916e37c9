"""Outputs of a network before they become probabilities: their precision, their draws, their link."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesformer.core.types import Draws, GaussianOutputs, Outputs
from bayesformer.likelihoods.links import LINKS, Link, check_link

LINK_DRAWS = 512  # draws of a Gaussian over outputs where the predictive has no closed form


def promote(outputs: Tensor) -> Tensor:
    """Outputs in float32 if they are float16 or bfloat16, else as they are.

    In bfloat16 the probabilities of a softmax sum to .99 or 1.01, and small differences between draws round to 0.
    """
    return outputs.float() if outputs.dtype in {torch.float16, torch.bfloat16} else outputs


def as_draws(outputs: Outputs, draws: int | None = None, seed: int = 0) -> Tensor:
    """(L, B, ..., K): the draws, or draws of a Gaussian over outputs, from the same normal numbers for every input."""
    if isinstance(outputs, Draws):
        return promote(outputs.values)
    if draws is not None and draws < 1:
        raise ValueError(f"draws must be at least 1; got {draws}.")
    return promoted_gaussian(outputs).draw(draws or LINK_DRAWS, seed)


def closed_form(outputs: Outputs, link: str | None, allowed: tuple[Link, ...] = LINKS) -> GaussianOutputs | None:
    """The Gaussian to put through a link in closed form, or None where outputs are drawn.

    Raises ValueError for a link that is unknown, not among `allowed`, or given for outputs that are draws already.
    """
    check_link(link, allowed)
    if isinstance(outputs, GaussianOutputs):
        return None if link in {None, "mc"} else promoted_gaussian(outputs)
    if link is not None:
        raise ValueError(f"link must be none for outputs that are draws of the weights; got {link!r}.")
    return None


def promoted_gaussian(outputs: GaussianOutputs) -> GaussianOutputs:
    """A Gaussian over outputs whose moments are at least float32."""
    factor = None if outputs.factor is None else promote(outputs.factor)
    return GaussianOutputs(promote(outputs.mean), promote(outputs.diagonal), factor)
