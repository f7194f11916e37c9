"""Scores against paper-sized cases, other people's code and their defining laws."""

import math
import warnings

import pytest
import torch
from scipy import integrate
from sklearn import metrics as sk

from bayesformer.evaluate import accuracy, brier, crps, f1, log_likelihood, mse, rmse, scores
from bayesformer.likelihoods.predictive import CategoricalPredictive, GaussianPredictive
from tests.laws import assert_mean

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchmetrics.functional import classification as tm


def categorical(*rows):
    """One predictive from L lists of B rows of C probabilities."""
    return CategoricalPredictive(torch.tensor(rows, dtype=torch.float64).log())


def random_categorical(draws=5, shape=(200,), classes=4, sharpness=2.0):
    return CategoricalPredictive((sharpness * torch.randn(draws, *shape, classes).double()).log_softmax(-1))


def random_gaussian(draws=4, shape=(6,), width=1):
    return GaussianPredictive(
        torch.randn(draws, *shape, width).double(), torch.rand(draws, *shape, width).double() + 0.1
    )


TWO = categorical([[0.5, 0.5, 0.0], [0.2, 0.2, 0.6]], [[0.1, 0.9, 0.0], [0.4, 0.4, 0.2]])  # mean .3 .7 0; .3 .3 .4


# log-likelihood


def test_log_likelihood_averages_probabilities_not_logs():
    torch.testing.assert_close(log_likelihood(TWO, torch.tensor([1, 2])), torch.tensor([0.7, 0.4]).double().log())


def test_log_likelihood_equals_log_loss_of_scikit_learn():
    predictive, targets = random_categorical(), torch.randint(4, (200,))
    expected = -sk.log_loss(targets, predictive.probs.numpy(), labels=range(4))
    assert log_likelihood(predictive, targets).mean().item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("pad", [-100, 10**6])
