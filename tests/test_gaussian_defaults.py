"""Vi, Ivon, Ekf and Swag with nothing set, on problems whose posterior is known, and what they say of themselves."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.core.draws import drawing_from
from bayesformer.core.types import Transform
from bayesformer.core.vectors import THETA
from bayesformer.data import as_batches
from bayesformer.inference.added_noise import with_noise
from bayesformer.laws import Diagonal, Eigenbasis, gaussian
from bayesformer.laws.roots import StackedRoot
from bayesformer.methods import Problem
from bayesformer.train.around_mode import AroundMode, at_diagonal_scale, tempered_map
from bayesformer.train.gaussian_doubts import arrival, arrival_doubts
from bayesformer.train.prototype import Prototype
from tests.nets import Mlp, blobs

WEIGHTS, NOISE = 20, 0.5
METHODS = {
    "vi": bf.Vi(),
    "vi dense": bf.Vi(kind="dense"),
    "vi kron": bf.Vi(kind="kron"),
    "ivon": bf.Ivon(),
    "ekf": bf.Ekf(),
    "ekf dense": bf.Ekf(kind="dense"),
}
DIAGONAL = {"vi", "ivon", "ekf"}


def regression(count=200, condition=10.0, seed=0, dtype=torch.float32, size=1.0):
    """Inputs whose covariance has a condition number; data, the exact mean and the exact precision."""
    g = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(WEIGHTS, WEIGHTS, generator=g)).Q
    scales = torch.logspace(0, -math.log10(condition) / 2, WEIGHTS)
    x = (torch.randn(count, WEIGHTS, generator=g) * scales @ basis.mT).to(dtype)
    y = x @ (size * torch.randn(WEIGHTS, generator=g)).to(dtype) + NOISE * torch.randn(count, generator=g).to(dtype)
    precision = x.double().mT @ x.double() / NOISE**2 + torch.eye(WEIGHTS, dtype=torch.float64)
    return (x, y[:, None]), torch.linalg.solve(precision, x.double().mT @ y.double() / NOISE**2), precision


def fit(method, data, dtype=torch.float32, **options):
    torch.manual_seed(1)
    model = nn.Linear(WEIGHTS, 1, bias=False, dtype=dtype)
    return bf.fit(model, data, likelihood=bf.Gaussian(NOISE), method=method, **options)


def standing(posterior, mean, precision, diagonal, temperature=1.0):
    """RMS error of the mean in exact standard deviations, and the median ratio of the standard deviations."""
    sd = precision.inverse().diagonal().sqrt()
    best = precision.diagonal().rsqrt() if diagonal else sd
    error = ((posterior.law.mean.double() - mean) / sd).square().mean().sqrt()
    return float(error), float((posterior.law.sd.double() / best / temperature**0.5).median())


# --- the posterior --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_the_one_line_call_gives_the_posterior_of_linear_regression(name):
    data, mean, precision = regression()
    posterior = fit(METHODS[name], data)
    error, ratio = standing(posterior, mean, precision, name in DIAGONAL)
    assert error < 0.1
    assert 0.9 < ratio < 1.1
    assert posterior.doubts == ()
    assert posterior.facts["coordinates"]["regime"] == "gaussian"


@pytest.mark.parametrize("name", ["vi", "vi dense", "ivon", "ekf", "ekf dense"])
def test_a_temperature_is_that_of_the_whole_posterior(name):
    data, mean, precision = regression(100)
    settings = {"temperature": 0.04} | ({"kind": "dense"} if "dense" in name else {})
    method = {"vi": bf.Vi, "ivon": bf.Ivon, "ekf": bf.Ekf}[name.split()[0]](**settings)
    error, ratio = standing(fit(method, data), mean, precision, name in DIAGONAL, 0.04)
    assert error < 0.1
    assert 0.9 < ratio < 1.1


def test_a_dense_filter_is_bayes_rule():
    data, mean, precision = regression(120, dtype=torch.float64)
    law = fit(bf.Ekf(kind="dense", prior="normal(0, 1)"), data, torch.float64).law
    torch.testing.assert_close(law.mean, mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(law.precision(), precision, rtol=1e-6, atol=1e-6)


def test_whitened_swag_has_the_posteriors_spread_and_plain_swag_says_that_it_has_not():
    data, mean, precision = regression()
    posterior = fit(bf.Swag(coordinates="whitened"), data)
    error, ratio = standing(posterior, mean, precision, False)
    assert error < 0.3
    assert 0.75 < ratio < 1.25
    assert posterior.doubts == ()
    with pytest.warns(bf.FidelityWarning, match="Not a posterior: the spread of an optimiser"):
        fit(bf.Swag(every=1), data, training=bf.Training(epochs=4))


@pytest.mark.parametrize("sd", [0.02, 0.005])
def test_whitened_swag_has_the_spread_of_a_posterior_that_is_mostly_the_prior(sd):
    """The gradient of the prior has no noise of batches, and descent alone would be narrower by the data's share."""
    data, _, whole = regression(size=sd)  # data that contradict the prior have noise of another size
    precision = whole + (sd**-2 - 1) * torch.eye(WEIGHTS, dtype=torch.float64)
    posterior = fit(bf.Swag(coordinates="whitened", prior=f"normal(0, {sd})"), data)
    ratio = posterior.law.sd.double() / precision.inverse().diagonal().sqrt()
    assert 0.85 < float(ratio.median()) < 1.15
    assert posterior.doubts == ()


