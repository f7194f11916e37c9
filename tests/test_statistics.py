"""Aggregation over seeds: against numbers by hand, against scipy, and against the laws they promise."""

import math

import numpy as np
import pytest
from scipy import stats

from bayesformer.bench.statistics import (
    Difference,
    Entry,
    Summary,
    best,
    finite,
    holm,
    paired_difference,
    ranks,
    standings,
    summarise,
)


def run(method, seed, value, variant="", metric="log_likelihood"):
    return {"task": "t", "method": method, "variant": variant, "seed": seed, "metrics": {metric: value}}


def runs(method, *values, variant="", metric="log_likelihood"):
    return [run(method, seed, value, variant, metric) for seed, value in enumerate(values)]


def binomial_holds(successes, n, probability, failure_rate=1e-6):
    return stats.binomtest(successes, n, probability).pvalue > failure_rate


def test_summary_by_hand():
    mean, sd, n = summarise([1, 2.0, 4])
    assert (mean, n) == (7 / 3, 3)
    assert sd == pytest.approx(math.sqrt((16 + 1 + 25) / 9 / 2), rel=1e-12)


def test_summary_of_one_value_has_no_spread():
    assert summarise([3.5]) == Summary(3.5, None, 1)


def test_summary_leaves_out_what_is_not_a_finite_number():
    assert summarise([1.0, None, math.nan, math.inf, "2", True, 3.0]) == Summary(2.0, math.sqrt(2), 2)
    assert summarise([None, math.nan]) is None


@pytest.mark.parametrize("value", [None, math.nan, -math.inf, "1", True, [1]])
def test_only_finite_numbers_are_numbers(value):
    assert finite(value) is None


def test_paired_difference_by_hand():
    # Differences 1 and 3: mean 2, standard error 1, t = 2 with one degree of freedom, which is Cauchy.
    found = paired_difference({0: 5.0, 1: 9.0}, {0: 4.0, 1: 6.0})
    half = math.tan(math.pi * 0.475)  # the 97.5 % quantile of a Cauchy variable
    assert (found.mean, found.n) == (2.0, 2)
    assert found.p == pytest.approx(1 - 2 * math.atan(2) / math.pi, rel=1e-9)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half), rel=1e-9)


def test_paired_difference_is_that_of_scipy():
    rng = np.random.default_rng(1)
    ours, theirs = rng.normal(size=7) + 0.3, rng.normal(size=7)
    found = paired_difference(dict(enumerate(ours)), dict(enumerate(theirs)), confidence=0.9)
    expected = stats.ttest_rel(ours, theirs)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.9)), rel=1e-9)


def test_only_common_seeds_are_paired():
    found = paired_difference({0: 1.0, 1: 5.0, 7: 100.0}, {0: 0.0, 1: 3.0, 9: -100.0})
    assert (found.mean, found.n) == (1.5, 2)


def test_without_two_pairs_there_is_no_test():
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
    assert paired_difference({0: 3.0}, {0: 1.0}) == Difference(2.0, None, None, None, 1)


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_equal_differences_carry_no_noise_and_no_test(shift):
    baseline = {0: 0.7, 1: 0.2, 2: 0.3}
    found = paired_difference({s: v + shift for s, v in baseline.items()}, baseline)
    assert found.mean == pytest.approx(shift)
    assert (found.low, found.p, found.n) == (None, None, 3)


def test_interval_covers_the_true_difference_as_often_as_it_says():
    rng = np.random.default_rng(2)
    draws = 0.4 + rng.normal(size=(4000, 3))
    zero = dict.fromkeys(range(3), 0.0)
    found = [paired_difference(dict(enumerate(d)), zero) for d in draws]
    assert binomial_holds(sum(d.low < 0.4 < d.high for d in found), len(found), 0.95)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, None]) == pytest.approx([0.03, 0.06, 0.06, None])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2]
    assert holm([None, None]) == [None, None]


def test_holm_keeps_the_rate_of_any_false_alarm():
    rng = np.random.default_rng(3)
    alarms = sum(min(holm(list(p))) < 0.05 for p in rng.uniform(size=(20_000, 4)))
    assert binomial_holds(alarms, 20_000, 1 - (1 - 0.05 / 4) ** 4)  # exact for independent tests


