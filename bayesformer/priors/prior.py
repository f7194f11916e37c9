"""A prior per group of parameters, chosen by name pattern.

    Prior({"*attention*": StudentT(5, 0, 1e-4), "*bias": None, "*": Normal(0, 1)})

The first pattern that matches a name decides; None is the flat (improper) prior. A pattern that matches
nothing, or a name that no pattern matches, is an error: a silent prior is a wrong prior.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import Tensor

from bayesformer.core.errors import unknown_name
from bayesformer.core.types import Params
from bayesformer.priors.distributions import FAMILIES, Distribution

PriorLike: TypeAlias = "Prior | Distribution | str | Mapping[str, Distribution | str | None]"


@dataclass(frozen=True)
class Prior:
    """Independent weights, each with the law of the first pattern that matches its parameter's name."""

    groups: Mapping[str, Distribution | None]

    def assign(self, names: Iterable[str], known: Iterable[str] | None = None) -> dict[str, Distribution | None]:
        """The law of every name. A pattern may match only others among the `known` names, but not none at all."""
        names = list(names)
        assigned: dict[str, Distribution | None] = {}
        used = set()
        for name in names:
            pattern = next((p for p in self.groups if fnmatchcase(name, p)), None)
            if pattern is None:
                raise ValueError(
                    f"prior must cover every parameter; none of {list(self.groups)} matches {name!r}. "
                    "Add '*': None for a flat prior on the rest."
                )
            used.add(pattern)
            assigned[name] = self.groups[pattern]
        used |= {next((p for p in self.groups if fnmatchcase(name, p)), "*") for name in known or ()}
        idle = [p for p in self.groups if p not in used and p != "*"]
        if idle:
            raise ValueError(f"prior pattern {idle[0]!r} must match a parameter; names are {names}.")
        return assigned

    def log_prob(self, params: Params) -> Tensor:
        """() sum of log densities over all weights."""
        laws = self.assign(params)
        terms = [law.log_prob(params[name]).sum() for name, law in laws.items() if law is not None]
        return torch.stack(terms).sum() if terms else next(iter(params.values())).new_zeros(())

    def sample(self, like: Params) -> Params:
        """One draw of all weights; a flat prior has none."""
        laws = self.assign(like)
        flat = [name for name, law in laws.items() if law is None]
        if flat:
            raise ValueError(f"a flat prior cannot be sampled; {flat[0]!r} has one.")
        return {name: law.sample(like[name]) for name, law in laws.items() if law is not None}


def as_prior(prior: PriorLike) -> Prior:
    """A prior from one law for all weights, its text such as "normal(0, 0.5)", or a dict by pattern."""
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, Mapping):
        if not prior:
            raise ValueError("prior must have at least one pattern; got an empty mapping.")
        return Prior({p: parse_law(law) if isinstance(law, str) else law for p, law in prior.items()})
    if not (prior is None or isinstance(prior, str) or hasattr(prior, "log_prob")):
        raise ValueError(f"prior must be a law, its text such as 'normal(0, 1)', or a dict by pattern; got {prior!r}.")
    return Prior({"*": parse_law(prior) if isinstance(prior, str) else prior})


def parse_law(text: str) -> Distribution | None:
    """ "student_t(5, 0, 1e-4)" -> StudentT(5, 0, 1e-4); "flat" -> None."""
    if text.strip() == "flat":
        return None
    match = re.fullmatch(r"\s*(\w+)\s*\(([^()]*)\)\s*", text)
    if match is None:
        raise ValueError(f"prior must read like 'normal(0, 1)', 'student_t(5, 0, 0.1)' or 'flat'; got {text!r}.")
    name, arguments = match.groups()
    if name not in FAMILIES:
        raise unknown_name("prior family", name, FAMILIES)
    try:
        numbers = [float(part) for part in arguments.split(",") if part.strip()]
        return FAMILIES[name](*numbers)
    except (TypeError, ValueError) as error:
        raise ValueError(f"prior {text!r} has wrong arguments: {error}") from error
