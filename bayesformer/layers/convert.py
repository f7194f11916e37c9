"""One call makes a model variational, one call makes it a point model again."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from bayesformer.layers.variational import Variational
from bayesformer.priors.prior import PriorLike


def convert(
    model: nn.Module,
    family: str = "gaussian",
    prior: PriorLike = "normal(0, 1)",
    subset: str | Iterable[str] = "*",
    *,
    local: bool = True,
    flipout: bool = False,
    rho: float = -7.0,
    df: float = 5.0,
) -> Variational:
    """A mean-field posterior whose locations are the model's weights; see `Variational` for the arguments."""
    return Variational(model, family, prior, subset, local=local, flipout=flipout, rho=rho, df=df)


def revert(variational: Variational) -> nn.Module:
    """A plain model of the original class, with the locations as its weights."""
    if not isinstance(variational, Variational):
        raise ValueError(f"revert needs a Variational model; got {type(variational).__name__}.")
    return variational.point()