def test_ranks_in_both_directions_with_ties_and_gaps():
    values = {"a": 2.0, "b": 3.0, "c": 2.0, "d": None, "e": 1.0}
    assert ranks(values, "higher") == {"a": 2, "b": 1, "c": 2, "d": None, "e": 4}
    assert ranks(values, "lower") == {"a": 2, "b": 4, "c": 2, "d": None, "e": 1}
    assert set(ranks(values, "none").values()) == {None}


def test_best_needs_someone_to_beat():
    assert best({"a": 1.0, "b": 2.0, "c": 2.0}, "higher") == {"b", "c"}
    assert best({"a": 1.0, "b": 2.0}, "lower") == {"a"}
    assert best({"a": 1.0, "b": 1.0}, "lower") == set()
    assert best({"a": 1.0, "b": None}, "higher") == set()
    assert best({"a": 1.0, "b": 2.0}, "none") == set()


def test_standings_order_ties_by_name_and_failures_last():
    table = standings(
        [*runs("mle", 1.0), *runs("z", 2.0), *runs("b", 2.0), *runs("a", math.nan)],
        "log_likelihood",
        "higher",
    )
    assert [(s.entry.method, s.rank) for s in table] == [("b", 1), ("z", 1), ("mle", 3), ("a", None)]
    assert [s.failed for s in table] == [0, 0, 0, 1]
    assert table[3].summary is None


@pytest.mark.parametrize(("direction", "first", "verdict"), [("higher", "good", "better"), ("lower", "mle", "worse")])
def test_verdicts_follow_the_direction(direction, first, verdict):
    results = [*runs("mle", 1.0, 1.1, 1.2, 0.9), *runs("good", 2.0, 2.11, 2.19, 1.9)]
    table = {s.entry.method: s for s in standings(results, "log_likelihood", direction)}
    assert table[first].rank == 1
    assert table["mle"].verdict == "baseline"
    assert table["mle"].difference is None
    assert table["good"].verdict == verdict


def test_p_values_are_corrected_over_the_methods_of_a_table():
    values = {"a": (1.5, 1.6, 2.1), "b": (1.2, 1.0, 1.4), "c": (0.9, 1.3, 1.2)}
    mle = (1.0, 1.1, 1.2)
    results = runs("mle", *mle) + [r for m, v in values.items() for r in runs(m, *v)]
    table = {s.entry.method: s for s in standings(results, "log_likelihood", "higher")}
    raw = [stats.ttest_rel(v, mle).pvalue for v in values.values()]
    assert [table[m].difference.p for m in values] == pytest.approx(raw)
    assert [table[m].p for m in values] == pytest.approx(holm(raw))
    assert table["a"].verdict == "unclear"


def test_one_seed_and_no_mle_are_untested():
    alone = standings(runs("a", 1.0, 2.0) + runs("b", 1.0, 3.0), "log_likelihood", "higher")
    single = standings(runs("a", 1.0) + runs("mle", 0.5), "log_likelihood", "higher")
    assert [s.verdict for s in alone] == ["untested", "untested"]
    assert [s.verdict for s in single] == ["untested", "baseline"]
    assert single[0].difference == Difference(0.5, None, None, None, 1)


def test_variants_are_rows_and_the_default_mle_is_the_baseline():
    results = [
        *runs("mle", 1.0, variant="lr=1"),
        *runs("mle", 2.0),
        *runs("a", 3.0, variant="k=2"),
        *runs("a", 4.0),
    ]
    table = standings(results, "log_likelihood", "higher")
    assert [s.entry.label for s in table] == ["a", "a (k=2)", "mle", "mle (lr=1)"]
    assert [s.verdict for s in table] == ["untested", "untested", "baseline", "untested"]
    assert table[0].entry == Entry("a")


@pytest.mark.parametrize(("seeds", "tested", "fragile"), [(1, False, False), (2, True, True), (3, True, False)])
def test_a_verdict_from_fewer_than_three_pairs_is_fragile(seeds, tested, fragile):
    results = runs("mle", *(1.0, 1.1, 1.3)[:seeds]) + runs("a", 2.0, 2.2, 2.1)  # pairs count, not runs
    table = {s.entry.method: s for s in standings(results, "log_likelihood", "higher")}
    assert (table["a"].tested, table["a"].fragile) == (tested, fragile)
    assert (table["mle"].tested, table["mle"].fragile) == (False, False)
