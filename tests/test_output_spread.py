"""The spread of outputs under a Gaussian over weights, against that under the full curvature."""

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.data import as_batches
from bayesformer.laws import gaussian
from bayesformer.methods import Problem
from bayesformer.train import output_spread as check
from bayesformer.train.coordinates import full_batch
from bayesformer.train.metric import precision_at
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import Modes, subset_stage

NOISE, WEIGHTS = 0.5, 6


def correlated(count=60, seed=0, size=WEIGHTS, dtype=torch.float64):
    """A regression whose inputs all lie near one line."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, generator=g, dtype=dtype) + 0.1 * torch.randn(count, size, generator=g, dtype=dtype)
    return x, x.sum(1, keepdim=True) + NOISE * torch.randn(count, 1, generator=g, dtype=dtype)


def batch_of(model, data, likelihood):
    """U of all data under N(0, 1), and the weights as they are."""
    prototype = Prototype(Problem(model, likelihood, as_batches(data, "data")))
    start = prototype.start(0)
    part = subset_stage(prototype, Modes(start.theta[None], {}, None), "*")
    return full_batch(part, "normal(0, 1)"), part.starts[0].theta


def classifier(features=12, classes=4, count=200, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.relu(torch.randn(count, 3, generator=g) @ torch.randn(3, features, generator=g)).double()
    y = torch.multinomial((x @ torch.randn(features, classes, generator=g).double()).softmax(1), 1, generator=g)[:, 0]
    torch.manual_seed(seed)
    return nn.Linear(features, classes, dtype=torch.float64), (x, y), bf.Categorical()


@pytest.mark.parametrize("temperature", [1.0, 0.04])
def test_the_ratio_is_that_of_posteriors_without_the_example(temperature):
    """Example by example: its row taken out of the data, H inverted anew, and the diagonal of the same H."""
    x, y = correlated()
    batch, theta = batch_of(nn.Linear(WEIGHTS, 1, bias=False, dtype=torch.float64), (x, y), bf.Gaussian(NOISE))
    whole = x.T @ x / NOISE**2 + torch.eye(WEIGHTS, dtype=torch.float64)
    law = gaussian(theta, (temperature / whole.diagonal()).sqrt())
    each = []
    for row in x:
        rest = whole - row.outer(row) / NOISE**2
        each.append((row @ (row / rest.diagonal()) / (row @ rest.inverse() @ row)).sqrt())
    found = check.output_spread(batch, theta, law, temperature=temperature)
    assert found == pytest.approx(float(torch.stack(each).median()), rel=1e-8)


def test_of_the_exact_posterior_the_ratio_is_one():
    x, y = correlated()
    batch, theta = batch_of(nn.Linear(WEIGHTS, 1, bias=False, dtype=torch.float64), (x, y), bf.Gaussian(NOISE))
    precision = precision_at(batch, theta)
    rows, curved = batch.output_slopes(theta, 50)
    assert rows.shape == (50, WEIGHTS)
    torch.testing.assert_close(curved, torch.full((50,), NOISE**-2, dtype=torch.float64))
    dense = gaussian(theta, tril=torch.linalg.cholesky(precision.inverse()))
    assert check.output_spread(batch, theta, dense) is None  # nothing is left out
    halves = tuple(slice(i, i + 3) for i in (0, 3))
    assert check._is_compared(gaussian(theta, factor=rows[:2]))  # of two directions alone
    block = type(dense)(theta, halves, tuple(gaussian(theta[s], tril=torch.eye(3).double()).blocks[0] for s in halves))
    assert check.output_spread(batch, theta, block) is not None


def test_gradients_are_of_outputs_that_have_a_target():
    model, (x, y), likelihood = classifier(count=10)
    batch, theta = batch_of(model, (x, y), likelihood)
    rows, curved = batch.output_slopes(theta, 25)
    assert rows.shape == (30, theta.numel())  # 3 of the 4 outputs of each of 10 examples
    blocks = rows[:, :48].reshape(30, 4, 12).sum(2)
    assert bool((blocks > 0).sum(1).eq(1).all())  # a centred logit rises with its own class and falls with the others
    torch.testing.assert_close(blocks.sum(1), torch.zeros(30, dtype=torch.float64))
    chance = model(x).softmax(1).detach()
    known = (chance * (1 - chance)).flatten() / (1 - 1 / 4) ** 2
    assert {round(float(v), 10) for v in curved} <= {round(float(v), 10) for v in known}


def test_of_two_classes_the_ratio_is_that_of_log_odds_without_the_example():
    """Example by example: its curvature taken out of H, and out of the diagonal of H."""
    model, (x, y), likelihood = classifier(features=6, classes=2, count=60)
    batch, theta = batch_of(model, (x, y), likelihood)
    precision = precision_at(batch, theta)
    law = gaussian(theta, precision.diagonal().rsqrt())
    chance, each = model(x).softmax(1)[:, 0].detach(), []
    for row, p in zip(torch.cat([x, torch.ones(60, 1).double()], 1), chance, strict=True):
        odds = torch.cat([row[:-1], -row[:-1], row[-1:], -row[-1:]])  # the gradient of f_1 - f_2, biases last
        full = odds @ (precision - p * (1 - p) * odds.outer(odds)).inverse() @ odds
        own = odds.square() / precision.diagonal()
        each.append(((own / (1 - p * (1 - p) * own)).sum() / full).sqrt())
    found = check.output_spread(batch, theta, law, precision=precision)
    assert found == pytest.approx(float(torch.stack(each).median()), rel=1e-8)


def test_a_shift_of_all_logits_does_not_count():
    """A diagonal covariance that is right but for the common shift of logits: the classes' prior alone."""
    model, data, likelihood = classifier(classes=3)
    batch, theta = batch_of(model, data, likelihood)
    precision = precision_at(batch, theta)
    rows, _ = batch.output_slopes(theta, 100)
    common = torch.cat([rows.new_ones(3)[:, None].expand(3, 12).flatten(), rows.new_ones(3)])
    assert float((rows @ common).abs().max()) < 1e-9
    full = precision.inverse()
    own = (rows @ torch.diag(1 / precision.diagonal()) * rows).sum(1)
    exact = (own / (rows @ full * rows).sum(1)).sqrt().median()
    law = gaussian(theta, precision.diagonal().rsqrt())
    assert check.output_spread(batch, theta, law, precision=precision) == pytest.approx(float(exact), rel=0.1)