def test_noise_added_to_a_descent_has_its_stationary_law():
    rate, size = 0.4, 20000
    still = Transform(
        Still,
        lambda state, batch, inplace=False: (Still({THETA: (1 - rate) * state.params[THETA]}), None),
    )
    root = torch.tensor([[2.0, 0.0], [1.0, 0.5]])
    noisy, g = with_noise(still, root), torch.Generator("cpu").manual_seed(0)
    state, draws = noisy.init({THETA: torch.zeros(2)}), []
    with drawing_from([g]):
        for _ in range(size):
            state, _ = noisy.update(state, None)
            draws.append(state.params[THETA])
    exact = root @ root.mT / (1 - (1 - rate) ** 2)
    found = torch.stack(draws).mT.cov()
    # a variance of size draws, each independent of the one 1 / rate before within e
    assert float((found - exact).abs().max()) < 5 * float(exact.max()) * (2 * 2 / rate / size) ** 0.5


class Still(NamedTuple):
    """The state of an algorithm without noise."""

    params: dict


def test_a_spread_that_is_not_the_curvatures_is_a_doubt():
    data, _, _ = regression(22, 1.0)
    with pytest.warns(bf.FidelityWarning, match="The spread of the descent differs from the curvature's by a factor"):
        posterior = fit(bf.Swag(coordinates="whitened", epochs=2), data, training=bf.Training(epochs=50, batch_size=8))
    assert "spread" in [doubt.check for doubt in posterior.doubts]


def test_numbers_that_are_given_mean_what_they_meant():
    """A start in plain coordinates and a share of the training for the mode: at a rate of 0 all stays as given."""
    data, _, _ = regression(50)
    still = bf.Training(epochs=2, lr=1e-12)
    posterior = fit(bf.Vi(log_sd=-5.0, warm_up=0.0), data, training=still)
    torch.testing.assert_close(posterior.law.sd, torch.full((WEIGHTS,), math.exp(-5)))
    assert "coordinates" not in posterior.facts
    torch.manual_seed(1)
    start = nn.Linear(WEIGHTS, 1, bias=False).weight[0].detach()
    torch.testing.assert_close(posterior.law.mean, start)
    ivon = fit(bf.Ivon(h0=100.0, decay=1 - 1e-9, lr=1e-9, warm_up=0.0), data, training=still)
    torch.testing.assert_close(ivon.law.sd, torch.full((WEIGHTS,), (50 * 100 + 1) ** -0.5))
    assert fit(bf.Vi(warm_up=0.5, epochs=3), data, training=bf.Training(epochs=2)).facts["epochs"] == [3]
    assert fit(bf.Vi(warm_up=0.5), data, training=bf.Training(epochs=2)).facts["epochs"] == [1]