def test_log_likelihood_sums_counted_positions_and_never_sees_padding(pad):
    predictive, targets = random_categorical(shape=(3, 5)), torch.randint(4, (3, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    positions = predictive.log_prob(targets)
    expected = torch.stack([positions[0].sum(), positions[1, 0] + positions[1, 2], torch.tensor(0.0).double()])
    torch.testing.assert_close(log_likelihood(predictive, targets.masked_fill(~mask, pad), mask), expected)
    torch.testing.assert_close(log_likelihood(predictive, targets), positions.sum(1))


def test_gaussian_log_likelihood_ignores_nan_padding_in_predictions_and_targets():
    predictive, targets = random_gaussian(shape=(2, 3), width=2), torch.randn(2, 3, 2).double()
    mask = torch.tensor([[True, True, False], [False, True, True]])
    expected = (predictive.log_prob(targets) * mask).sum(1)
    predictive.means[:, ~mask], targets[~mask] = math.nan, math.nan
    torch.testing.assert_close(log_likelihood(predictive, targets, mask), expected)


def test_impossible_target_is_minus_infinity():
    assert log_likelihood(TWO, torch.tensor([2, 0]))[0] == -math.inf


@pytest.mark.parametrize("score", ["log", "brier"])
def test_true_probabilities_are_the_best_forecast_in_expectation(score):
    """Exact expectation over 3 classes, for forecasts on a grid of the simplex around the truth."""
    truth = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    outcomes = torch.arange(3)

    def expected(forecast):
        predictive = categorical([forecast])
        if score == "log":
            rows = CategoricalPredictive(predictive.log_probs.expand(1, 3, 3))
            return -(truth * log_likelihood(rows, outcomes)).sum().item()
        return sum(truth[y].item() * brier(predictive, outcomes[y : y + 1]) for y in range(3))

    best = expected(truth.tolist())
    for i in range(1, 20):
        for j in range(1, 20 - i):
            forecast = [i / 20, j / 20, 1 - (i + j) / 20]
            if forecast[:2] != [0.2, 0.5]:
                assert expected(forecast) > best + 1e-4
    if score == "brier":
        assert best == pytest.approx(1 - truth.square().sum().item())  # Σ p (1 - p)


# accuracy, F1, Brier


def test_accuracy_on_paper():
    assert accuracy(TWO, torch.tensor([1, 2])) == 1.0
    assert accuracy(TWO, torch.tensor([1, 0])) == 0.5


def test_accuracy_and_f1_equal_torchmetrics():
    predictive, targets = random_categorical(sharpness=1.0), torch.randint(4, (200,))
    targets = torch.where(torch.rand(200) < 0.6, predictive.labels, targets)  # a useful classifier
    assert accuracy(predictive, targets) == pytest.approx(
        tm.multiclass_accuracy(predictive.probs, targets, 4, average="micro").item()
    )
    for average in ("macro", "micro", "weighted"):
        theirs = tm.multiclass_f1_score(predictive.probs, targets, 4, average=average).item()
        assert f1(predictive, targets, average) == pytest.approx(theirs, rel=1e-6)


def test_f1_on_paper_leaves_out_classes_that_never_occur():
    """Predictions 0 0 1, targets 0 1 1: both classes have F1 2/3 (class 2 is absent), support 1 and 2."""
    predictive = categorical([[0.8, 0.1, 0.1], [0.8, 0.1, 0.1], [0.1, 0.8, 0.1]])
    assert f1(predictive, torch.tensor([0, 1, 1])) == pytest.approx(2 / 3)
    assert f1(predictive, torch.tensor([0, 1, 2]), "macro") == pytest.approx(2 / 9)
    assert f1(predictive, torch.tensor([0, 0, 2]), "weighted") == pytest.approx(2 / 3)
    assert f1(predictive, torch.tensor([0, 1, 2]), "micro") == pytest.approx(1 / 3)


def test_brier_on_paper_and_against_scikit_learn():
    assert brier(TWO, torch.tensor([1, 2])) == pytest.approx(((0.09 + 0.09) + (0.09 + 0.09 + 0.36)) / 2)
    predictive, targets = random_categorical(), torch.randint(4, (200,))
    theirs = sk.brier_score_loss(targets, predictive.probs.numpy(), labels=list(range(4)), scale_by_half=False)
    assert brier(predictive, targets) == pytest.approx(theirs, rel=1e-5)


def test_scores_of_a_grid_are_those_of_its_flat_questions():
    predictive, targets = random_categorical(shape=(4, 5)), torch.randint(4, (4, 5))
    flat, answers = predictive.select(torch.ones(4, 5).bool()), targets.flatten()
    for score in (accuracy, f1, brier):
        assert score(predictive, targets) == pytest.approx(score(flat, answers), rel=1e-6)


def test_yes_or_no_targets_may_be_floats():
    predictive = categorical([[0.9, 0.1], [0.2, 0.8]])
    assert accuracy(predictive, torch.tensor([0.0, 1.0])) == 1.0
    assert log_likelihood(predictive, torch.tensor([0.0, 1.0])).exp().tolist() == pytest.approx([0.9, 0.8])
    assert brier(predictive, torch.tensor([0.0, 1.0])) == pytest.approx((0.02 + 0.08) / 2)


# MSE and CRPS


def test_squared_error_is_that_of_the_mixture_mean():
    predictive = GaussianPredictive(torch.tensor([[[0.0], [1.0]], [[4.0], [1.0]]]), torch.ones(2, 2, 1))
    assert mse(predictive, torch.tensor([[0.0], [4.0]])) == pytest.approx((4 + 9) / 2)
    assert rmse(predictive, torch.tensor([[0.0], [4.0]])) == pytest.approx(math.sqrt(6.5))


def test_crps_of_one_gaussian_at_its_mean():
    predictive = GaussianPredictive(torch.full((1, 1, 1), 3.0), torch.full((1, 1, 1), 4.0))
    expected = 2 * (2 / math.sqrt(2 * math.pi) - 1 / math.sqrt(math.pi))  # σ (2φ(0) - 1/√π)
    assert crps(predictive, torch.full((1, 1), 3.0)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("draws", [1, 2, 5])
def test_crps_is_the_integral_of_the_squared_cdf_error(draws):
    predictive, targets = random_gaussian(draws, shape=(3,)), 2 * torch.randn(3, 1).double()
    integrals = []
    for n in range(3):
        one, y = predictive.select(torch.arange(3) == n), targets[n].item()

        def squared_error(x, one=one, y=y):
            return (one.cdf(torch.tensor([[x]]).double()).item() - (y <= x)) ** 2

        below, above = (
            integrate.quad(squared_error, y - 20, y)[0],
            integrate.quad(squared_error, y, y + 20)[0],
        )
        integrals.append(below + above)
    assert crps(predictive, targets) == pytest.approx(sum(integrals) / 3, rel=1e-6)


def test_crps_is_the_mean_of_its_monte_carlo_form():
    predictive, y = random_gaussian(3, shape=(1,)), 0.4
    component = torch.randint(3, (2, 200_000))
    means, sds = predictive.means[:, 0, 0], predictive.variances[:, 0, 0].sqrt()
    x, other = means[component] + sds[component] * torch.randn(2, 200_000)
    assert_mean((x - y).abs() - 0.5 * (x - other).abs(), crps(predictive, torch.full((1, 1), y)))


def test_crps_counts_the_spread_of_a_component_as_width():
    means, half = torch.randn(3, 4, 2), torch.full((3, 4, 2), 0.5)
    targets = torch.randn(4, 2)
    whole = crps(GaussianPredictive(means, 2 * half), targets)
    assert crps(GaussianPredictive(means, half, half), targets) == pytest.approx(whole)


def test_crps_in_parts_is_crps_at_once(monkeypatch):
    predictive, targets = random_gaussian(7, shape=(5, 3), width=2), torch.randn(5, 3, 2).double()
    whole = crps(predictive, targets)
    monkeypatch.setattr(scores, "PAIRS_AT_ONCE", 100)  # two values at a time
    assert crps(predictive, targets) == pytest.approx(whole, rel=1e-12)


def test_crps_holds_few_pairs_at_a_time(monkeypatch):
    """Seen through the sizes it works on: L = 40 draws of 3,000 questions are 2.3 million pairs."""
    sizes, mean_abs = [], scores._mean_abs
    monkeypatch.setattr(scores, "_mean_abs", lambda m, v: sizes.append(m.numel()) or mean_abs(m, v))
    crps(random_gaussian(40, shape=(3_000,)), torch.randn(3_000, 1))
    assert max(sizes) <= scores.PAIRS_AT_ONCE / 2
    assert sum(sizes) == 3_000 * (40 * 39 // 2 + 40)


# refusals


@pytest.mark.parametrize("score", [log_likelihood, accuracy, f1, brier])
def test_classification_scores_refuse_what_does_not_fit(score):
    predictive = random_categorical(shape=(3,))
    with pytest.raises(ValueError, match=r"targets must have shape \(3,\); got \(1,\)"):
        score(predictive, torch.tensor([0]))
    with pytest.raises(ValueError, match=r"targets must lie in 0..3; got 0..4. Drop padding"):
        score(predictive, torch.tensor([0, 4, 1]))
    with pytest.raises(ValueError, match="targets must be whole class numbers; got nan"):
        score(predictive, torch.tensor([0.0, math.nan, 1.0]))
    with pytest.raises(ValueError, match=r"log_probs must hold at least one draw .* got shape \(5, 0, 4\)"):
        score(predictive.select(torch.zeros(3).bool()), torch.zeros(0).long())
    predictive.log_probs[0, 1, 2] = math.nan
    with pytest.raises(ValueError, match="log_probs must not be NaN; got 1 of 60"):
        score(predictive, torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("score", [log_likelihood, mse, rmse, crps])
def test_regression_scores_refuse_what_does_not_fit(score):
    predictive, targets = random_gaussian(shape=(3,)), torch.zeros(3, 1)
    with pytest.raises(ValueError, match=r"targets must have shape \(3, 1\); got \(3,\)"):
        score(predictive, torch.zeros(3))
    with pytest.raises(ValueError, match=r"targets must be finite; got inf \(1 of 3\)"):
        score(predictive, torch.tensor([[0.0], [math.inf], [1.0]]))
    with pytest.raises(ValueError, match=r"means must hold at least one draw .* got shape \(4, 0, 1\)"):
        score(predictive.select(torch.zeros(3).bool()), torch.zeros(0, 1))
    with pytest.raises(ValueError, match=r"variances must have the shape of predictive.means"):
        score(GaussianPredictive(predictive.means, torch.ones(4, 1, 1)), targets)
    with pytest.raises(ValueError, match=r"widths must be positive; got 0.0"):
        score(GaussianPredictive(predictive.means, torch.zeros(4, 3, 1)), targets)
    predictive.means[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"means must be finite; got nan \(1 of 12\)"):
        score(predictive, targets)


def test_the_other_kind_of_predictive_is_refused():
    with pytest.raises(ValueError, match="must be a CategoricalPredictive; got GaussianPredictive"):
        accuracy(random_gaussian(), torch.zeros(6, 1))
    with pytest.raises(ValueError, match="must be a GaussianPredictive; got CategoricalPredictive"):
        crps(random_categorical(), torch.zeros(200))
    with pytest.raises(ValueError, match="CategoricalPredictive or a GaussianPredictive; got Tensor"):
        log_likelihood(torch.zeros(2, 3), torch.zeros(2, 3))


def test_log_likelihood_refuses_a_mask_that_does_not_fit():
    predictive, targets = random_categorical(shape=(2, 3)), torch.zeros(2, 3).long()
    with pytest.raises(ValueError, match=r"mask must be boolean; got torch\.int64"):
        log_likelihood(predictive, targets, torch.ones(2, 3).long())
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 3\); got \(2,\)"):
        log_likelihood(predictive, targets, torch.ones(2).bool())
    with pytest.raises(ValueError, match="mask must count at least one position; got none of 6"):
        log_likelihood(predictive, targets, torch.zeros(2, 3).bool())
    with pytest.raises(ValueError, match=r"targets must start with shape \(2, 3\); got \(2, 4\)"):
        log_likelihood(predictive, torch.zeros(2, 4).long(), torch.ones(2, 3).bool())


def test_f1_refuses_an_unknown_average():
    with pytest.raises(ValueError, match=r"unknown average 'makro'\. Did you mean 'macro'"):
        f1(TWO, torch.tensor([0, 1]), "makro")
