"""Scores against a reference posterior: closed forms, limits, slow twins."""

import math

import pytest
import torch
from scipy import stats

from bayesformer import evaluate
from bayesformer.evaluate import posterior_distance as scores
from bayesformer.likelihoods.predictive import CategoricalPredictive, GaussianPredictive


def normal(count, *shape, mean=0.0, sd=1.0, seed=0):
    source = torch.Generator().manual_seed(seed)
    return mean + sd * torch.randn(count, *shape, generator=source, dtype=torch.float64)


def quantiles(count, mean=0.0, sd=1.0):
    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return mean + sd * torch.special.ndtri(levels)[:, None]


class TestWasserstein:
    def test_two_gaussians_have_the_closed_form(self):
        """W2² = (μ - m)² + (σ - s)², here in units of s; quantiles in place of draws leave no sampling error."""
        found = evaluate.wasserstein(quantiles(20000, 1.5, 0.5), quantiles(20000, 0.3, 2.0))
        assert found.item() == pytest.approx(math.hypot(1.2, 1.5) / 2, rel=2e-3)

    @pytest.mark.parametrize(("count", "other"), [(1, 1), (3, 5), (4, 6), (7, 7), (1, 9)])
    def test_it_is_the_best_plan_of_transport(self, count, other):
        """Against a linear program, for sizes that do and do not divide each other."""
        from scipy.optimize import linprog

        ours, theirs = normal(count, 1, seed=1), normal(other, 1, seed=2)
        cost = (ours - theirs.T).square()
        rows = torch.eye(count).repeat_interleave(other, 1), torch.eye(other).repeat(1, count)
        sums = torch.cat([torch.full((count,), 1 / count), torch.full((other,), 1 / other)])
        best = linprog(cost.flatten().numpy(), A_eq=torch.cat(rows).numpy(), b_eq=sums.numpy()).fun
        found = evaluate.wasserstein(ours, theirs) * theirs.std(0, correction=0)
        if other > 1:
            assert found.item() == pytest.approx(math.sqrt(best), rel=1e-5)

    def test_a_point_at_the_mean_is_one_standard_deviation_away(self):
        theirs = normal(100, 3)
        assert evaluate.wasserstein(theirs.mean(0, keepdim=True), theirs).tolist() == pytest.approx([1.0] * 3)

    def test_neither_order_nor_repetition_matters(self):
        ours, theirs = normal(6, 2, seed=3), normal(9, 2, seed=4)
        twice = torch.cat([ours.flip(0), ours])
        assert torch.allclose(evaluate.wasserstein(ours, theirs), evaluate.wasserstein(twice, theirs))
        assert evaluate.wasserstein(theirs.flip(0), theirs).tolist() == [0, 0]

    def test_moments_bound_it(self):
        ours, theirs = normal(50, 20, mean=0.4, sd=0.6, seed=5) ** 3, normal(80, 20, seed=6)
        shift, stretch = scores.mean_and_spread_gaps(ours, theirs)
        assert (evaluate.wasserstein(ours, theirs).square() >= shift.square() + stretch.square() - 1e-12).all()


class TestRanks:
    def test_equal_laws_have_uniform_ranks(self):
        u = evaluate.ranks(normal(4000, 1, seed=1), normal(4000, 1, seed=2))
        assert stats.ks_2samp(u.flatten().numpy(), torch.linspace(0, 1, 4000).numpy()).pvalue > 1e-6

    def test_ranks_count_the_draws_below_and_half_the_ties(self):
        reference = torch.tensor([[1.0], [2.0], [2.0], [4.0]])
        found = evaluate.ranks(torch.tensor([[0.0], [2.0], [3.0], [9.0]]), reference)
        assert found.flatten().tolist() == [0.0, 0.5, 0.75, 1.0]

    @pytest.mark.parametrize(("at", "error"), [(0.0, 0.25), (50.0, 0.5), (-50.0, 0.5)])
    def test_points_have_their_closed_form(self, at, error):
        found = evaluate.rank_error(torch.full((3, 1), at), quantiles(1000))
        assert found.item() == pytest.approx(error, abs=1e-6)

    @pytest.mark.parametrize("sd", [0.3, 1.0, 2.5])
    def test_gaussians_of_another_width_have_their_integral(self, sd):
        """∫ |F(t) - t| dt with F(t) = Φ(Φ⁻¹(t) / sd), by a fine sum."""
        t = (torch.arange(100000, dtype=torch.float64) + 0.5) / 100000
        exact = (torch.special.ndtr(torch.special.ndtri(t) / sd) - t).abs().mean().item()
        found = evaluate.rank_error(quantiles(2000, 0, sd), quantiles(2000)).item()
        assert found == pytest.approx(exact, abs=1e-3)

    def test_the_histogram_shows_a_spread_too_small(self):
        shares = evaluate.rank_histogram(quantiles(1000, 0, 0.3), quantiles(1000), bins=5)
        assert shares.sum().item() == pytest.approx(1)
        assert shares[2] > 0.5
        assert max(shares[0], shares[4]) < 0.05

    def test_bins_are_refused_below_one(self):
        with pytest.raises(ValueError, match="bins must be a whole number, at least 1; got 0"):
            evaluate.rank_histogram(normal(3, 1), normal(3, 1), bins=0)


def classes(probs):
    return CategoricalPredictive(torch.tensor(probs, dtype=torch.float64).log())


