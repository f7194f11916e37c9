"""What mean-field networks predict: outputs under draws of the weights, whatever noise they were trained with."""

import math

import pytest
import torch
from scipy import stats
from torch import nn

import bayesformer as bf
from bayesformer.core.vectors import THETA
from bayesformer.laws import GaussianLaw, LocationScaleLaw
from bayesformer.likelihoods import Gaussian
from bayesformer.model.skeleton import Skeleton, shadow
from bayesformer.model.space import Space
from bayesformer.train.objective import Objective
from tests.laws import assert_law, assert_mean
from tests.nets import Mlp, blobs

ONE = bf.Training(epochs=1, batch_size=8, lr=1e-3)
STANDARD = {"cauchy": stats.cauchy, "laplace": stats.laplace, "logistic": stats.logistic}


class Pooled(nn.Module):
    """A linear layer at every one of T tokens, and the mean over them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1, bias=False)

    def forward(self, x):
        return self.linear(x).mean(-2)


def pooled(**settings):
    """A fitted posterior, inputs (N, T, K), and the standard deviations (K,) of its weights."""
    torch.manual_seed(0)
    x = torch.randn(4, 16, 3) + 1
    method = bf.MeanField(rho=0.0, draws=4000, **settings)
    posterior = bf.fit(Pooled(), (x, x.mean((1, 2))[:, None]), likelihood=bf.Gaussian(0.5), method=method, training=ONE)
    scale = bf.fit(
        Pooled(), (x, x.mean((1, 2))[:, None]), likelihood=bf.Gaussian(0.5), method=bf.MeanField(rho=0.0), training=ONE
    )
    return posterior, x, scale.law.sd


def test_tokens_and_examples_share_the_draw_of_the_weights():
    """Var f = Σ_k s_k² x̄_k² and Cov(f_1, f_2) = Σ_k s_k² x̄_1k x̄_2k, x̄ the mean over tokens."""
    posterior, x, sd = pooled()
    draws = posterior.outputs(x).values[..., 0]  # (L, N)
    centre = Pooled()
    centre.linear.weight.data = posterior.law.mean[None]
    mean, average = centre(x)[:, 0].detach(), x.mean(1)
    assert_mean(draws, mean)
    products = (draws - mean)[:, :, None] * (draws - mean)[:, None, :]
    assert_mean(products.flatten(1), ((average * sd.square()) @ average.T).flatten())


def test_the_noise_of_training_is_there_on_request():
    """With noise of its own at every token, Var f = Σ_k s_k² Σ_t x_tk² / T²: far less."""
    posterior, x, sd = pooled(predict_local=True)
    draws = posterior.outputs(x).values[..., 0]
    variance = (x.square().sum(1) / x.shape[1] ** 2) @ sd.square()
    assert_mean((draws - draws.mean(0)).square() * len(draws) / (len(draws) - 1), variance)
    assert (variance < 0.3 * (x.mean(1).square() @ sd.square())).all()


def test_a_draw_is_the_same_network_in_every_batch():
    posterior = bf.fit(Mlp(), blobs(60), likelihood="categorical", method=bf.MeanField(rho=-1.0, draws=5), training=ONE)
    x = torch.randn(9, 3)
    torch.testing.assert_close(posterior.outputs(x, batch_size=2).values, posterior.outputs(x, batch_size=9).values)
    row = posterior.law.row(3)
    twin = Mlp().eval()
    for name, value in posterior.space.views(row).items():
        twin.get_parameter(name).data = value
    torch.testing.assert_close(posterior.outputs(x).values[3], twin(x).detach())


@pytest.mark.parametrize("predictive", ["sampled", "linearised", "streamlined"])
def test_training_does_not_depend_on_how_is_predicted(predictive):
    settings = {"predict_local": True} if predictive == "sampled" else {"predictive": predictive}
    one, other = (
        bf.fit(Mlp(), blobs(60), likelihood="categorical", method=bf.MeanField(**s), training=ONE, seed=3, init="fresh")
        for s in ({}, settings)
    )
    values = other.space.views(other.theta[0])
    inner = values if predictive != "sampled" else {k[6:]: v for k, v in values.items() if k.startswith("model.")}
    for name, value in one.space.views(one.law.mean).items():
        assert torch.equal(value, inner[name])


@pytest.mark.parametrize("family", ["cauchy", "laplace", "logistic", "student_t"])
def test_other_families_are_laws_over_the_weights(family, tmp_path):
    prior = "cauchy(0, 1)" if family == "cauchy" else "normal(0, 1)"
    method = bf.MeanField(family=family, prior=prior, rho=-1.0, subset="net.3.*")
    posterior = bf.fit(Mlp(), blobs(60), likelihood="categorical", method=method, training=ONE)
    law = posterior.law
    assert isinstance(law, LocationScaleLaw)
    rows = law.rows(2000)
    assert torch.equal(rows[7], law.row(7))
    drawn = posterior.space.views(rows)
    assert (drawn["net.0.weight"] == drawn["net.0.weight"][0]).all()
    noise = (rows[:, law.place] - law.mean[law.place]) / law.scale
    for i in range(len(law.place)):
        exact = stats.t(law.df[i].item()) if family == "student_t" else STANDARD[family]
        assert_law(noise[:, i].double(), exact.cdf)
    x = torch.randn(4, 3)
    loaded = bf.Posterior.load(posterior.save(tmp_path / "p"), Mlp())
    assert torch.equal(loaded.predict(x).probs, posterior.predict(x).probs)


def test_a_gaussian_is_the_gaussian_law_and_a_prior_for_what_comes_next():
    data = blobs(60)
    posterior = bf.fit(Mlp(), data, likelihood="categorical", method=bf.MeanField(subset="net.3.*"), training=ONE)
    assert isinstance(posterior.law, GaussianLaw)
    sd = posterior.space.views(posterior.law.sd)
    assert not sd["net.0.weight"].any()
    assert (sd["net.3.weight"] > 0).all()
    assert bf.fit(Mlp(), data, likelihood="categorical", method=bf.Map(), prior=posterior, training=ONE).draws == 1


def test_noise_of_training_and_moments_exclude_each_other():
    with pytest.raises(ValueError, match="predictive must be 'sampled' with predict_local, .*; got 'linearised'"):
        bf.MeanField(predict_local=True, predictive="linearised")


@pytest.mark.parametrize("method", [bf.MeanField(rho=0.0), bf.ConcreteDropout()])
def test_samples_average_gradients_of_independent_draws(method):
    """S draws per step: the law of the mean of S gradients with one draw each, so variance falls as 1/S."""
    torch.manual_seed(1)
    prepared = method.preparation(shadow(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))))
    shell = Skeleton(prepared, Space.of(prepared)).shell()
    shell.module.train()
    batch = bf.Batch(torch.randn(5, 3), torch.randn(5, 1))
    count, many = 1500, 4

    def gradients(samples, number):
        objective = Objective(shell, Gaussian(0.5), 50, samples=samples)
        found = (objective.value_and_grad({THETA: shell.theta}, batch)[2][THETA].clone() for _ in range(number))
        return torch.stack(list(found)).double()

    single, averaged = gradients(1, many * count), gradients(many, count)
    centre = single.mean(0)
    error = (averaged - single.unflatten(0, (count, many)).mean(1)).mean(0)
    spread = (single.var(0) / many + averaged.var(0)).div(count).sqrt().clamp_min(1e-12)
    assert (error.abs() / spread).max() < stats.norm.ppf(1 - 1e-6 / (2 * len(error)))
    groups = single.unflatten(0, (count, many)).mean(1)
    noisy = single.var(0) > 1e-12
    difference = (averaged - centre).square() - (groups - centre).square()
    assert_mean(difference[:, noisy], 0.0)
    assert (single.var(0) / averaged.var(0))[noisy].log2().mean().item() == pytest.approx(math.log2(many), abs=0.3)
