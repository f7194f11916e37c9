"""Which stochastic attention a model has, as plain data that a file can hold, and the way back.

A family is described by its registered name and the arguments of its constructor, which it keeps as attributes of the
same names. Parts of it, a spread or a contextual prior, are described alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from bayesformer.attention.contextual import Contextual
from bayesformer.attention.dirichlet import Dirichlet
from bayesformer.attention.family import AttentionFamily
from bayesformer.attention.gaussian_logits import GaussianLogits
from bayesformer.attention.hf import FAMILY
from bayesformer.attention.install import attach, attention_modules, check_site, prepared, refuse_installed
from bayesformer.attention.lognormal import Lognormal
from bayesformer.attention.spread import DataDependent, Learned, LogitSpread, RowNetwork
from bayesformer.attention.weibull import Weibull
from bayesformer.core.errors import unknown_name

KINDS: dict[str, type[nn.Module]] = {
    "gaussian": GaussianLogits,
    "dirichlet": Dirichlet,
    "weibull": Weibull,
    "lognormal": Lognormal,
    "learned": Learned,
    "data_dependent": DataDependent,
    "row_network": RowNetwork,
    "contextual": Contextual,
}
"""Families and their parts by the names under which files know them."""

PLAIN = (bool, int, float, str, type(None))


def register_family(name: str, kind: type[nn.Module]) -> None:
    """Let saved posteriors describe families, or parts of families, of a class of one's own.

        register_family("gumbel", Gumbel)

    Do it before saving and before loading. Every argument of the constructor must be kept as an attribute of the same
    name, and be a number, a string, a truth value, None, or a registered part; a dropout may be an `nn.Dropout`.
    """
    if not (inspect.isclass(kind) and issubclass(kind, AttentionFamily | LogitSpread | Contextual)):
        raise ValueError(f"kind must be a class of attention families or of their parts; got {kind!r}.")
    if KINDS.get(name, kind) is not kind:
        raise ValueError(f"name must not be taken by another class; {name!r} is {KINDS[name].__name__}.")
    KINDS[name] = kind


def describe_families(model: nn.Module) -> dict[str, dict[str, Any]]:
    """{name of an attention module: {"family": registered name, "settings": arguments}} of all stochastic attention.

    Enough to rebuild every family, but for the values of its parameters. A family that is no part of an attention
    module that `install` knows goes by its own name.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, AttentionFamily)}
    return {_site_name(name): _described("family", family, name) for name, family in found.items()}


def install_described(model: nn.Module, described: Mapping[str, Mapping[str, Any]]) -> nn.Module:
    """Give a model that has none exactly the families that `describe_families` found in another, in place.

    Their parameters are at the start. Returns the model; raises ValueError where it lacks one of the modules.
    """
    if not described:
        return model
    refuse_installed(model)
    found = attention_modules(model)
    missing = next((name for name in described if name not in found), None)
    if missing is not None:
        raise unknown_name("attention module", missing, found)
    sites = {name: found[name] for name in described}
    made = {}
    for name, site in sites.items():
        check_site(site, name)
        family = _rebuilt("family", described[name])
        assert isinstance(family, AttentionFamily)
        made[name] = prepared(family, site)
    return attach(model, sites, made)


def _site_name(name: str) -> str:
    """The name of the attention module that holds a family, given the family's own."""
    site, _, last = name.rpartition(".")
    return site if last in (FAMILY, "family") else name


def _described(role: str, module: nn.Module, where: str) -> dict[str, Any]:
    """{role: registered name, "settings": arguments of the constructor} of a family or a part."""
    module = getattr(module, "original_module", module)  # PEFT wraps what its modules_to_save names
    known = {kind: name for name, kind in KINDS.items()}
    kind = type(module)
    if kind not in known:
        raise ValueError(
            f"{where} must be of a registered class to be described in a file; got {kind.__name__}. Make it known: "
            f"bayesformer.attention.register_family({kind.__name__.lower()!r}, {kind.__name__})."
        )
    names = list(inspect.signature(kind).parameters)
    return {role: known[kind], "settings": {name: _value(module, name, f"{where}.{name}") for name in names}}


def _value(module: nn.Module, name: str, where: str) -> Any:
    value = getattr(module, name, ...)
    if isinstance(value, nn.Dropout):
        return value.p
    if isinstance(value, nn.Module):
        return _described("part", value, where)
    if not isinstance(value, PLAIN):
        what = "it is no attribute" if value is ... else f"got {type(value).__name__}"
        raise ValueError(
            f"{where} must be a number, a string, None or a registered part, kept under the name of the constructor's "
            f"argument, for its family to be described in a file; {what}."
        )
    return value


def _rebuilt(role: str, record: Mapping[str, Any]) -> nn.Module:
    if record.get(role) not in KINDS:
        raise unknown_name(f"registered attention {role}", str(record.get(role)), KINDS)
    settings = {
        name: _rebuilt("part", value) if isinstance(value, Mapping) else value
        for name, value in record["settings"].items()
    }
    return KINDS[record[role]](**settings)
