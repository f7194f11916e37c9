"""Links from a Gaussian over logits to probabilities: definitions written out, exact cases, limits, and size."""

import math

import pytest
import torch
from scipy import integrate, stats

from bayesformer.core.types import Draws, GaussianOutputs, matched_normals
from bayesformer.likelihoods import Bernoulli, Categorical, Gaussian
from bayesformer.likelihoods.links import binary_probit, bridge, probit

F64 = torch.float64


def gaussian(shape=(4, 5), rank=3):
    factor = torch.randn(*shape, rank, dtype=F64)
    return GaussianOutputs(torch.randn(*shape, dtype=F64), torch.rand(*shape, dtype=F64), factor)


def naive_bridge(mean, cov, normalise):
    """The formulas, one question at a time, with the C by C covariance."""
    ones, c = torch.ones(len(mean), dtype=F64), len(mean)
    total = ones @ cov @ ones
    mean = mean - cov @ ones * (ones @ mean) / total
    cov = cov - torch.outer(cov @ ones, ones @ cov) / total
    var = cov.diagonal()
    if normalise:
        size = var.mean() / math.sqrt(c / 2)
        mean, var = mean / size.sqrt(), var / size
    alpha = torch.stack([(1 - 2 / c + mean[k].exp() * (-mean).exp().sum() / c**2) / var[k] for k in range(c)])
    return alpha / alpha.sum()


@pytest.mark.parametrize("normalise", [False, True])
def test_the_bridge_is_its_formula(normalise):
    outputs = gaussian()
    kept = [part.clone() for part in outputs]
    expected = torch.stack(
        [naive_bridge(m, v, normalise) for m, v in zip(outputs.mean, outputs.covariance, strict=True)]
    )
    torch.testing.assert_close(bridge(outputs, normalise).exp(), expected)
    assert all(torch.equal(a, b) for a, b in zip(outputs, kept, strict=True)), "the link changed its input"


def test_the_bridge_inverts_the_gaussian_of_a_dirichlet():
    """For Dir(α) the Laplace approximation in logits has a known mean and covariance; back gives E[p] exactly."""
    alpha = torch.tensor([0.5, 2.0, 7.0, 1.2], dtype=F64)
    c, inverse = len(alpha), alpha.reciprocal()
    mean = alpha.log() - alpha.log().mean()
    cov = inverse.diag() - (inverse[:, None] + inverse[None] - inverse.mean()) / c
    found = bridge(GaussianOutputs.of(mean[None], cov[None])).exp()[0]
    torch.testing.assert_close(found, alpha / alpha.sum())


def test_equal_logits_of_equal_variance_are_uniform():
    outputs = GaussianOutputs(torch.zeros(2, 6, dtype=F64), torch.full((2, 6), 0.3, dtype=F64))
    for link in ("probit", "bridge", "bridge_norm"):
        probs = Categorical().predictive(outputs, link=link).probs
        torch.testing.assert_close(probs, torch.full((2, 6), 1 / 6, dtype=F64))


@pytest.mark.parametrize("factor", [None, torch.ones(3, 5, 1, dtype=F64)], ids=["no spread", "a common shift"])
def test_the_bridge_is_softmax_where_softmax_sees_no_spread(factor):
    mean = torch.randn(3, 5, dtype=F64)
    outputs = GaussianOutputs(mean, torch.zeros_like(mean), factor)
    for normalise in (False, True):
        torch.testing.assert_close(bridge(outputs, normalise), mean.log_softmax(-1))


def test_confident_logits_do_not_overflow():
    mean = torch.tensor([[900.0, 0.0, -900.0]])
    outputs = GaussianOutputs(mean, torch.ones_like(mean))
    for link in ("probit", "bridge", "bridge_norm"):
        found = Categorical().predictive(outputs, link=link)
        assert torch.isfinite(found.log_mean).all()
        assert found.labels.item() == 0


def test_probit_is_mackays_formula_and_two_classes_are_one_logit():
    outputs = gaussian()
    wide = (1 + math.pi / 8 * outputs.covariance.diagonal(dim1=-2, dim2=-1)).sqrt()
    torch.testing.assert_close(probit(outputs), (outputs.mean / wide).log_softmax(-1))
    # With one variance for both classes the two-class softmax is the sigmoid of the difference, shrunk alike.
    mean, var = torch.randn(7, 2, dtype=F64), torch.rand(7, 1, dtype=F64)
    two = probit(GaussianOutputs(mean, var.expand(7, 2)))
    one = binary_probit(GaussianOutputs(mean[:, 1:] - mean[:, :1], var))[:, 0]
    torch.testing.assert_close(two, one)


