"""Answering only when sure: the best order, ties, and PAvPU against scipy."""

import itertools
import math

import pytest
import torch
from scipy import stats

from bayesformer.evaluate import aurc, eaurc, pavpu, risk_coverage
from bayesformer.likelihoods.predictive import CategoricalPredictive

# risk and coverage


def test_curve_on_paper():
    """By rising uncertainty the losses are 0, 1, 1, 0."""
    curve = risk_coverage(torch.tensor([0.4, 0.1, 0.3, 0.2]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert curve.coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert curve.risk.tolist() == pytest.approx([0, 1 / 2, 2 / 3, 1 / 2])


def test_aurc_on_paper():
    uncertainty, loss = torch.tensor([0.4, 0.1, 0.3, 0.2]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert aurc(uncertainty, loss) == pytest.approx((1 / 2 + 2 / 3 + 1 / 2) / 4)
    assert eaurc(uncertainty, loss) == pytest.approx((1 / 2 + 2 / 3 + 1 / 2 - 1 / 3 - 1 / 2) / 4)


def test_the_order_of_the_losses_is_the_best_of_all_orders():
    loss = torch.tensor([0.3, 0.0, 1.0, 0.3, 0.7])
    areas = [aurc(torch.tensor(order), loss) for order in itertools.permutations(range(5))]
    assert aurc(loss, loss) == pytest.approx(min(areas))
    assert eaurc(loss, loss) == 0
    assert eaurc(loss.exp(), loss) == pytest.approx(0)
    assert eaurc(-loss, loss) == pytest.approx(max(areas) - min(areas))


def test_ties_are_the_mean_over_their_orders():
    uncertainty, loss = torch.tensor([1, 0, 1, 1, 2]), torch.tensor([0.0, 0.2, 1.0, 0.5, 0.3])
    broken = [aurc(uncertainty + torch.tensor(noise) / 10, loss) for noise in itertools.permutations(range(5))]
    assert aurc(uncertainty, loss) == pytest.approx(sum(broken) / len(broken))


def test_constant_uncertainty_leaves_the_mean_loss_at_every_coverage():
    loss = torch.rand(50)
    risk = risk_coverage(torch.zeros(50), loss).risk
    torch.testing.assert_close(risk, loss.double().mean().expand(50))


def test_whole_coverage_is_the_mean_loss():
    uncertainty, loss = torch.rand(50), torch.rand(50)
    assert risk_coverage(uncertainty, loss).risk[-1].item() == pytest.approx(loss.double().mean().item())


def test_curve_refuses_what_does_not_fit():
    good = torch.rand(3)
    for score in (risk_coverage, aurc, eaurc):
        with pytest.raises(ValueError, match=r"loss must have the shape of uncertainty, \(3,\); got \(1,\)"):
            score(good, torch.rand(1))
        with pytest.raises(ValueError, match="uncertainty must hold at least 1 value; got 0"):
            score(torch.zeros(0), torch.zeros(0))
        with pytest.raises(ValueError, match=r"uncertainty must have one dimension; got shape \(3, 1\)"):
            score(good[:, None], good[:, None])
        with pytest.raises(ValueError, match="uncertainty must be finite; got inf"):
            score(good + math.inf, good)
        with pytest.raises(ValueError, match="loss must be finite; got nan"):
            score(good, good * math.nan)


# PAvPU


def predictive_of(probs):
    return CategoricalPredictive(torch.as_tensor(probs, dtype=torch.float64).log())


def test_pavpu_counts_accurate_certain_and_inaccurate_uncertain():
    """Two questions with clear draws, two with wavering ones; each kind once right and once wrong."""
    clear = [[0.9, 0.1], [0.88, 0.12], [0.92, 0.08]]
    wavering = [[0.9, 0.1], [0.1, 0.9], [0.7, 0.3]]
    predictive = predictive_of([[clear[k], clear[k], wavering[k], wavering[k]] for k in range(3)])
    assert predictive.labels.tolist() == [0, 0, 0, 0]
    for targets, expected in {
        (0, 1, 0, 1): 0.5,
        (0, 0, 1, 1): 1.0,
        (1, 1, 0, 0): 0.0,
        (0, 0, 1, 0): 0.75,
    }.items():
        assert pavpu(predictive, torch.tensor(targets)) == expected


@pytest.mark.parametrize("threshold", [0.01, 0.05, 0.5])
def test_pavpu_equals_a_loop_of_welch_tests(threshold):
    predictive = CategoricalPredictive((1.5 * torch.randn(10, 200, 4)).log_softmax(-1))
    targets = torch.randint(4, (200,))
    agree = 0
    for n in range(200):
        first, second = predictive.probs[n].topk(2).indices
        draws = predictive.log_probs[:, n].double().exp()
        test = stats.ttest_ind(draws[:, first], draws[:, second], equal_var=False)
        agree += (test.pvalue < threshold) == (first == targets[n]).item()
    assert pavpu(predictive, targets, threshold) == pytest.approx(agree / 200)


def test_unequal_variances_cost_degrees_of_freedom():
    """.5 always against .1 .2 .3: t = .3 √3 / .1 = 5.2 has p = .035 by Welch (2 degrees), .007 if pooled (4)."""
    rows = [[0.5, 0.1, 0.2, 0.2], [0.5, 0.2, 0.15, 0.15], [0.5, 0.3, 0.1, 0.1]]
    predictive = predictive_of(rows).log_probs[:, None]
    assert pavpu(CategoricalPredictive(predictive), torch.tensor([0]), threshold=0.02) == 0.0
    assert pavpu(CategoricalPredictive(predictive), torch.tensor([0]), threshold=0.04) == 1.0


def test_of_equal_classes_the_test_is_certain_as_often_as_its_threshold():
    """Probabilities of two classes independent and alike, a third takes the rest: p is uniform."""
    ten = 0.35 + 0.1 * torch.rand(10, 20_000, 2).double()
    predictive = predictive_of(torch.cat([ten, 1 - ten.sum(-1, keepdim=True)], -1))
    wrong = torch.full((20_000,), 2)
    certain = 1 - pavpu(predictive, wrong, threshold=0.3)  # all wrong: certain is what does not count
    assert certain == pytest.approx(0.3, abs=0.02)  # five standard errors, and the uniforms are not normal


def test_identical_draws_are_certain_of_the_larger_class():
    predictive = predictive_of([[[0.6, 0.4]]] * 4)
    assert pavpu(predictive, torch.tensor([0])) == 1.0
    assert pavpu(predictive, torch.tensor([1])) == 0.0


def test_identical_draws_of_equal_classes_are_uncertain():
    logits = torch.zeros(4, 1, 3)
    for predictive in (logits.log_softmax(-1), (logits + torch.tensor([0.0, 1e-7, 0.0])).log_softmax(-1)):
        assert pavpu(CategoricalPredictive(predictive), torch.tensor([2])) == 1.0


def test_pavpu_of_a_grid_is_that_of_its_flat_questions():
    predictive = CategoricalPredictive(torch.randn(5, 6, 4, 3).log_softmax(-1))
    targets = torch.randint(3, (6, 4))
    flat = predictive.select(torch.ones(6, 4).bool())
    assert pavpu(predictive, targets) == pavpu(flat, targets.flatten())


def test_pavpu_refuses_what_does_not_fit():
    predictive, targets = predictive_of([[[0.6, 0.4], [0.5, 0.5]]] * 2), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="at least 2 draws, PAvPU is undefined otherwise; got 1"):
        pavpu(CategoricalPredictive(predictive.log_probs[:1]), targets)
    with pytest.raises(ValueError, match="at least 2 classes to compare; got 1"):
        pavpu(CategoricalPredictive(torch.zeros(2, 2, 1)), torch.zeros(2).long())
    with pytest.raises(ValueError, match=r"threshold must lie strictly between 0 and 1; got 1\.5"):
        pavpu(predictive, targets, threshold=1.5)
    with pytest.raises(ValueError, match=r"targets must have shape \(2,\); got \(1,\)"):
        pavpu(predictive, targets[:1])
    with pytest.raises(ValueError, match="log_probs must not be NaN"):
        pavpu(CategoricalPredictive(predictive.log_probs * math.nan), targets)
    with pytest.raises(ValueError, match="must hold at least one draw"):
        pavpu(predictive.select(torch.zeros(2).bool()), targets[:0])
