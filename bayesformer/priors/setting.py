"""Priors as settings: what a method, a TOML file or a saved posterior says of them."""

from __future__ import annotations

from typing import TypeAlias

from bayesformer.core.errors import unknown_name
from bayesformer.priors.improved import IMPROVED
from bayesformer.priors.prior import Prior, as_prior

PriorSetting: TypeAlias = str | dict[str, str]
"""A law such as "normal(0, 1)", a table of laws by name pattern, or a published table such as "improved/m1"."""


def prior_of(setting: PriorSetting) -> Prior:
    """The prior that a setting names."""
    if isinstance(setting, str) and setting.startswith("improved/"):
        name = setting.removeprefix("improved/")
        if name not in IMPROVED:
            raise unknown_name("improved prior", name, IMPROVED)
        return as_prior(IMPROVED[name])
    return as_prior(setting)