def test_an_axis_that_the_curvature_gives_needs_no_number():
    with pytest.raises(ValueError, match="vi.log_sd must be 'auto' with kind='kron'"):
        bf.Vi(kind="kron", log_sd=-5.0)
    with pytest.raises(ValueError, match="dense coordinates must have at most 2000 weights; got 2001"):
        bf.fit(
            nn.Linear(2001, 1, bias=False),
            (torch.zeros(4, 2001), torch.zeros(4, 1)),
            likelihood=bf.Gaussian(1.0),
            method=bf.Vi(kind="dense"),
        )
    with pytest.raises(ValueError, match="ekf.kind must be 'diag' beyond 5000 weights; got 'dense' with 6000"):
        bf.fit(
            nn.Linear(6000, 1, bias=False),
            (torch.zeros(4, 6000), torch.zeros(4, 1)),
            likelihood=bf.Gaussian(1.0),
            method=bf.Ekf(kind="dense"),
        )


# --- networks -------------------------------------------------------------------------------------------------------


def test_variational_inference_in_the_kronecker_basis_predicts_in_every_way(tmp_path):
    x = torch.randn(5, 3)
    fitted = bf.fit(
        Mlp(),
        blobs(60),
        likelihood="categorical",
        method=bf.Vi(kind="kron", epochs=3, draws=400),
        training=bf.Training(epochs=4, batch_size=16),
    )
    assert any(isinstance(block, Eigenbasis) for block in fitted.law.blocks)
    sampled = fitted.predict(x).probs.mean(0) if fitted.predict(x).probs.dim() == 3 else fitted.predict(x).probs
    for way in ("linearised", "streamlined"):
        probs = fitted.predict(x, predictive=way).probs
        torch.testing.assert_close(probs.sum(-1), torch.ones(5))
        assert probs.shape[-1] == sampled.shape[-1]
    loaded = bf.Posterior.load(fitted.save(tmp_path / "p"), Mlp())
    assert torch.equal(loaded.predict(x).probs, fitted.predict(x).probs)


def network():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 1, generator=g)
    return lambda: nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)), (x, torch.sin(3 * x))


def test_a_gaussian_around_the_mode_of_a_network_is_doubted():
    model, data = network()
    training = bf.Training(epochs=30, lr=0.02)
    with pytest.warns(bf.FidelityWarning, match=r"This is a network: .* A diagonal Gaussian around one mode is not"):
        posterior = bf.fit(model, data, likelihood=bf.Gaussian(0.1), method=bf.Ekf(), training=training)
    assert "regime" in {doubt.check for doubt in posterior.doubts}
    with pytest.raises(ValueError, match="swag.coordinates must be 'plain' for a network"):
        bf.fit(model, data, likelihood=bf.Gaussian(0.1), method=bf.Swag(coordinates="whitened"), training=training)


def test_axes_at_the_scale_of_the_diagonal():
    torch.manual_seed(0)
    out, into = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q for n in (3, 4))
    diagonal = torch.rand(14, dtype=torch.float64) + 0.5
    blocks = (Eigenbasis(torch.ones(3, 4, dtype=torch.float64), out, into), Diagonal(torch.ones(2).double()))
    calm = at_diagonal_scale(StackedRoot((slice(0, 12), slice(12, 14)), blocks), diagonal)
    axes = torch.kron(out.contiguous(), into.contiguous())  # columns are axes
    torch.testing.assert_close(calm.blocks[0].precisions.flatten(), axes.square().mT @ diagonal[:12])
    torch.testing.assert_close(calm.blocks[1].variance, 1 / diagonal[12:])
    half = tempered_map(torch.zeros(14, dtype=torch.float64), calm, 0.25)
    noise = torch.randn(14, dtype=torch.float64)
    torch.testing.assert_close(half.to_theta(noise), calm.colour(noise) / 2)