def test_mc_is_the_integral():
    """Two classes: E[sigmoid(z)] by quadrature; p (1 - p) / L bounds the variance of an average of L draws."""
    mean, sd = 1.3, 1.7
    exact = integrate.quad(lambda z: stats.norm.pdf(z, mean, sd) / (1 + math.exp(-z)), -15, 20)[0]
    draws = 100_000
    outputs = GaussianOutputs(torch.tensor([[0.0, mean]]), torch.tensor([[0.0, sd**2]]))
    found = Categorical().predictive(outputs, "mc", draws).probs[0, 1].item()
    assert abs(found - exact) < 5 * math.sqrt(exact * (1 - exact) / draws)
    shrunk = Categorical().predictive(outputs, "probit").probs[0, 1].item()
    assert (
        abs(
            Bernoulli()
            .predictive(GaussianOutputs(outputs.mean[:, 1], outputs.diagonal[:, 1]), "probit")
            .probs[0, 1]
            .item()
            - exact
        )
        < 0.02
    )  # MacKay's formula is close, not exact
    assert shrunk != pytest.approx(found, abs=1e-9)


def test_mc_says_the_same_of_an_input_wherever_it_stands_and_repeats():
    outputs = gaussian((6, 3))
    together = Categorical().predictive(outputs, "mc", 50, seed=4)
    alone = Categorical().predictive(GaussianOutputs(*(part[4:5] for part in outputs)), "mc", 50, seed=4)
    torch.testing.assert_close(together.log_probs[:, 4:5], alone.log_probs)
    again = Categorical().predictive(outputs, "mc", 50, seed=4)
    assert torch.equal(together.log_probs, again.log_probs)
    assert not torch.equal(together.log_probs, Categorical().predictive(outputs, "mc", 50, seed=5).log_probs)


@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 4)])
def test_draws_of_a_gaussian_have_its_mean_and_covariance_exactly(shape):
    outputs = gaussian(shape)
    values = outputs.draw(64, seed=1)
    torch.testing.assert_close(values.mean(0), outputs.mean)
    away = values - outputs.mean
    torch.testing.assert_close(torch.einsum("l...i,l...j->...ij", away, away) / 64, outputs.covariance)


def test_matched_normals_are_normal():
    """One number of each of many sets: Kolmogorov-Smirnov against N(0, 1), for pairs and for too few draws."""
    for draws, size in ((64, 8), (9, 4), (6, 5)):
        found = [matched_normals(draws, size, torch.Generator().manual_seed(s))[0, 0].item() for s in range(2000)]
        assert stats.kstest(found, "norm").pvalue > 1e-3


def test_closed_links_have_one_component_and_no_split():
    for link in ("probit", "bridge", "bridge_norm"):
        found = Categorical().predictive(gaussian(), link)
        assert len(found.log_probs) == 1
        assert (found.epistemic == 0).all()


def test_a_vocabulary_needs_no_square_matrix():
    """50,000 classes squared would be 10 GB."""
    outputs = GaussianOutputs(torch.randn(2, 50_000), torch.rand(2, 50_000), torch.randn(2, 50_000, 4))
    for link in ("probit", "bridge", "bridge_norm"):
        probs = Categorical().predictive(outputs, link).probs
        torch.testing.assert_close(probs.sum(-1), torch.ones(2))


def test_regression_adds_variances_and_a_predicted_scale_is_drawn():
    outputs = gaussian((4, 2))
    found = Gaussian(0.5).predictive(outputs)
    torch.testing.assert_close(found.variance, outputs.covariance.diagonal(dim1=-2, dim2=-1) + 0.25)
    torch.testing.assert_close(found.epistemic, outputs.variance.sum(-1))
    assert len(Gaussian().predictive(outputs, draws=17).means) == 17


def test_wrong_links_are_refused():
    outputs = gaussian()
    with pytest.raises(ValueError, match="unknown link 'probbit'. Did you mean 'probit'"):
        Categorical().predictive(outputs, "probbit")
    with pytest.raises(ValueError, match="link must be 'mc' for this likelihood; got 'bridge'"):
        Gaussian(1.0).predictive(outputs, "bridge")
    with pytest.raises(ValueError, match="link must be 'mc' or 'probit' for this likelihood; got 'bridge'"):
        Bernoulli().predictive(outputs, "bridge")
    with pytest.raises(ValueError, match="link must be none for outputs that are draws of the weights; got 'probit'"):
        Categorical().predictive(Draws(torch.zeros(3, 2, 4)), "probit")
    with pytest.raises(ValueError, match="draws must be at least 1; got 0"):
        Categorical().predictive(outputs, "mc", 0)
