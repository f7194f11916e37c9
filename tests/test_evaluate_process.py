"""Comparison with a known process: closed forms against samples, and when a leak is called a leak."""

import math

import pytest
import torch

from bayesformer.core.errors import OracleBeatenError
from bayesformer.evaluate import Gap, check_not_above, oracle_gap, process_mse, variance_mse
from bayesformer.likelihoods.predictive import GaussianPredictive
from tests.laws import assert_mean


def one_question():
    """Mean 1, variance (1 + 2)/2 + (0² + 2²)/2 - 1² = 2.5, of which .5 in the second comes from a spread."""
    return GaussianPredictive(
        torch.tensor([0.0, 2.0]).view(2, 1, 1),
        torch.tensor([1.0, 1.5]).view(2, 1, 1),
        torch.tensor([0.0, 0.5]).view(2, 1, 1),
    )


def test_process_scores_on_paper():
    mean, variance = torch.tensor([[4.0]]), torch.tensor([[0.5]])
    assert process_mse(one_question(), mean, variance) == pytest.approx(9 + 2.5 + 0.5)
    assert variance_mse(one_question(), variance) == pytest.approx(4.0)


def test_process_mse_is_the_mean_over_pairs_of_samples():
    n = 200_000
    which = torch.randint(2, (n,))
    model = torch.tensor([0.0, 2.0])[which] + torch.tensor([1.0, 2.0])[which].sqrt() * torch.randn(n)
    process = -0.5 + math.sqrt(0.3) * torch.randn(n)
    exact = process_mse(one_question(), torch.tensor([[-0.5]]), torch.tensor([[0.3]]))
    assert_mean((model - process).square(), exact)


def test_a_perfect_model_has_twice_the_variance_of_the_process():
    mean, variance = torch.randn(3, 4, 2), torch.rand(3, 4, 2)
    perfect = GaussianPredictive(mean[None], variance[None])
    assert process_mse(perfect, mean, variance) == pytest.approx(2 * variance.mean().item(), rel=1e-5)
    assert variance_mse(perfect, variance) == 0
    assert variance_mse(perfect, variance + 0.5) == pytest.approx(0.25, rel=1e-5)


def test_process_scores_refuse_what_does_not_fit():
    good = torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"process_mean must have the shape of predictive.mean, \(1, 1\); got"):
        process_mse(one_question(), torch.ones(1), good)
    for score in (lambda v: process_mse(one_question(), good, v), lambda v: variance_mse(one_question(), v)):
        with pytest.raises(ValueError, match=r"process_variance must have the shape of predictive\.mean"):
            score(torch.ones(3, 1))
        with pytest.raises(ValueError, match=r"process_variance must be finite; got nan"):
            score(good * math.nan)
        with pytest.raises(ValueError, match=r"process_variance must not be negative; got -1.0"):
            score(-good)
    empty = one_question().select(torch.zeros(1).bool())
    with pytest.raises(ValueError, match=r"means must hold at least one draw"):
        variance_mse(empty, torch.ones(0, 1))


# the oracle


def test_gap_on_paper():
    """Differences 1, 3: mean 2, standard deviation √2, standard error 1."""
    gap = oracle_gap(torch.tensor([-9.0, -17.0]), torch.tensor([-10.0, -20.0]))
    assert gap == pytest.approx(Gap(2.0, 1.0, 2.0))


def test_gap_is_paired():
    """Sequences spread by 100 nats; the difference by .1: unpaired, the error would be 1,000 times it."""
    oracle = 100 * torch.randn(400).double()
    gap = oracle_gap(oracle - 0.5 + 0.1 * torch.randn(400), oracle)
    assert gap.mean == pytest.approx(-0.5, abs=0.05)
    assert gap.standard_error == pytest.approx(0.1 / 20, rel=0.3)


def test_z_of_a_model_as_good_as_the_oracle_is_standard_normal():
    draws = torch.randn(3_000, 200)
    z = torch.tensor([oracle_gap(row, torch.zeros(200)).z for row in draws])
    assert_mean(z, 0.0)
    assert_mean(z.square(), 199 / 197)  # Student t with 199 degrees


def test_a_leak_is_called_a_leak():
    with pytest.raises(OracleBeatenError, match=r"m1/dirichlet scores 4\.5 nats .* 4\.5 standard errors of 1 "):
        check_not_above(Gap(4.5, 1.0, 4.5), label="m1/dirichlet")
    check_not_above(Gap(3.9, 1.0, 3.9))
    check_not_above(Gap(-50.0, 1.0, -50.0))
    with pytest.raises(OracleBeatenError, match=r"allowed: 2"):
        check_not_above(Gap(3.9, 1.0, 3.9), threshold=2)


def test_one_sequence_proves_nothing():
    gap = oracle_gap(torch.tensor([5.0]), torch.tensor([1.0]))
    assert gap == Gap(4.0, math.inf, 0.0)
    check_not_above(gap)


def test_the_oracle_itself_is_not_above_the_oracle():
    gap = oracle_gap(torch.full((8,), -3.0), torch.full((8,), -3.0))
    assert gap == Gap(0.0, 0.0, 0.0)
    check_not_above(gap)
    check_not_above(Gap(1e-5, 1e-7, 100.0))  # rounding that happens to be upwards


def test_a_constant_advantage_has_no_error_and_is_a_leak():
    gap = oracle_gap(torch.full((8,), -2.0), torch.full((8,), -3.0))
    assert gap == Gap(1.0, 0.0, math.inf)
    with pytest.raises(OracleBeatenError, match="the model scores 1 nats"):
        check_not_above(gap)
    assert oracle_gap(torch.full((8,), -4.0), torch.full((8,), -3.0)).z == -math.inf


def test_gap_refuses_what_does_not_fit():
    good = torch.zeros(3)
    with pytest.raises(ValueError, match=r"oracle_log_likelihood must have the shape of log_likelihood, \(3,\)"):
        oracle_gap(good, torch.zeros(1))
    with pytest.raises(ValueError, match=r"^log_likelihood must have one dimension; got shape \(3, 2\)"):
        oracle_gap(torch.zeros(3, 2), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"^log_likelihood must hold at least 1 value; got 0"):
        oracle_gap(torch.zeros(0), torch.zeros(0))
    with pytest.raises(ValueError, match=r"^oracle_log_likelihood must be finite; got -inf \(1 of 3\)"):
        oracle_gap(good, torch.tensor([0.0, -math.inf, 0.0]))
    with pytest.raises(ValueError, match="gap must not be NaN; got mean=nan"):
        check_not_above(Gap(math.nan, 1.0, math.nan))
