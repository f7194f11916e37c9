"""What a fit found out about itself: reasons not to believe a posterior as it stands."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

_said: ContextVar[set[str] | None] = ContextVar("said", default=None)


class FidelityWarning(UserWarning):
    """A posterior may be far from the true one, and the message says why and what to do."""


class Doubt(NamedTuple):
    """One finding of a check, with the numbers behind it."""

    check: str  # a short name: "mode", "regime", "length", "temperature", ...
    sentence: str  # what was found and what to do, in words that a user reads once
    value: float | None = None  # the number that was compared
    threshold: float | None = None  # with what


def recorded(doubts: Sequence[Doubt]) -> dict[str, Any]:
    """The doubts as an entry of a posterior's facts, which are saved as JSON."""
    return {"doubts": [doubt._asdict() for doubt in doubts]}


def with_doubts(facts: Mapping[str, Any], doubts: Sequence[Doubt]) -> dict[str, Any]:
    """The facts with further doubts; a check that is among them already speaks for itself."""
    known = doubts_in(facts)
    names = {doubt.check for doubt in known}
    return {**facts, **recorded([*known, *(doubt for doubt in doubts if doubt.check not in names)])}


def doubts_in(facts: Mapping[str, Any]) -> tuple[Doubt, ...]:
    """The doubts among the facts of a posterior."""
    return tuple(Doubt(**entry) for entry in facts.get("doubts", ()))


@contextmanager
def each_said_once() -> Iterator[None]:
    """What is warned of before a long run is not said again after it."""
    token = _said.set(set())
    try:
        yield
    finally:
        _said.reset(token)


def warn_of(doubts: Sequence[Doubt]) -> None:
    """One Python warning per doubt, as coming from the line outside this library that called it."""
    said = _said.get()
    for doubt in doubts:
        if said is not None and doubt.sentence in said:
            continue
        if said is not None:
            said.add(doubt.sentence)
        warnings.warn(doubt.sentence, FidelityWarning, stacklevel=_levels_inside() + 1)


def _levels_inside() -> int:
    """Calls on the stack above `warn_of`, itself included, that are this library's own."""
    frame, levels, own = inspect.currentframe(), 0, __name__.partition(".")[0]
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == own:
        frame, levels = frame.f_back, levels + 1
    return levels - 1
