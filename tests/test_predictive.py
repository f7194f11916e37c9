"""Predictives: total = aleatoric + epistemic, and nothing but draws makes epistemic uncertainty."""

import math

import pytest
import torch
from torch import distributions as D

from bayesformer.likelihoods.predictive import CategoricalPredictive, GaussianPredictive, bisect


def categorical(draws=4, shape=(3, 5), classes=6):
    return CategoricalPredictive(torch.randn(draws, *shape, classes, dtype=torch.float64).log_softmax(-1))


def gaussian(draws=4, shape=(3, 5), width=2):
    return GaussianPredictive(
        torch.randn(draws, *shape, width, dtype=torch.float64),
        torch.rand(draws, *shape, width, dtype=torch.float64) + 0.1,
    )


def test_categorical_uncertainty_equals_definitions():
    p = categorical()
    probs = p.log_probs.exp()
    mean = probs.mean(0)
    total = D.Categorical(probs=mean).entropy()
    aleatoric = D.Categorical(probs=probs).entropy().mean(0)
    torch.testing.assert_close(p.total, total)
    torch.testing.assert_close(p.aleatoric, aleatoric)
    # mutual information by its other definition: the average KL of a draw to the mean
    kl = (probs * (probs / mean).log()).sum(-1).mean(0)
    torch.testing.assert_close(p.epistemic, kl)


def test_one_draw_or_equal_draws_have_no_epistemic_uncertainty():
    one = categorical(draws=1)
    assert (one.epistemic == 0).all()
    same = CategoricalPredictive(one.log_probs.expand(5, *one.log_probs.shape[1:]))
    assert same.epistemic.abs().max() < 1e-12
    g = gaussian(draws=1)
    assert (g.epistemic == 0).all()


def test_opposite_certain_draws_are_all_epistemic():
    p = CategoricalPredictive(torch.tensor([[[0.0, -math.inf]], [[-math.inf, 0.0]]]))
    assert p.aleatoric.item() == 0
    assert p.epistemic.item() == pytest.approx(math.log(2))
    assert torch.isfinite(p.total).all()


def test_nan_does_not_look_certain():
    p = CategoricalPredictive(torch.full((2, 1, 3), math.nan))
    assert torch.isnan(p.total).all()
    assert torch.isnan(p.epistemic).all()


def test_gaussian_follows_the_law_of_total_variance():
    p = gaussian()
    mixture = D.MixtureSameFamily(
        D.Categorical(torch.ones(3, 5, 2, 4, dtype=torch.float64)),
        D.Normal(p.means.movedim(0, -1), p.variances.sqrt().movedim(0, -1)),
    )
    torch.testing.assert_close(p.mean, mixture.mean)
    torch.testing.assert_close(p.variance, mixture.variance)
    torch.testing.assert_close(p.total, mixture.variance.sum(-1))
    torch.testing.assert_close(p.total, p.aleatoric + p.epistemic)
    y = torch.randn(3, 5, 2, dtype=torch.float64)
    torch.testing.assert_close(p.cdf(y), mixture.cdf(y))


def test_gaussian_density_is_a_mixture_of_joint_densities():
    p, y = gaussian(), torch.randn(3, 5, 2, dtype=torch.float64)
    joint = D.Independent(D.Normal(p.means, p.variances.sqrt()), 1).log_prob(y).exp().mean(0).log()
    torch.testing.assert_close(p.log_prob(y), joint)


@pytest.mark.parametrize("level", [0.05, 0.5, 0.9])
def test_quantile_inverts_the_cdf(level):
    p = gaussian()
    torch.testing.assert_close(p.cdf(p.quantile(level)), torch.full((3, 5, 2), level, dtype=torch.float64))


def test_bisect_finds_a_root():
    low, high = torch.zeros(3, dtype=torch.float64), torch.full((3,), 9.0, dtype=torch.float64)
    roots = bisect(lambda x: x**2 - torch.tensor([1.0, 4.0, 9.0]), low, high, 0.0)
    torch.testing.assert_close(roots, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))


@pytest.mark.parametrize("make", [categorical, gaussian])
def test_select_keeps_the_counted_questions(make):
    p = make()
    mask = torch.rand(3, 5) > 0.4
    chosen = p.select(mask)
    assert chosen.shape == (int(mask.sum()),)
    torch.testing.assert_close(chosen.total, p.total[mask])


def test_targets_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"shape \(3, 5\); got \(3, 1\)"):
        categorical().log_prob(torch.zeros(3, 1, dtype=torch.long))
    with pytest.raises(ValueError, match=r"shape \(3, 5, 2\); got \(3, 5\)"):
        gaussian().log_prob(torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"must lie in 0\.\.5; got -100\.\.0"):
        categorical().log_prob(torch.tensor([[0, -100, 0, 0, 0]] * 3))
    with pytest.raises(ValueError, match="level must lie strictly between 0 and 1; got 1"):
        gaussian().quantile(1.0)
