"""Calibration: exact sampling sizes, other people's code, nominal coverage."""

import math
import warnings
from itertools import pairwise

import pytest
import torch
from scipy import stats

from bayesformer.evaluate import (
    coverage_curve,
    ece,
    ece_adaptive,
    ece_classwise,
    interval_coverage,
    reliability,
)
from bayesformer.likelihoods.predictive import CategoricalPredictive, GaussianPredictive
from tests.laws import assert_law, assert_mean

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchmetrics.functional import classification as tm

ALL = [ece, ece_adaptive, ece_classwise]


def categorical(rows):
    return CategoricalPredictive(torch.as_tensor(rows, dtype=torch.float64).log()[None])


def random_case(n=500, classes=4):
    """Targets from the predictive: gaps of both signs, since gaps of one sign give the same ECE in any bins."""
    predictive = CategoricalPredictive((2 * torch.randn(3, n, classes).double()).log_softmax(-1))
    return predictive, predictive.probs.multinomial(1).squeeze(-1)


def binary(confidence):
    """Class 0 with this confidence, at least one half."""
    confidence = torch.as_tensor(confidence, dtype=torch.float64)
    return categorical(torch.stack([confidence, 1 - confidence], -1))


# ECE


def test_ece_on_paper():
    """Right at .6 and .8, wrong at .9. One bin: |2/3 - 23/30| = .1; (.5, .75] and (.75, 1]: .4/3 + .7/3."""
    predictive, targets = binary([0.6, 0.8, 0.9]), torch.tensor([0, 0, 1])
    assert ece(predictive, targets, bins=2) == pytest.approx(0.1)
    assert ece(predictive, targets, bins=4) == pytest.approx((0.4 + 0.7) / 3)
    assert ece_adaptive(predictive, targets, bins=1) == pytest.approx(0.1)
    assert ece_adaptive(predictive, targets, bins=2) == pytest.approx((0.6 + 0.9) / 3)  # {.6, .8}, {.9}
    assert ece_classwise(predictive, targets, bins=2) == pytest.approx(0.1)  # both classes see the same gap


def test_an_edge_belongs_to_the_bin_below():
    predictive, targets = binary([0.75, 0.8]), torch.tensor([1, 0])
    assert ece(predictive, targets, bins=4) == pytest.approx((0.75 + 0.2) / 2)
    assert reliability(predictive, targets, bins=4)["count"] == [1, 1]


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_equals_torchmetrics(bins):
    predictive, targets = random_case()
    theirs = tm.multiclass_calibration_error(predictive.probs, targets, 4, n_bins=bins, norm="l1")
    assert ece(predictive, targets, bins) == pytest.approx(theirs.item(), rel=1e-4)


def test_classwise_ece_is_the_mean_of_binary_ones():
    """A class against the rest, by torchmetrics: for p of one class its binary error bins p itself."""
    predictive, targets = random_case()
    theirs = [
        tm.binary_calibration_error(predictive.probs[:, c].contiguous(), (targets == c).long(), n_bins=10, norm="l1")
        for c in range(4)
    ]
    assert ece_classwise(predictive, targets, 10) == pytest.approx(sum(theirs).item() / 4, rel=1e-4)


def test_adaptive_bins_hold_equal_numbers():
    """100 questions without ties in 8 bins: the naive twin cuts the sorted list after ⌈100 k / 8⌉."""
    predictive, targets = random_case(100)
    confidence, order = predictive.probs.amax(-1).double().sort()
    correct = (predictive.labels == targets)[order].double()
    cuts = [math.ceil(100 * k / 8) for k in range(9)]
    gaps = [(correct[a:b] - confidence[a:b]).sum().abs() for a, b in pairwise(cuts)]
    assert ece_adaptive(predictive, targets, bins=8) == pytest.approx(sum(gaps).item() / 100)


def test_adaptive_ece_of_equal_confidences_ignores_their_order():
    predictive = binary([0.8] * 10)
    right_first = torch.tensor([0] * 8 + [1] * 2)
    assert ece_adaptive(predictive, right_first, bins=5) == pytest.approx(0)
    assert ece_adaptive(predictive, right_first.flip(0), bins=5) == pytest.approx(0)


def test_ece_of_a_calibrated_predictive_has_its_exact_sampling_size():
    """n_b answers, right with probability p_b as they say: N E[ECE] = Σ_b E|Binomial(n_b, p_b) - n_b p_b|."""
    sizes, confidences = (40, 25, 60), (0.55, 0.7, 0.9)
    expected = sum(
        stats.binom(n, p).expect(lambda k, n=n, p=p: abs(k - n * p)) for n, p in zip(sizes, confidences, strict=True)
    ) / sum(sizes)
    confidence = torch.tensor(confidences).repeat_interleave(torch.tensor(sizes))
    predictive = binary(confidence)
    wrong = (torch.rand(400, len(confidence)) > confidence).long()
    for score in ALL:  # of two classes, each sees the same gap
        # 12 adaptive bins of at most 11 questions: ties keep the three groups whole
        assert_mean(torch.tensor([score(predictive, row, bins=12) for row in wrong]), expected)


@pytest.mark.parametrize("score", ALL)
def test_overconfidence_is_measured(score):
    targets = (torch.rand(20_000) > 0.7).long()  # says .95, is right 70 %
    assert score(binary([0.95] * 20_000), targets) == pytest.approx(0.25, abs=5 * math.sqrt(0.21 / 20_000))


def test_ece_uses_the_averaged_probabilities():
    draws = torch.tensor([[[1.0, 0.0]], [[0.2, 0.8]]]).double().log()
    assert ece(CategoricalPredictive(draws), torch.tensor([0])) == pytest.approx(0.4)


