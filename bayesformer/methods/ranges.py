"""Rules for the settings of methods: what a value must be, in words that an error repeats."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What a setting must be: the end of the sentence "vi.draws must be …", and whether a value is that."""

    words: str
    holds: Callable[[Any], bool]


def check_ranges(method: object, **rules: Rule) -> None:
    """Refuse a method one of whose settings breaks its rule, naming the setting, the rule and the value.

    `check_ranges(self, draws=whole(1))` raises "vi.draws must be a whole number of at least 1; got 0."
    """
    for name, rule in rules.items():
        value = getattr(method, name)
        if not rule.holds(value):
            owner = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(method).__name__).lower()
            raise ValueError(f"{owner}.{name} must be {rule.words}; got {value!r}.")


def whole(least: int) -> Rule:
    """A whole number, `least` or more; 2.0 is not one."""
    return Rule(f"a whole number of at least {least}", lambda v: _number(v, Integral) and v >= least)


def at_least(low: float) -> Rule:
    """A number, `low` or more, infinity included."""
    return Rule(f"a number of at least {low}", lambda v: _number(v) and v >= low)


def above(low: float, finite: bool = False) -> Rule:
    """A number greater than `low`; infinity is refused only where `finite` is asked for."""
    words = f"a {'finite ' if finite else ''}number greater than {low}"
    return Rule(words, lambda v: _number(v) and v > low and not (finite and math.isinf(v)))


def finite() -> Rule:
    """Any number but infinities and NaN."""
    return Rule("a finite number", lambda v: _number(v) and math.isfinite(v))


def within(low: float, high: float) -> Rule:
    """A number from `low`, which is included, to `high`, which is not."""
    return Rule(f"at least {low} and less than {high}", lambda v: _number(v) and low <= v < high)


def between(low: float, high: float) -> Rule:
    """A number from `low` to `high`, neither of them included."""
    return Rule(f"strictly between {low} and {high}", lambda v: _number(v) and low < v < high)


def one_of(names: Iterable[str]) -> Rule:
    """One of these texts, and nothing else."""
    known = tuple(names)
    return Rule(f"one of {', '.join(map(repr, known))}", lambda v: isinstance(v, str) and v in known)


def either(first: Rule, second: Rule) -> Rule:
    """What one rule or the other allows."""
    return Rule(f"{first.words}, or {second.words}", lambda v: first.holds(v) or second.holds(v))


def _number(value: Any, kind: type = Real) -> bool:
    """Whether the value is a number of this kind; True and False are not, and NaN breaks every comparison."""
    return isinstance(value, kind) and not isinstance(value, bool)
