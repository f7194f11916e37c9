"""Rules for the settings of methods: what a value must be, in words that an error repeats."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True)
class SettingRule:
    """What a setting must be: the end of the sentence "vi.draws must be …", and whether a value is that."""

    words: str
    holds: Callable[[Any], bool]


def check_ranges(method: object, **rules: SettingRule) -> None:
    """Refuse a method one of whose settings breaks its rule, naming the setting, the rule and the value.

    `check_ranges(self, draws=whole(1))` raises "vi.draws must be a whole number of at least 1; got 0."
    """
    for name, rule in rules.items():
        value = getattr(method, name)
        if not rule.holds(value):
            owner = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(method).__name__).lower()
            raise ValueError(f"{owner}.{name} must be {rule.words}; got {value!r}.")


def check_num_data(num_data: int) -> None:
    """Refuse a number of training examples N that is less than 1, by which log p(θ) and KL(weights) are divided."""
    if num_data < 1:
        raise ValueError(f"num_data must be the number of training examples, at least 1; got {num_data}.")


def whole(least: int) -> SettingRule:
    """A whole number, `least` or more; 2.0 is not one."""
    return SettingRule(f"a whole number of at least {least}", lambda v: _number(v, Integral) and v >= least)


def at_least(low: float) -> SettingRule:
    """A number, `low` or more, infinity included."""
    return SettingRule(f"a number of at least {low}", lambda v: _number(v) and v >= low)


def above(low: float, finite: bool = False) -> SettingRule:
    """A number greater than `low`; infinity is refused only where `finite` is asked for."""
    words = f"a {'finite ' if finite else ''}number greater than {low}"
    return SettingRule(words, lambda v: _number(v) and v > low and not (finite and math.isinf(v)))


def or_auto(rule: SettingRule) -> SettingRule:
    """What a rule says, or the word "auto": the library then derives the value from the problem."""
    return SettingRule(f"{rule.words}, or 'auto'", lambda v: v == "auto" or rule.holds(v))


def finite() -> SettingRule:
    """Any number but infinities and NaN."""
    return SettingRule("a finite number", lambda v: _number(v) and math.isfinite(v))


def within(low: float, high: float) -> SettingRule:
    """A number from `low`, which is included, to `high`, which is not."""
    return SettingRule(f"at least {low} and less than {high}", lambda v: _number(v) and low <= v < high)


def between(low: float, high: float) -> SettingRule:
    """A number from `low` to `high`, neither of them included."""
    return SettingRule(f"strictly between {low} and {high}", lambda v: _number(v) and low < v < high)


def between_inclusive(low: float, high: float) -> SettingRule:
    """A number from `low` to `high`, both of them included."""
    return SettingRule(f"at least {low} and at most {high}", lambda v: _number(v) and low <= v <= high)


def nothing() -> SettingRule:
    """None, which leaves a setting to the method."""
    return SettingRule("none", lambda v: v is None)


def one_of(names: Iterable[str]) -> SettingRule:
    """One of these texts, and nothing else."""
    known = tuple(names)
    words = f"one of {', '.join(map(repr, known))}" if len(known) > 1 else repr(known[0])
    return SettingRule(words, lambda v: isinstance(v, str) and v in known)


def either(first: SettingRule, second: SettingRule) -> SettingRule:
    """What one rule or the other allows."""
    return SettingRule(f"{first.words}, or {second.words}", lambda v: first.holds(v) or second.holds(v))


def _number(value: Any, kind: type = Real) -> bool:
    """Whether the value is a number of this kind; True and False are not, and NaN breaks every comparison."""
    return isinstance(value, kind) and not isinstance(value, bool)