def test_products_find_what_the_matrix_says(monkeypatch):
    model, data, likelihood = classifier()
    batch, theta = batch_of(model, data, likelihood)
    precision = precision_at(batch, theta)
    law = gaussian(theta, precision.diagonal().rsqrt())
    exact = check.output_spread(batch, theta, law, precision=precision)
    monkeypatch.setattr(check, "cheap_matrix", lambda batch, linear: False)
    assert check.output_spread(batch, theta, law) == pytest.approx(exact, rel=0.05)
    monkeypatch.setattr(check, "SOLVED", 1)
    monkeypatch.setattr(check, "PRODUCTS", 200)
    monkeypatch.setattr(check, "RESIDUAL", 1e-10)
    for row in batch.output_slopes(theta, 5)[0]:  # one output at a time nothing is shared, and CG is exact
        alone = check.by_products(batch, theta, row[None])
        torch.testing.assert_close(alone, (row @ precision.inverse() @ row)[None], rtol=1e-6, atol=0)
    monkeypatch.setattr(check, "NUMBERS", 0)
    assert check.output_spread(batch, theta, law) is None


@pytest.mark.parametrize("method", [bf.Vi(), bf.Ivon(), bf.Ekf(), bf.Laplace("diag", prior_precision=1.0)], ids=str)
def test_diagonal_posteriors_of_correlated_weights_say_that_their_outputs_are_off(method):
    x, y = correlated(400, size=20, dtype=torch.float32)
    posterior = bf.fit(nn.Linear(20, 1, bias=False), (x, y), likelihood=bf.Gaussian(NOISE), method=method)
    own, full = (law.double() for law in (posterior.law.variance(), x.T.double() @ x.double() / NOISE**2))
    full = (full + torch.eye(20, dtype=torch.float64)).inverse()
    true = ((x.double().square() @ own) / ((x.double() @ full) * x.double()).sum(1)).sqrt().median()
    assert posterior.facts["output_spread"] == pytest.approx(float(true), rel=0.1)
    (doubt,) = [doubt for doubt in posterior.doubts if doubt.check == "outputs"]
    assert doubt.value == posterior.facts["output_spread"]
    assert f"{doubt.value:.2f} of the standard deviation" in doubt.sentence


@pytest.mark.parametrize(
    "method", [bf.Vi("dense"), bf.Vi("kron"), bf.Ekf("dense"), bf.Laplace("full"), bf.Laplace("kron")], ids=str
)
def test_posteriors_that_have_the_correlations_do_not(method):
    data = correlated(400, size=20, dtype=torch.float32)
    posterior = bf.fit(nn.Linear(20, 1, bias=False), data, likelihood=bf.Gaussian(NOISE), method=method)
    assert "outputs" not in {doubt.check for doubt in posterior.doubts}
    assert posterior.facts.get("output_spread", 1.0) == pytest.approx(1, abs=0.06)


def test_laplace_compares_with_the_prior_and_the_temperature_that_it_has():
    data = correlated(40, size=4, dtype=torch.float64)
    for settings in ({"temperature": 0.1}, {"noise": "marglik"}, {"prior_precision": 30.0, "temperature": 3.0}):
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False, dtype=torch.float64)
        posterior = bf.fit(model, data, likelihood=bf.Gaussian(NOISE), method=bf.Laplace("kron", **settings))
        assert posterior.facts["output_spread"] == pytest.approx(1, abs=1e-3)


def test_a_subset_is_compared_over_its_own_weights():
    x, y = correlated(200, size=8, dtype=torch.float32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 1))
    for method in (bf.Laplace("diag", subset="2.*"), bf.Vi(subset="2.*")):
        posterior = bf.fit(model, (x, y), likelihood=bf.Gaussian(NOISE), method=method, training=bf.Training(40))
        assert posterior.facts["output_spread"] > 0
    whole = bf.fit(model, (x, y), likelihood=bf.Gaussian(NOISE), method=bf.Laplace("diag"), training=bf.Training(2))
    assert "output_spread" not in whole.facts  # a network, whose outputs are not linear
