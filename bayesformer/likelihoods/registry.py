"""Likelihoods by name: how a user adds one, and how a saved posterior finds its own again."""

from __future__ import annotations

from typing import Any, TypeVar

from bayesformer.core.errors import unknown_name
from bayesformer.likelihoods.base import Likelihood

L = TypeVar("L", bound=type[Likelihood])

LIKELIHOODS: dict[str, type[Likelihood]] = {}
"""All likelihoods that were registered; the library's own are, by `bayesformer/likelihoods/__init__.py`."""


def register(kind: L) -> L:
    """Make a likelihood known by its name, in calls and in saved posteriors: `likelihoods.register(MyLikelihood)`.

    Returns the class, so that it can be a decorator. A class that is defined again, as in a notebook, takes its own
    place; a name that another class has is refused.
    """
    if not (isinstance(kind, type) and issubclass(kind, Likelihood)):
        raise ValueError(f"register takes a class that derives from bayesformer.likelihoods.Likelihood; got {kind!r}.")
    name = kind.__dict__.get("name", "")
    if not (isinstance(name, str) and name):
        raise ValueError(f"{kind.__name__}.name must be text, what users will write as likelihood=...; got {name!r}.")
    known = LIKELIHOODS.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        other = f"{known.__module__}.{known.__qualname__}"
        raise ValueError(f"{kind.__name__}.name must be new; got {name!r}, the name of {other}.")
    LIKELIHOODS[name] = kind
    return kind


def as_likelihood(likelihood: Likelihood | str) -> Likelihood:
    """A likelihood by name, with its default settings, or itself."""
    given: object = likelihood
    if isinstance(given, Likelihood):
        if type(given).predictive is Likelihood.predictive:  # not asked for before the first prediction
            raise ValueError(f"likelihood must define predictive; {type(given).__name__} does not.")
        return given
    if not isinstance(given, str):
        hint = f" Did you mean {given.__name__}()?" if isinstance(given, type) else ""
        raise ValueError(
            "likelihood must be a name or an object whose class derives from bayesformer.likelihoods.Likelihood; got "
            f"{given!r}.{hint}"
        )
    if given not in LIKELIHOODS:
        raise unknown_name("likelihood", given, LIKELIHOODS)
    return _build(given, {})


def to_json(likelihood: Likelihood) -> dict[str, Any]:
    """Name and settings, for a saved posterior."""
    kind = type(likelihood)
    if LIKELIHOODS.get(kind.name) is not kind:
        raise ValueError(
            f"likelihood must be registered to be saved; got {kind.__name__}. Call "
            f"bayesformer.likelihoods.register({kind.__name__}) and save again."
        )
    settings = likelihood.settings()
    for key, value in settings.items():
        if key == "name" or not (value is None or isinstance(value, bool | int | float | str)):
            raise ValueError(
                f"fields of {kind.__name__} must be numbers, text, booleans or None to be saved, and none be called "
                f"'name'; got {key}={value!r}."
            )
    return {"name": kind.name, **settings}


def from_json(saved: dict[str, Any]) -> Likelihood:
    """The likelihood that `to_json` described."""
    settings = dict(saved)
    name = settings.pop("name")
    if name not in LIKELIHOODS:
        raise ValueError(
            f"this posterior was saved with likelihood {name!r}, which is not registered here. Call "
            "bayesformer.likelihoods.register(...) with its class before loading. "
            f"Registered: {', '.join(sorted(LIKELIHOODS))}."
        )
    return _build(name, settings)


def _build(name: str, settings: dict[str, Any]) -> Likelihood:
    kind = LIKELIHOODS[name]
    try:
        return kind(**settings)
    except TypeError as error:
        raise ValueError(f"likelihood {name!r} cannot be built with settings {settings}: {error}.") from error