# --- what it says of itself -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact():
    """The full batch of a linear regression and its exact posterior."""
    data, mean, precision = regression(100, dtype=torch.float64)
    model = nn.Linear(WEIGHTS, 1, bias=False, dtype=torch.float64)
    prototype = Prototype(Problem(model, bf.Gaussian(NOISE), as_batches(data, "data")))
    around = AroundMode(bf.Vi(kind="dense"), prototype, "normal(0, 1)", "dense")
    return around.full_batch(), mean, torch.linalg.cholesky(precision.inverse())


PRIOR = torch.ones(WEIGHTS, dtype=torch.float64)


def determined(root):
    """Σ (1 - Π_i Σ_ii), for a prior of precision 1."""
    return float((1 - root.square().sum(1)).clamp_min(0).sum())


def test_the_exact_posterior_has_arrived(exact):
    batch, mean, root = exact
    found = arrival(batch, gaussian(mean, tril=root), PRIOR, 1.0, 0)
    assert found.mean_step < 1e-6
    assert abs(found.growth) < 4 * found.growth_error + 0.1
    assert found.rise == pytest.approx(1, abs=5 * math.sqrt(2 / (4 * determined(root))))
    assert arrival_doubts(found, 1.0) == []
    cold = arrival(batch, gaussian(mean, tril=root / 10), PRIOR, 0.01, 0)
    assert cold.rise == pytest.approx(found.rise, rel=1e-3)
    assert cold.growth == pytest.approx(found.growth, abs=1e-3)


def test_a_mean_that_is_off_and_a_spread_that_is_wrong_are_measured(exact):
    """One standard deviation off in every direction is a step of 1; a spread twice as wide raises the loss fourfold."""
    batch, mean, root = exact
    shift = root @ torch.ones(WEIGHTS, dtype=torch.float64)
    found = arrival(batch, gaussian(mean + shift, tril=root), PRIOR, 1.0, 0)
    assert found.mean_step == pytest.approx(1, rel=1e-6)
    (doubt,) = arrival_doubts(found, 1.0)
    assert doubt.check == "elbo"
    assert "still rises" in doubt.sentence
    assert [doubt.check for doubt in arrival_doubts(found, 1.0, variational=False)] == ["mean"]
    assert arrival_doubts(found, 1.0, variational=False, network=True) == []
    right = arrival(batch, gaussian(mean, tril=root), PRIOR, 1.0, 0)
    wide = arrival(batch, gaussian(mean, tril=3 * root), PRIOR, 1.0, 0)
    assert wide.rise * determined(3 * root) == pytest.approx(9 * right.rise * determined(root), rel=1e-6)
    assert wide.growth == pytest.approx(0.5 * (1 - 9 * (1 - 2 * right.growth)), rel=1e-6)
    assert [doubt.check for doubt in arrival_doubts(wide, 1.0)] == ["draws"]
    narrow = arrival(batch, gaussian(mean, tril=root / 4), PRIOR, 1.0, 0)
    assert [doubt.check for doubt in arrival_doubts(narrow, 1.0)] == ["elbo"]


def test_the_scale_in_a_network_is_nowhere_wider_than_the_curvature(network_around):
    """The largest eigenvalue of Wᵀ H W is 1 for diagonal and for Kronecker axes, as well as products find it."""
    for around in network_around:
        root, times = around.calm_root(), around.full_batch().hessian(around.coordinates.center)
        eye = torch.eye(len(around.coordinates.center), dtype=torch.float64)
        columns = torch.stack([root.times_root(times(root.colour(row))) for row in eye])
        assert float(torch.linalg.eigvalsh((columns + columns.mT) / 2)[-1]) == pytest.approx(1.1, abs=0.15)


@pytest.fixture(scope="module")
def network_around():
    """A network with one hidden layer, with diagonal and with Kronecker axes."""
    model, (x, y) = network()
    torch.manual_seed(0)
    problem = Problem(
        model().double(),
        bf.Gaussian(0.1),
        as_batches((x.double(), y.double()), "data"),
        training=bf.Training(epochs=30, lr=0.02),
    )
    return [AroundMode(bf.Vi(), Prototype(problem), "normal(0, 1)", kind) for kind in ("diag", "kron")]
