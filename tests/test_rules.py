"""Rules for settings: what they allow, and what an error says."""

import math

import numpy as np
import pytest

from bayesformer.core.rules import above, at_least, between, check_ranges, either, finite, one_of, whole, within
from bayesformer.methods import METHODS

ALLOWED = {
    whole(1): ([1, 7, np.int64(3)], [0, -1, 1.0, 2.5, True, "2", None, math.nan]),
    at_least(0): ([0, 0.0, 3, math.inf, np.float32(0.5)], [-1e-9, math.nan, "1", None, False]),
    above(0): ([1e-9, math.inf], [0, -1, math.nan, "1"]),
    above(0, finite=True): ([1e-9], [0, math.inf, math.nan]),
    finite(): ([-5, 0.0], [math.inf, -math.inf, math.nan, "x"]),
    within(0, 1): ([0, 0.999], [1, -0.1, math.nan]),
    between(0, 1): ([0.5], [0, 1, math.nan]),
    one_of(("a", "b")): (["a"], ["c", "", 1, None, ["a"]]),
    either(above(0), one_of(("auto",))): ([2.0, "auto"], [0, "other", math.nan]),
}


@pytest.mark.parametrize("rule", ALLOWED, ids=lambda rule: rule.words)
def test_rules_hold_for_what_their_words_say(rule):
    good, bad = ALLOWED[rule]
    assert all(rule.holds(value) for value in good)
    assert not any(rule.holds(value) for value in bad)


@pytest.mark.parametrize(
    ("method", "settings", "text"),
    [
        ("vi", {"temperature": -1}, "vi.temperature must be a number greater than 0; got -1."),
        ("vi", {"temperature": "hot"}, "vi.temperature must be a number greater than 0; got 'hot'."),
        ("vi", {"draws": 2.5}, "vi.draws must be a whole number of at least 1; got 2.5."),
        ("sghmc", {"warm_up": 1.0}, "sghmc.warm_up must be at least 0 and less than 1, or none; got 1.0."),
        ("sghmc", {"lr": math.inf}, "sghmc.lr must be a finite number greater than 0, or 'auto'; got inf."),
        ("ivon", {"decay": 1.0}, "ivon.decay must be strictly between 0 and 1, or 'auto'; got 1.0."),
        ("mean_field", {"draws": 0}, "mean_field.draws must be a whole number of at least 1; got 0."),
        ("concrete_dropout", {"high": 0.01}, "concrete_dropout.high must be at least 0.05 and less than 1; got 0.01."),
        ("vi", {"log_sd": math.nan}, "vi.log_sd must be a finite number, or 'auto'; got nan."),
        (
            "swag",
            {"predictive": "x"},
            "swag.predictive must be one of 'sampled', 'linearised', 'streamlined', 'one_pass'; got 'x'.",
        ),
    ],
)
def test_methods_name_the_setting_the_rule_and_the_value(method, settings, text):
    settings = {"low": 0.05, **settings} if method == "concrete_dropout" else settings
    with pytest.raises(ValueError, match=f"^{text.replace('.', '[.]').replace('(', '[(]')}$"):
        METHODS[method](**settings)


def test_rules_are_asked_in_order_and_all_may_hold():
    class Example:
        first, second = 1, 0

    check_ranges(Example(), first=whole(1), second=whole(0))
    with pytest.raises(ValueError, match="example.second must be a whole number of at least 1; got 0"):
        check_ranges(Example(), first=whole(1), second=whole(1))