def test_agreement_and_total_variation_of_classes():
    ours = classes([[[0.9, 0.1], [0.4, 0.6]], [[0.7, 0.3], [0.2, 0.8]]])  # means (.8, .2), (.3, .7)
    theirs = classes([[[0.5, 0.5], [0.6, 0.4]]])
    assert evaluate.total_variation(ours, theirs).tolist() == pytest.approx([0.3, 0.3])
    assert evaluate.agreement(ours, theirs) == 0.5
    assert evaluate.agreement(ours, ours) == 1


@pytest.mark.parametrize(("shift", "sd"), [(0.0, 1.0), (1.0, 1.0), (30.0, 1.0), (0.0, 3.0)])
def test_total_variation_of_gaussians_has_its_closed_form(shift, sd):
    """2 Φ(d/2) - 1 for equal widths; for widths 1 and s through the points where the densities cross."""
    ours = GaussianPredictive(torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    theirs = GaussianPredictive(torch.full((1, 1, 1), shift), torch.full((1, 1, 1), sd**2))
    exact = 2 * stats.norm.cdf(shift / 2) - 1
    if sd != 1:
        cross = math.sqrt(2 * math.log(sd) / (1 - 1 / sd**2))
        exact = 2 * (stats.norm.cdf(cross) - stats.norm.cdf(cross / sd))
    assert evaluate.total_variation(ours, theirs).item() == pytest.approx(exact, abs=2e-3)


def test_total_variation_of_mixtures_is_done_in_parts(monkeypatch):
    ours = GaussianPredictive(normal(5, 4, 3, 1, seed=1), torch.full((5, 4, 3, 1), 0.3))
    theirs = GaussianPredictive(normal(7, 4, 3, 1, seed=2), torch.full((7, 4, 3, 1), 0.2))
    whole = evaluate.total_variation(ours, theirs)
    monkeypatch.setattr(scores, "AT_ONCE", 1)
    assert torch.allclose(evaluate.total_variation(ours, theirs), whole, atol=1e-12)
    assert whole.shape == (4, 3)


def test_function_values_are_what_the_softmax_sees():
    logits = normal(4, 5, 3)
    shifted = CategoricalPredictive((logits + normal(4, 5, 1, seed=9)).log_softmax(-1))
    assert torch.allclose(evaluate.function_values(shifted), logits - logits.mean(-1, keepdim=True))
    odds = normal(4, 5)
    yes = CategoricalPredictive(torch.stack([-odds, odds], -1).div(2).log_softmax(-1))
    assert torch.allclose(evaluate.function_values(yes), odds[..., None])


def test_a_gaussian_over_the_mean_is_its_quantiles():
    means, spreads = normal(1, 6, 1), torch.linspace(0.1, 4, 6).view(1, 6, 1).double()
    values = evaluate.function_values(GaussianPredictive(means, torch.ones(1, 6, 1).double(), spreads))
    assert torch.allclose(values.mean(0), means[0])
    assert torch.allclose(values.std(0, correction=0), spreads[0].sqrt(), rtol=5e-3)
    reference = normal(4000, 1, 1) * spreads[0].sqrt() + means[0]
    assert evaluate.wasserstein(values, reference).max() < 4 / math.sqrt(4000)


def test_all_scores_of_draws_of_the_reference_itself():
    """Standard errors of L draws: 1/√L of a mean, 1/√2L of a standard deviation."""
    draws, noise = 2000, 0.5
    ours, theirs = (GaussianPredictive(normal(draws, 50, 1, seed=s), torch.full((draws, 50, 1), noise)) for s in (1, 2))
    found = evaluate.fidelity(ours, theirs)
    assert found.agreement is None
    assert found.mean_error < 2 * math.sqrt(2 / draws)
    assert abs(found.spread_ratio - 1) < 4 / math.sqrt(draws)
    assert found.wasserstein < 3 / math.sqrt(draws)
    assert found.rank_error < 1 / math.sqrt(draws)
    assert found.total_variation < 1.5 / math.sqrt(draws)


def test_scores_tell_a_point_from_the_posterior():
    reference = CategoricalPredictive(normal(500, 40, 3).log_softmax(-1))
    point = CategoricalPredictive(reference.log_probs.mean(0, keepdim=True).log_softmax(-1))
    found = evaluate.fidelity(point, reference)
    assert found.spread_ratio == 0
    assert found.wasserstein == pytest.approx(1, abs=0.05)
    assert found.rank_error == pytest.approx(0.25, abs=0.02)


def test_what_does_not_belong_together_is_refused():
    with pytest.raises(ValueError, match=r"draws must be of the reference's function values.*\(2,\); got \(3, 1\)"):
        evaluate.wasserstein(normal(3, 1), normal(4, 2))
    with pytest.raises(ValueError, match="at least one draw each"):
        evaluate.ranks(normal(0, 1), normal(4, 1))
    with pytest.raises(ValueError, match="reference must be finite; got nan"):
        evaluate.wasserstein(normal(3, 1), normal(4, 1) * math.nan)
    gaussian = GaussianPredictive(torch.zeros(1, 2, 1), torch.ones(1, 2, 1))
    with pytest.raises(ValueError, match="of one kind; got GaussianPredictive and CategoricalPredictive"):
        evaluate.total_variation(gaussian, classes([[[0.5, 0.5]]]))
    with pytest.raises(ValueError, match=r"about the same questions; got shapes \(2,\) and \(1,\)"):
        evaluate.total_variation(gaussian, GaussianPredictive(torch.zeros(1, 1, 1), torch.ones(1, 1, 1)))
