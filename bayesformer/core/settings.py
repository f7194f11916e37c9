"""Settings are fields of frozen dataclasses. Here they are overridden by name, checked, and explained."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from bayesformer.core.errors import unknown_name

T = TypeVar("T")

LATER = {"later": True}
"""Metadata of a field that was added when results without it had been stored; see `identity`."""


def override(instance: T, changes: Mapping[str, Any], where: str) -> T:
    """A copy of a dataclass with some fields changed; unknown names and wrong types are errors."""
    known = {f.name for f in fields(instance) if f.init}  # type: ignore[arg-type]
    hints = get_type_hints(type(instance))
    checked = {}
    for name, value in changes.items():
        if name not in known:
            raise unknown_name(f"setting of {where}", name, known)
        checked[name] = _fit_type(value, hints[name], f"{where}.{name}")
    return replace(instance, **checked)  # type: ignore[type-var]


def identity(kind: type[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that tell two results apart: without those marked `LATER` that are at their default, so that results
    stored before such a setting existed still count."""
    absent = {f.name for f in fields(kind) if f.metadata.get("later") and settings.get(f.name) == f.default}
    return {name: value for name, value in settings.items() if name not in absent}


def parse_assignment(text: str) -> tuple[list[str], Any]:
    """ "training.lr=1e-3" -> (["training", "lr"], 0.001); the value is TOML, or else plain text."""
    path, sign, value = text.partition("=")
    parts = path.strip().rsplit(".", 1)
    if not sign or len(parts) != 2 or not all(parts):
        raise ValueError(f"a setting must read like training.epochs=20 or ensemble.members=5; got {text!r}.")
    return parts, parse_value(value.strip())


def parse_value(text: str) -> Any:
    """A TOML value (number, string, boolean, list, table), "none", or the text itself."""
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def explain(kind: type[Any]) -> list[tuple[str, str, str]]:
    """(name, default, help) of every setting; the help is the text under the field."""
    texts: dict[str, str] = {}
    for base in reversed([base for base in kind.__mro__ if is_dataclass(base)]):
        texts |= _texts_under_fields(base)
    return [(f.name, _default(f), texts.get(f.name, "")) for f in fields(kind) if f.init]


def summary(kind: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(kind) or "").split("\n", 1)[0]


def _default(f: Field[Any]) -> str:
    if f.default is not MISSING:
        return "none" if f.default is None else str(f.default)
    return "required" if f.default_factory is MISSING else str(f.default_factory())


def _texts_under_fields(kind: type[Any]) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    texts = {}
    for line, following in itertools.pairwise(body):
        named = isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        if named and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            texts[line.target.id] = str(following.value.value)
    return texts


def _fit_type(value: Any, hint: Any, where: str) -> Any:
    """The value if it has the type of the field (an integer may stand for a float), else an error.

    Files of settings have no None: there "none" stands for it, where the field takes no text.
    """
    if value == "none" and type(None) in _options(hint) and str not in _options(hint):
        return None
    for option in _options(hint):
        if get_origin(option) is Literal:
            if value in get_args(option):
                return value
        elif option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        elif option is dict or get_origin(option) is dict:
            if isinstance(value, dict):
                return value
        elif get_origin(option) is tuple and isinstance(value, list | tuple):
            return tuple(value)
        elif type(value) is option:
            return value
    raise ValueError(f"{where} must be {_describe(hint)}; got {value!r}.")


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in {Union, types.UnionType} else (hint,)


def _describe(hint: Any) -> str:
    names = []
    for option in _options(hint):
        if get_origin(option) is Literal:
            names += [repr(choice) for choice in get_args(option)]
        else:
            names.append("none" if option is type(None) else getattr(option, "__name__", str(option)))
    return " or ".join(names)
