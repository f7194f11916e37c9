"""Stochastic families by name, with the defaults that each name stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from bayesformer.attention.contextual import Contextual
from bayesformer.attention.dirichlet import Dirichlet, Divergence, Gradient
from bayesformer.attention.family import AttentionFamily
from bayesformer.attention.gaussian_logits import GaussianLogits
from bayesformer.attention.lognormal import Lognormal
from bayesformer.attention.spread import DataDependent, Learned, LogitSpread, RowNetwork
from bayesformer.attention.weibull import Weibull
from bayesformer.core.errors import unknown_name

PriorKind: TypeAlias = Literal["fixed", "symmetric", "contextual"]


@dataclass(frozen=True)
class FamilyDefaults:
    """The default settings of a family, the kinds of prior it takes, and whether its spread can be learned."""

    spread: float
    prior_scale: float
    prior_location: float | None
    priors: tuple[str, ...]
    learns: bool


DEFAULTS: Mapping[str, FamilyDefaults] = {
    "gaussian": FamilyDefaults(0.1, 0.1, None, ("fixed",), True),
    "dirichlet": FamilyDefaults(10.0, 10.0, None, ("fixed", "symmetric"), True),
    "weibull": FamilyDefaults(10.0, 1e-4, 1e-4, ("fixed", "contextual"), False),
    "lognormal": FamilyDefaults(0.1, 1.0, 0.0, ("fixed", "contextual"), False),
}
FAMILIES = tuple(DEFAULTS)


def build_family(
    name: str,
    heads: int = 1,
    width: int = 1,
    *,
    spread: float | None = None,
    data_dependent: bool = False,
    length: int | None = None,
    prior: PriorKind = "fixed",
    prior_scale: float | None = None,
    prior_location: float | None = None,
    hidden: int = 5,
    per_head: bool = False,
    gradient: Gradient = "implicit",
    divergence: Divergence = "dirichlet",
    dropout: float = 0.0,
) -> AttentionFamily:
    """A family by name, for attention with `heads` heads of `width`.

    Args:
        name: "gaussian", "dirichlet", "weibull" or "lognormal".
        heads: H.
        width: d, of a key.
        spread: σ of gaussian and lognormal, sharpness of dirichlet, k of weibull; learned from there on by the
            first two, fixed for the others.
        data_dependent: whether a network gives the spread (gaussian, dirichlet).
        length: longest sequence, for a spread per position, or a network fed whole rows; None for any length.
        prior: "fixed": centred on the logits for gaussian and dirichlet, constant for the others; "symmetric"
            (dirichlet); or "contextual" (weibull, lognormal).
        prior_scale: σ₀ of gaussian and lognormal, sharpness of dirichlet, β of weibull.
        prior_location: α of weibull, μ of lognormal.
        hidden: width inside the networks of a spread or a contextual prior.
        per_head: whether every head has a network of its own for a contextual prior.
        gradient: of dirichlet draws.
        divergence: of dirichlet, from its prior.
        dropout: of weights, after they are drawn.
    """
    if name not in DEFAULTS:
        raise unknown_name("family", name, DEFAULTS)
    defaults = DEFAULTS[name]
    _check_fits(name, defaults, prior, data_dependent, length, prior_location)
    if per_head and prior != "contextual":
        raise ValueError(f"per_head must be left out without a contextual prior; got it with prior={prior!r}.")
    start = defaults.spread if spread is None else spread
    scale = defaults.prior_scale if prior_scale is None else prior_scale
    location = defaults.prior_location if prior_location is None else prior_location
    if name == "gaussian":
        return GaussianLogits(_spread(start, heads, data_dependent, length, hidden, False), scale, dropout)
    if name == "dirichlet":
        sharpness = _spread(start, heads, data_dependent, length, hidden, True)
        return Dirichlet(sharpness, scale, prior == "symmetric", gradient, divergence, dropout)
    context = Contextual(width, hidden, heads if per_head else None) if prior == "contextual" else None
    assert location is not None
    if name == "weibull":
        return Weibull(start, location, scale, context, dropout)
    return Lognormal(start, location, scale, context, dropout)


def _spread(
    start: float, heads: int, data_dependent: bool, length: int | None, hidden: int, per_row: bool
) -> LogitSpread:
    if not data_dependent:
        return Learned(start, heads, length, per_row)
    if length is None:
        return DataDependent(start, hidden, per_row)
    return RowNetwork(start, length, hidden, per_row)


def _check_fits(
    name: str, defaults: FamilyDefaults, prior: str, data_dependent: bool, length: int | None, location: float | None
) -> None:
    if prior not in defaults.priors:
        raise unknown_name(f"prior of {name} attention", prior, defaults.priors)
    if (data_dependent or length is not None) and not defaults.learns:
        given = "data_dependent" if data_dependent else "length"
        raise ValueError(f"{given} must be left out for {name} attention, whose spread is fixed; got it.")
    if location is not None and defaults.prior_location is None:
        raise ValueError(f"prior_location must be left out for {name} attention; got {location}.")
    if location is not None and prior == "contextual":
        raise ValueError(f"prior_location must be left out with a contextual prior; got {location}.")
