"""`Posterior.check`: silent on the exact posterior, and aloud where a law is too wide, too hot or too short."""

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.laws import GaussianLaw, Samples, gaussian
from bayesformer.predict.self_check import prior_in

SIZE = 8
FACTS = {"method": {"prior": "normal(0, 1)"}}


def regression(count=60):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(count, SIZE, generator=g)
    y = x @ torch.randn(SIZE, 1, generator=g) + torch.randn(count, 1, generator=g)
    precision = x.T @ x + torch.eye(SIZE)
    return (x, y), torch.linalg.solve(precision, x.T @ y)[:, 0], torch.linalg.inv(precision)


def checks(law, model=None, data=None, facts=FACTS):
    known = regression()[0] if data is None else data
    posterior = bf.Posterior(model or nn.Linear(SIZE, 1, bias=False), bf.Gaussian(1.0), law, facts=facts)
    return {doubt.check: doubt for doubt in posterior.check(known)}


def draws(mean, covariance, count=100, scale=1.0, seed=1):
    g = torch.Generator().manual_seed(seed)
    return mean + scale * torch.randn(count, SIZE, generator=g) @ torch.linalg.cholesky(covariance).T


def test_the_exact_posterior_raises_no_doubt():
    _, mean, covariance = regression()
    assert checks(gaussian(mean, tril=torch.linalg.cholesky(covariance))) == {}
    assert checks(Samples(draws(mean, covariance))) == {}


@pytest.mark.parametrize("count", [3, 10, 20])
def test_the_exact_posterior_of_few_data_raises_no_doubt_though_it_scores_below_its_mean(count):
    data, mean, covariance = regression(count)
    assert checks(gaussian(mean, tril=torch.linalg.cholesky(covariance)), data=data) == {}


def test_draws_that_are_too_wide_are_hot():
    _, mean, covariance = regression()
    found = checks(Samples(draws(mean, covariance, scale=1.5)))
    assert found.keys() == {"temperature"}
    assert found["temperature"].value == pytest.approx(2.25, rel=0.3)
    cold = {"method": {"prior": "normal(0, 1)", "temperature": 2.25}}  # what was asked for
    assert checks(Samples(draws(mean, covariance, scale=1.5)), facts=cold) == {}


def test_a_chain_that_hardly_moves_is_worth_few_draws():
    _, mean, covariance = regression()
    steps = draws(torch.zeros(SIZE), covariance, 100).cumsum(0) / 10
    assert "effective draws" in checks(Samples(mean + steps))


def test_a_gaussian_that_is_too_wide_for_its_model():
    _, mean, covariance = regression()
    found = checks(gaussian(mean, tril=4 * torch.linalg.cholesky(covariance)))
    assert found["regime"].value == pytest.approx(16, rel=0.5)
    assert "draws below the mean" in found


def test_weights_drawn_from_a_full_laplace_of_a_network():
    g = torch.Generator().manual_seed(0)
    x = torch.rand(60, 1, generator=g) * 4 - 2
    y = torch.sin(2 * x) + 0.1 * torch.randn(60, 1, generator=g)
    net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))
    method = bf.Laplace(structure="full", predictive="sampled", prior_precision=1.0)
    training = bf.Training(epochs=150, lr=0.02)
    posterior = bf.fit(net, (x, y), likelihood=bf.Gaussian(0.1), method=method, training=training)
    assert isinstance(posterior.law, GaussianLaw)
    assert "regime" in {doubt.check for doubt in posterior.doubts}  # asked for by name, it says so at once
    assert {"regime", "draws below the mean"} <= {doubt.check for doubt in posterior.check((x, y))}


def test_the_prior_is_read_from_the_facts():
    theta = {"weight": torch.full((1, 2), 0.5)}
    for facts, scale in (
        ({"method": {"prior": "normal(0, 2)"}}, 2.0),
        ({"method": {"prior_sd": 0.5}}, 0.5),
        ({"method": {"prior_precision": "auto"}, "prior_precision": [4.0]}, 0.5),
    ):
        exact = torch.distributions.Normal(0.0, scale).log_prob(theta["weight"]).sum()
        torch.testing.assert_close(prior_in(facts).log_prob(theta), exact)
    assert prior_in({}) is None
