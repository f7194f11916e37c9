"""The front end of samplers: the mode, the curvature there, the regime, and coordinates in posterior sds."""

import math

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.data import as_batches
from bayesformer.laplace.estimate import estimate
from bayesformer.likelihoods import as_likelihood
from bayesformer.priors.distributions import Cauchy, LaplaceDistribution, Logistic, Normal, StudentT, precision_at
from bayesformer.priors.prior import as_prior
from bayesformer.train.coordinates import DENSE, centred, find_coordinates
from bayesformer.train.full_batch import FullBatch
from bayesformer.train.newton import polish
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import find_modes, subset_stage
from bayesformer.train.vector_prior import GaussianPrior, NamedPrior

SHORT = bf.Training(epochs=2, lr=1e-2, warmup=1)


def stage(model, data, likelihood, subset="*", training=SHORT, prior="normal(0, 1)"):
    prototype = Prototype(Problem(model, as_likelihood(likelihood), as_batches(data, "data"), training=training))
    return subset_stage(prototype, find_modes(prototype, "test", prior, 1.0), subset)


def regression(count=100, size=6, seed=0):
    """Stretched inputs, their targets, and the exact mean and precision under N(0, 1) and noise .5."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=g) * torch.logspace(0, -1.5, size)
    x = x @ torch.linalg.qr(torch.randn(size, size, generator=g))[0]
    y = x @ torch.randn(size, 1, generator=g) + 0.5 * torch.randn(count, 1, generator=g)
    precision = 4 * x.double().T @ x.double() + torch.eye(size, dtype=torch.float64)
    return (x, y), torch.linalg.solve(precision, 4 * (x.double().T @ y.double()))[:, 0], precision


def classes(count=60, width=4, kinds=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=g)
    return x, (x @ torch.randn(width, kinds, generator=g) + torch.randn(count, kinds, generator=g)).argmax(1)


def written_down(root, size, dtype=torch.float32):
    """W (P, P) of a root, and its transpose as `times_root` has it."""
    eye = torch.eye(size, dtype=dtype)
    return root.colour(eye).mT, root.times_root(eye)


@pytest.mark.parametrize("kind", ["auto", "dense", "kron"])
def test_a_linear_model_is_whitened_exactly_around_its_exact_mean(kind):
    data, mean, precision = regression()
    torch.manual_seed(0)
    found = find_coordinates(stage(nn.Linear(6, 1, bias=False), data, bf.Gaussian(0.5)), "normal(0, 1)", kind=kind)
    assert found.decrement < 1e-3
    torch.testing.assert_close(found.center.double(), mean, atol=1e-4, rtol=1e-4)
    w, same = written_down(found.root, 6)
    torch.testing.assert_close(w, same)
    torch.testing.assert_close(w.double().T @ precision @ w.double(), torch.eye(6).double(), atol=1e-3, rtol=0)
    assert found.largest == pytest.approx(1, abs=1e-3)
    assert found.regime == "gaussian"
    assert found.rise == pytest.approx(1, abs=5 * math.sqrt(2 / (16 * 6)))
    torch.testing.assert_close(found.curvature_diagonal.double(), precision.diagonal(), rtol=1e-4, atol=1e-4)
    assert (found.prior_precision == 1).all()


@pytest.mark.parametrize("kind", ["diag", "prior"])
def test_the_largest_curvature_is_that_of_the_matrix(kind):
    data, _, precision = regression()
    found = find_coordinates(stage(nn.Linear(6, 1, bias=False), data, bf.Gaussian(0.5)), "normal(0, 1)", kind=kind)
    scale = precision.diagonal().rsqrt() if kind == "diag" else torch.ones(6).double()
    exact = torch.linalg.eigvalsh(scale[:, None] * precision * scale)[-1].item()
    assert found.largest == pytest.approx(exact, rel=0.02)


def test_a_hidden_layer_is_a_network_and_its_last_layer_alone_is_not():
    data = classes()
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    whole = find_coordinates(stage(net, data, "categorical", training=bf.Training(epochs=30)), "normal(0, 1)")
    assert (whole.regime, whole.kind) == ("network", "prior")
    assert whole.rise > 2
    assert torch.equal(whole.root.colour(torch.ones(67)), torch.ones(67))
    last = find_coordinates(stage(net, data, "categorical", subset="2.*"), "normal(0, 1)")
    assert (last.regime, last.kind, len(last.center)) == ("gaussian", "dense", 27)
    assert last.decrement < 0.05


def test_models_whose_training_is_random_are_not_tested():
    noisy = nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 3))
    found = find_coordinates(stage(noisy, classes(), "categorical"), "normal(0, 1)")
    assert (found.regime, found.rise) == ("network", None)


def test_newton_steps_by_products_and_by_a_matrix_end_at_the_same_mode():
    part = stage(nn.Linear(4, 3), classes(), "categorical")
    prior, prototype = NamedPrior(as_prior("normal(0, 1)"), part.space), part.prototype
    found = []
    for dense in (True, False):
        batch = FullBatch(prototype, prototype.skeleton, part.starts[0], prior)
        found.append(polish(batch, part.starts[0].theta, dense=dense))
        slope = batch.slope(found[-1].theta)[1]
        assert slope.norm() < 0.1 * batch.slope(part.starts[0].theta)[1].norm()
        assert batch.epochs > 3
    assert all(one.decrement < 0.05 for one in found)
    covariance = torch.linalg.inv(found[0].precision)
    away = (found[0].theta - found[1].theta).double()
    assert away @ torch.linalg.solve(covariance, away) < 15 * 0.1**2  # both within .05 sd per weight


@pytest.mark.parametrize("method", [bf.Map(), bf.Laplace()], ids=["map", "laplace"])
def test_the_mode_of_a_small_network_is_found(method):
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] + 0.05 * torch.randn(200, 1)
    model = nn.Sequential(nn.Linear(4, 15), nn.Tanh(), nn.Linear(15, 1))
    posterior = bf.fit(model, (x, y), likelihood=bf.Gaussian(0.05), method=method, progress=False)
    assert posterior.facts["decrement"] < 0.1  # .9 and more after five steps
    assert "mode" not in {doubt.check for doubt in posterior.doubts}


def test_the_full_batch_is_the_negative_log_joint_and_its_derivatives():
    x, y = classes(20)
    part = stage(nn.Linear(4, 3).double(), (x.double(), y), "categorical")
    theta = part.starts[0].theta
    batch = FullBatch(
        part.prototype, part.prototype.skeleton, part.starts[0], NamedPrior(as_prior("normal(0, 2)"), part.space)
    )
    logits = x.double() @ theta[:12].view(3, 4).T + theta[12:]
    exact = (
        nn.functional.cross_entropy(logits, y, reduction="sum") - torch.distributions.Normal(0, 2).log_prob(theta).sum()
    )
    value, slope = batch.slope(theta)
    assert value == pytest.approx(exact.item())
    assert batch.potential(theta) == pytest.approx(exact.item())
    v, h = torch.randn(15, dtype=torch.float64), 1e-5
    up, down = batch.slope(theta + h * v)[1], batch.slope(theta - h * v)[1]
    assert (batch.potential(theta + h * v) - batch.potential(theta - h * v)) / (2 * h) == pytest.approx(
        float(slope @ v)
    )
    torch.testing.assert_close(batch.hessian(theta)(v), (up - down) / (2 * h), rtol=1e-5, atol=1e-5)  # linear: GGN = H


def test_weighted_kronecker_factors_are_those_of_the_sum_over_examples():
    """A counts every example by the trace of its information, for the closed form and for backward passes."""
    x, y = classes(30)
    torch.manual_seed(0)
    alone = nn.Linear(4, 3)
    p = alone(x).softmax(1).detach()
    information = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    w = 1 - p.square().sum(1)
    a = (w[:, None, None] * x.unsqueeze(2) * x.unsqueeze(1)).sum(0) / w.sum()
    exact = torch.kron(information.sum(0), a)
    inside = nn.Sequential(alone, nn.LeakyReLU(1.0))  # the same function, by the general estimator
    for model in (alone, inside.eval()):
        block = estimate(model.eval(), "categorical", (x, y), "kron", weighted=True).structures[0]
        torch.testing.assert_close(block.dense(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("law", [Normal(0.2, 0.5), StudentT(4, 0.2, 0.5), Cauchy(0.2, 0.5), Logistic(0.2, 0.5)])
def test_a_priors_precision_is_its_curvature_at_the_centre_and_positive_everywhere(law):
    x = torch.linspace(-30, 30, 61, dtype=torch.float64)
    assert (precision_at(law, x) > 0).all()
    h, at = 1e-3, torch.tensor([0.2], dtype=torch.float64)
    second = -(law.log_prob(at + h) - 2 * law.log_prob(at) + law.log_prob(at - h)) / h**2
    torch.testing.assert_close(precision_at(law, at), second, rtol=1e-3, atol=0)


def test_a_kink_has_a_finite_precision():
    assert (precision_at(LaplaceDistribution(0, 0.5), torch.tensor([0.0, 1e-9, 1.0])) <= 16).all()


def test_an_earlier_posterior_gives_its_precision():
    from bayesformer.laws import gaussian

    root = torch.tensor([[0.5, 0.0], [0.2, 0.3]])
    prior, theta = GaussianPrior(gaussian(torch.zeros(2), tril=root)), torch.ones(2)
    inverse = torch.linalg.inv(root @ root.T)
    torch.testing.assert_close(prior.precision(theta), inverse.diagonal())
    torch.testing.assert_close(prior.precision_times(theta, torch.eye(2)), inverse)


def test_chains_start_at_the_centre():
    part = stage(nn.Linear(4, 3), classes(), "categorical")
    found = find_coordinates(part, "normal(0, 1)")
    assert torch.equal(centred(part, [found]).starts[0].theta, found.center)


def test_a_dense_metric_that_is_too_large_is_refused_with_its_size():
    part = stage(nn.Linear(1000, 3), (torch.randn(8, 1000), torch.randint(3, (8,))), "categorical")
    with pytest.raises(ValueError, match=rf"at most {DENSE} weights; got 3003, whose matrix takes 0.1 GiB"):
        find_coordinates(part, "normal(0, 1)", kind="dense")


def test_one_output_without_an_axis_of_its_own_is_enough():
    class Logit(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs).squeeze(-1)

    x, y = classes(kinds=2)
    found = find_coordinates(stage(Logit(4, 1), (x, y.float()), "bernoulli"), "normal(0, 1)")
    assert (found.regime, found.kind) == ("gaussian", "dense")
    assert found.decrement < 0.05