@pytest.mark.parametrize("score", [*ALL, reliability])
def test_a_grid_is_its_flat_questions(score):
    predictive, targets = random_case(60)
    grid = CategoricalPredictive(predictive.log_probs.view(3, 12, 5, 4))
    assert score(grid, targets.view(12, 5)) == score(predictive, targets)


@pytest.mark.parametrize("score", [*ALL, reliability])
def test_memory_layout_does_not_matter(score):
    predictive, targets = random_case(60)
    turned = CategoricalPredictive(predictive.log_probs.mT.contiguous().mT)
    assert score(turned, targets) == score(predictive, targets)


# the diagram


def test_reliability_lists_the_bins_that_have_questions():
    diagram = reliability(binary([0.6, 0.62, 0.9, 1.0]), torch.tensor([0, 1, 0, 0]), bins=10)
    assert diagram["count"] == [1, 1, 1, 1]  # (.5, .6], (.6, .7], (.8, .9], (.9, 1]
    diagram = reliability(binary([0.61, 0.63, 0.95, 1.0]), torch.tensor([0, 1, 0, 0]), bins=10)
    assert diagram["count"] == [2, 2]
    assert diagram["confidence"] == pytest.approx([0.62, 0.975])
    assert diagram["accuracy"] == [0.5, 1.0]


def test_ece_follows_from_the_diagram():
    predictive, targets = random_case()
    diagram = reliability(predictive, targets, bins=9)
    gap = sum(
        n * abs(c - a) for c, a, n in zip(diagram["confidence"], diagram["accuracy"], diagram["count"], strict=True)
    )
    assert sum(diagram["count"]) == 500
    assert ece(predictive, targets, bins=9) == pytest.approx(gap / 500)


# coverage


def mixture_and_its_data(n=40_000):
    """Means far apart and unequal widths: no Gaussian would have these intervals."""
    predictive = GaussianPredictive(
        torch.tensor([-2.0, 0.0, 3.0]).view(3, 1, 1).expand(3, n, 1),
        torch.tensor([0.1, 1.0, 0.5]).view(3, 1, 1).expand(3, n, 1),
        torch.tensor([0.2, 0.0, 0.5]).view(3, 1, 1).expand(3, n, 1),
    )
    which = torch.randint(3, (n,))
    noise = predictive.widths[which, 0].sqrt() * torch.randn(n, 1)
    return predictive, predictive.means[which, 0] + noise


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
def test_data_from_the_predictive_is_covered_at_the_nominal_level(level):
    predictive, targets = mixture_and_its_data()
    inside = round(interval_coverage(predictive, targets, level) * len(targets))
    assert stats.binomtest(inside, len(targets), level).pvalue > 1e-6


def test_coverage_curve_is_the_law_of_the_centred_pit():
    """The whole curve at once: |2 F(y) - 1| is uniform."""
    predictive, targets = mixture_and_its_data(10_000)
    curve = coverage_curve(predictive, targets, [0.25, 0.5, 0.75])
    assert curve["levels"] == [0.25, 0.5, 0.75]
    for level, coverage in zip(curve["levels"], curve["coverage"], strict=True):
        assert coverage == interval_coverage(predictive, targets, level)
    assert_law((2 * predictive.cdf(targets) - 1).abs(), stats.uniform.cdf)


def test_coverage_on_paper():
    """A unit Gaussian's central 68.27 % is ±1: of -1.1, -.9, 0, 2, two lie inside."""
    predictive = GaussianPredictive(torch.zeros(1, 2, 2), torch.ones(1, 2, 2))
    targets = torch.tensor([[-1.1, -0.9], [0.0, 2.0]])
    assert interval_coverage(predictive, targets, 0.6827) == 0.5
    assert coverage_curve(predictive, targets, (0.6827, 0.96))["coverage"] == [0.5, 1.0]


def test_narrow_predictives_cover_too_little():
    predictive, targets = mixture_and_its_data(2_000)
    narrow = GaussianPredictive(predictive.means, predictive.variances / 10)
    assert interval_coverage(narrow, targets, 0.9) < interval_coverage(predictive, targets, 0.9) - 0.05


# refusals


@pytest.mark.parametrize("score", [*ALL, reliability])
def test_calibration_refuses_what_does_not_fit(score):
    predictive, targets = binary([0.6, 0.8]), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"targets must have shape \(2,\); got \(1,\)"):
        score(predictive, targets[:1])
    for bins in (0, 2.5):
        with pytest.raises(ValueError, match=f"bins must be a whole number, at least 1; got {bins}"):
            score(predictive, targets, bins=bins)
    with pytest.raises(ValueError, match=r"must hold at least one draw"):
        score(predictive.select(torch.zeros(2).bool()), targets[:0])
    predictive.log_probs[0, 0] = math.nan
    with pytest.raises(ValueError, match="log_probs must not be NaN; got 2 of 4"):
        score(predictive, targets)


def test_coverage_refuses_what_does_not_fit():
    predictive, targets = GaussianPredictive(torch.zeros(1, 2, 1), torch.ones(1, 2, 1)), torch.zeros(2, 1)
    for level in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match=f"level must lie strictly between 0 and 1; got {level}"):
            interval_coverage(predictive, targets, level)
        with pytest.raises(ValueError, match=f"levels must lie strictly between 0 and 1; got {level}"):
            coverage_curve(predictive, targets, [0.5, level])
    with pytest.raises(ValueError, match="levels must hold at least one level; got none"):
        coverage_curve(predictive, targets, [])
    with pytest.raises(ValueError, match=r"targets must have shape \(2, 1\); got \(2,\)"):
        interval_coverage(predictive, targets[:, 0], 0.9)
    with pytest.raises(ValueError, match="targets must be finite; got nan"):
        interval_coverage(predictive, targets + math.nan, 0.9)
