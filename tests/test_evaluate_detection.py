"""Uncertainty as a detector: order laws, ties, paper cases and other people's code."""

import math
import warnings

import pytest
import torch

from bayesformer.evaluate import aupr, auroc, detection, fpr_at_95_tpr, stump_accuracy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchmetrics.functional import classification as tm

ALL = [auroc, aupr, fpr_at_95_tpr, stump_accuracy]
RANKED = [auroc, aupr, fpr_at_95_tpr]


def overlapping(n=300, m=200):
    return torch.randn(n).double(), torch.randn(m).double() + 1


def with_ties(n=300, m=200):
    return torch.randint(5, (n,)), torch.randint(5, (m,)) + 1


# laws


@pytest.mark.parametrize("case", [overlapping, with_ties])
def test_auroc_is_the_share_of_ordered_pairs_with_ties_half(case):
    low, high = case()
    above = (high[:, None] > low).double() + 0.5 * (high[:, None] == low)
    assert auroc(low, high) == pytest.approx(above.mean().item())


@pytest.mark.parametrize("case", [overlapping, with_ties])
def test_swapping_the_sets_turns_auroc_over(case):
    low, high = case()
    assert auroc(high, low) == pytest.approx(1 - auroc(low, high))


@pytest.mark.parametrize("score", RANKED)
def test_only_the_order_counts(score):
    low, high = overlapping()
    assert score(low.exp(), high.exp()) == score(low, high)
    assert score(3 * low - 7, 3 * high - 7) == score(low, high)


@pytest.mark.parametrize("score", RANKED)
def test_the_order_of_the_questions_does_not_count(score):
    low, high = with_ties()
    assert score(low.sort().values, high.flip(0)) == pytest.approx(score(low, high))


@pytest.mark.parametrize("case", [overlapping, with_ties])
def test_areas_equal_torchmetrics(case):
    low, high = case()
    scores = torch.cat([low, high]).double()
    scores = (scores - scores.min()) / (scores.max() - scores.min())  # theirs takes probabilities
    truth = torch.cat([torch.zeros(len(low)), torch.ones(len(high))]).long()
    assert auroc(low, high) == pytest.approx(tm.binary_auroc(scores, truth).item(), rel=1e-5)
    assert aupr(low, high) == pytest.approx(tm.binary_average_precision(scores, truth).item(), rel=1e-5)


# paper cases


def test_perfect_and_useless_detectors():
    low, high = torch.arange(10.0), torch.arange(10.0) + 100
    perfect = {"auroc": 1.0, "aupr": 1.0, "fpr95": 0.0, "stump_accuracy": 1.0}
    assert detection(low, high) == pytest.approx(perfect)
    same = torch.ones(10)
    useless = {"auroc": 0.5, "aupr": 6 / 16, "fpr95": 1.0, "stump_accuracy": 0.5}
    assert detection(same, same[:6]) == pytest.approx(useless)


def test_average_precision_on_paper():
    """Descending: + - + -, so precision 1 at recall ½ and 2/3 at recall 1."""
    assert aupr(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0])) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert auroc(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0])) == 0.75


def test_false_alarms_at_95_percent_on_paper():
    """20 positives 1..20: 19 of them are found at threshold 2, which raises 3 of the 5 negatives."""
    positives = torch.arange(1.0, 21.0)
    assert fpr_at_95_tpr(torch.tensor([0.0, 1.5, 2.0, 2.5, 9.0]), positives) == pytest.approx(3 / 5)
    assert fpr_at_95_tpr(torch.tensor([0.0, 1.0, 1.5, 1.9]), positives) == 0.0


# the stump


def test_stump_of_equal_sets_is_at_chance_whatever_the_sizes():
    """Majority voting would score 100/110 here."""
    scores = [stump_accuracy(torch.rand(1000), torch.rand(100)) for _ in range(40)]
    assert sum(scores) / 40 == pytest.approx(0.5, abs=0.04)  # sd of one is about .036


def test_stump_finds_the_best_threshold():
    """Uniforms on (0, 1) and (½, 3/2): any cut in the overlap is right 3 times in 4."""
    accuracy = stump_accuracy(torch.rand(20_000), 0.5 + torch.rand(2_000))
    assert accuracy == pytest.approx(0.75, abs=5 * 0.5 * math.sqrt(0.25 / 10_000 + 0.25 / 1_000))


def test_stump_is_tested_on_the_half_it_was_not_fitted_on():
    """The even half says low, the odd half high: a tree tested on its own half would score 1."""
    low, high = torch.tensor([0.0, 1.0]).repeat(10), torch.tensor([1.0, 0.0]).repeat(10)
    assert stump_accuracy(low, high) == 0.0


def test_stump_weighs_both_sets_alike_in_the_fit():
    """The half has 30 negatives at 0 and 10 at 1, positives at 1 and 2. With equal weight a cut at ½ has
    impurity .2, at 1.5 .33; counted, 3.3 and 2.0."""
    negatives = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]).repeat(10)
    positives = torch.tensor([1.0, 1.0, 2.0, 2.0])
    assert stump_accuracy(negatives, positives) == pytest.approx((0.75 + 1) / 2)


def test_stump_has_one_threshold():
    """Positives lie between the negatives: one cut leaves half of those, two would leave none."""
    assert stump_accuracy(torch.tensor([0.0, 0.0, 2.0, 2.0]).repeat(9), torch.ones(20)) == 0.75


def test_stump_learns_the_direction_and_repeats_itself():
    low, high = overlapping()
    assert stump_accuracy(high, low) == stump_accuracy(low, high) > 0.6


# all together, and refusals


def test_detection_is_the_four_scores():
    low, high = overlapping()
    names = ("auroc", "aupr", "fpr95", "stump_accuracy")
    assert detection(low, high) == {name: score(low, high) for name, score in zip(names, ALL, strict=True)}


@pytest.mark.parametrize("score", [*ALL, detection])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_uncertainty_must_be_finite(score, wrong):
    first, second = ("in_uncertainty", "out_uncertainty") if score is detection else ("negatives", "positives")
    good, bad = torch.zeros(3), torch.tensor([1.0, wrong, 2.0])
    with pytest.raises(ValueError, match=rf"^{first} must be finite; got {wrong} \(1 of 3\)"):
        score(bad, good)
    with pytest.raises(ValueError, match=rf"^{second} must be finite; got {wrong} \(1 of 3\)"):
        score(good, bad)


@pytest.mark.parametrize("score", ALL)
def test_uncertainty_must_be_a_vector_with_values(score):
    with pytest.raises(ValueError, match=r"^negatives must have one dimension; got shape \(2, 2\)"):
        score(torch.zeros(2, 2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"^positives must hold at least [12] values?; got 0"):
        score(torch.zeros(2), torch.zeros(0))


def test_a_stump_needs_two_of_each():
    with pytest.raises(ValueError, match=r"^positives must hold at least 2 values; got 1"):
        stump_accuracy(torch.zeros(4), torch.zeros(1))
    with pytest.raises(ValueError, match=r"^in_uncertainty must hold at least 2 values; got 1"):
        detection(torch.zeros(1), torch.zeros(4))
