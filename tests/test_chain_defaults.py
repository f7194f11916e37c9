"""Samplers with nothing set: the posterior where it is known, and words where it is not reached."""

import math
import warnings

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.core.vectors import THETA
from bayesformer.inference import baoab, schedules, sghmc, sgld, sgnht, whitened
from bayesformer.laws import Dense, Diagonal
from bayesformer.methods import build_method, chain_run, langevin_checks
from bayesformer.methods.langevin_checks import HOT, of_temperature
from bayesformer.methods.pace import Pace, langevin_pace, momentum_pace, thermostat_pace
from bayesformer.train.collect import Collect
from bayesformer.train.coordinates import Coordinates
from tests.laws import assert_mean
from tests.nets import Mlp, blobs

SIZE = 20
SAMPLERS = ("sgld", "sghmc", "sgnht", "baoab")


def regression(count=200, condition=10.0, seed=0):
    """Inputs of a condition number, targets with noise 1, and the exact posterior under N(0, 1)."""
    g = torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=g, dtype=torch.float64))
    x = (
        torch.randn(count, SIZE, generator=g, dtype=torch.float64)
        @ (turn * torch.logspace(0, -math.log10(condition), SIZE).double())
        @ turn.T
    )
    x = x / x.std()
    y = x @ torch.randn(SIZE, 1, generator=g, dtype=torch.float64) + torch.randn(
        count, 1, generator=g, dtype=torch.float64
    )
    precision = x.T @ x + torch.eye(SIZE, dtype=torch.float64)
    covariance = torch.linalg.inv(precision)
    return (x.float(), y.float()), (covariance @ (x.T @ y))[:, 0], covariance.diagonal().sqrt()


def fit(method, data, seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Linear(SIZE, 1, bias=False)
    return bf.fit(model, data, likelihood=bf.Gaussian(1.0), method=method, seed=seed, progress=False, **options)


def compared(posterior, mean, sd):
    """RMS error of the mean in posterior sds, and the median ratio of sds."""
    law = posterior.law
    draws = getattr(law, "theta", None)
    own, spread = (law.mean, law.sd) if draws is None else (draws.mean(0), draws.std(0, correction=0))
    return ((own.double() - mean) / sd).square().mean().sqrt().item(), (spread.double() / sd).median().item()


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_with_nothing_set_samples_the_posterior(name):
    data, mean, sd = regression()
    posterior = fit(name, data)
    error, ratio = compared(posterior, mean, sd)
    assert error < 0.3
    assert 0.85 < ratio < 1.15
    assert posterior.doubts == ()
    assert len(posterior.theta) == 100
    assert posterior.facts["coordinates"]["epochs"] <= 200
    assert posterior.facts["coordinates"]["regime"] == "gaussian"


@pytest.mark.parametrize("name", SAMPLERS)
def test_small_data_get_steps_where_epochs_have_one_each(name):
    """40 examples are one batch: 200 steps of a thermostat were .54 to .74 of the spread."""
    data, mean, sd = regression(40)
    posterior = fit(name, data)
    error, ratio = compared(posterior, mean, sd)
    assert error < 0.4
    assert 0.85 < ratio < 1.15
    assert posterior.doubts == ()


def test_advice_on_length_does_not_name_what_is_set_already():
    data, _, _ = regression(40)
    with pytest.warns(bf.FidelityWarning, match="leave it at 'auto'"):
        fit(bf.Sgld(epochs=20), data)


@pytest.mark.parametrize("name", ["laplace", "map"])
def test_laplace_and_map_find_the_mode(name):
    data, mean, sd = regression()
    method = bf.Laplace(structure="full", prior_precision=1.0) if name == "laplace" else bf.Map()
    posterior = fit(method, data, training=bf.Training(epochs=2))
    error, ratio = compared(posterior, mean, sd)
    assert error < 1e-3
    assert posterior.facts["decrement"] < 1e-3
    assert posterior.doubts == ()
    if name == "laplace":
        assert ratio == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("method", [bf.Mle(), bf.Ensemble(members=2)], ids=["mle", "ensemble"])
def test_points_say_that_they_were_not_trained_to_the_end(method):
    """100 epochs of 100 examples are 200 steps, which Adam's rate does not carry to the optimum."""
    data, _, _ = regression(100)
    posterior = fit(method, data)
    alike = [] if isinstance(method, bf.Mle) else ["starts"]  # a model was given
    assert [doubt.check for doubt in posterior.doubts] == ["training", *alike]
    who = "The network has" if isinstance(method, bf.Mle) else "2 of 2 networks have"
    assert posterior.doubts[0].sentence.startswith(f"{who} not been trained to the end")
    settled = fit(method, data, training=bf.Training(epochs=400, lr=0.05, schedule="cosine"))
    assert [doubt.check for doubt in settled.doubts] == alike


def test_a_laplace_posterior_is_around_the_mode_of_the_prior_that_it_chose():
    data, _, _ = regression()
    posterior = fit(bf.Laplace(structure="full"), data, training=bf.Training(epochs=2))
    (chosen,) = posterior.facts["prior_precision"]
    x, y = (part.double() for part in data)
    precision = x.T @ x + chosen * torch.eye(SIZE, dtype=torch.float64)
    assert abs(chosen - 1) > 0.01
    assert f"prior of precision {chosen:.3g} chosen from the data" in repr(posterior)
    assert "chosen" not in repr(fit(bf.Laplace(prior_precision=1.0), data, training=bf.Training(epochs=2)))
    away = posterior.law.mean.double() - torch.linalg.solve(precision, x.T @ y)[:, 0]
    assert (away @ precision @ away / SIZE).sqrt() < 0.06  # steps end below .05 posterior sds
    torch.testing.assert_close(posterior.law.precision().double(), precision, atol=0.1, rtol=1e-3)


@pytest.mark.parametrize("name", ["sghmc", "sgld"])
def test_temperature_narrows_the_posterior_by_its_root(name):
    data, mean, sd = regression()
    error, ratio = compared(fit(build_method(name, {"temperature": 0.25}), data), mean, sd / 2)
    assert error < 0.4
    assert 0.8 < ratio < 1.2
    still = fit(build_method(name, {"temperature": 0.0}), data)
    assert compared(still, mean, sd)[1] < 0.3  # the noise of the batches alone


def test_chains_in_coordinates_are_the_same_in_every_strategy():
    data, _, _ = regression(60)
    method = bf.Sghmc(chains=3, draws=4, epochs=12)
    training = bf.Training(epochs=5)
    looped, batched, processes = (
        fit(method, data, training=training, strategy=s, workers=2) for s in ("looped", "batched", "processes")
    )
    assert looped.theta.shape == (12, SIZE)
    torch.testing.assert_close(batched.theta, looped.theta, atol=1e-4, rtol=1e-4)
    assert torch.equal(processes.theta, looped.theta)
    assert looped.facts["starts"].startswith("one for all chains")


class Stopper:
    """A reporter that ends the program in the middle of the sampling."""

    def __init__(self, label):
        self.label, self.seen = label, 0

    def update(self, task, done, total, note=""):
        self.seen += task == self.label and total == 40
        if self.seen > 12:
            raise KeyboardInterrupt


def test_a_chain_in_coordinates_goes_on_from_a_checkpoint(tmp_path):
    from bayesformer.data import as_batches
    from bayesformer.methods import Problem

    data, _, _ = regression(60)
    torch.manual_seed(0)
    model = nn.Linear(SIZE, 1, bias=False)
    options = {"training": bf.Training(epochs=3), "checkpoint": tmp_path, "checkpoint_seconds": 0.0}
    method = bf.Sghmc(draws=8, epochs=40)
    with pytest.raises(KeyboardInterrupt):
        method.fit(Problem(model, bf.Gaussian(1.0), as_batches(data), reporter=Stopper("member 0"), **options))
    resumed = method.fit(Problem(model, bf.Gaussian(1.0), as_batches(data), **options))
    whole = method.fit(Problem(model, bf.Gaussian(1.0), as_batches(data), training=options["training"]))
    assert torch.equal(resumed.theta, whole.theta)


def test_a_short_chain_says_what_it_is_worth_before_it_runs_and_once():
    data, _, _ = regression()
    with pytest.warns(bf.FidelityWarning) as told:
        posterior = fit(bf.Sghmc(epochs=10), data)
    assert [doubt.check for doubt in posterior.doubts if doubt.check == "length"]
    assert sum("10 epochs of sampling are worth about" in str(warning.message) for warning in told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is computed then
        with pytest.raises(bf.FidelityWarning, match="10 epochs of sampling"):
            fit(bf.Sghmc(epochs=10), data)


def test_one_scale_per_weight_does_not_reach_what_the_data_determine_weakly():
    data, mean, sd = regression(condition=1000.0)
    posterior = fit("psgld", data)
    assert compared(posterior, mean, sd)[1] < 0.5
    assert "slow directions" in {doubt.check for doubt in posterior.doubts}


def test_a_network_is_not_sampled_around_its_mode_in_silence():
    posterior = bf.fit(Mlp, blobs(60), likelihood="categorical", method=bf.Sgld(), training=bf.Training(epochs=4))
    assert "regime" in {doubt.check for doubt in posterior.doubts}
    assert posterior.facts["coordinates"]["kind"] == "prior"


def test_a_hot_chain_says_so():
    assert of_temperature(1.3, HOT) == []
    assert of_temperature(None, HOT) == []
    assert "larger batches" in of_temperature(2.0, HOT)[0].sentence


@pytest.mark.parametrize("name", ["sgld", "sghmc", "baoab"])
@pytest.mark.parametrize(("noise", "said"), [(0.6, []), (1.2, ["temperature"])])
def test_targets_that_scatter_more_than_the_likelihood_says_heat_the_chain(name, noise, said):
    """Noise of 1.2 and 2.4 times the given scale: the variance of the draws is 1.3 and 1.5 times the posterior's."""
    torch.manual_seed(0)
    x = torch.randn(400, 2)
    data, likelihood = (x, x.sum(1, keepdim=True) + noise * torch.randn(400, 1)), bf.Gaussian(0.5)
    exact = bf.fit(nn.Linear(2, 1), data, likelihood=likelihood, method=bf.Laplace(prior_precision=1.0), progress=False)
    posterior = bf.fit(nn.Linear(2, 1), data, likelihood=likelihood, method=name, progress=False)
    heat = posterior.facts["coordinates"]["temperature"]
    assert heat == pytest.approx(float((posterior.theta.std(0) / exact.law.sd).square().mean()), rel=0.25)
    assert [doubt.check for doubt in posterior.doubts] == said


def test_draws_that_do_not_fit_in_memory_are_fewer_and_that_is_said(monkeypatch, caplog):
    monkeypatch.setattr(chain_run, "room_for", lambda size, device: 7)
    data, _, _ = regression(60)
    assert len(fit(bf.Sghmc(epochs=20), data, training=bf.Training(epochs=2)).theta) == 7
    assert "keeps 7 draws of each chain instead of 100" in caplog.text


def test_steps_may_fall():
    data, mean, sd = regression()
    error, ratio = compared(fit(bf.Sgld(decay=0.33), data), mean, sd)
    assert error < 0.45
    assert 0.7 < ratio < 1.2
    rate = schedules.robbins_monro(2.0, 3.0, 0.5)
    torch.testing.assert_close(rate(torch.tensor([1.0, 6.0])), torch.tensor([1.0, 2 / 3]))
    with pytest.raises(ValueError, match=r"gamma in \[0, 1\]; got a=1.0, b=1.0, gamma=2.0"):
        schedules.robbins_monro(1.0, 1.0, 2.0)


def test_draws_are_evenly_spaced_in_time_where_steps_fall():
    times = [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    assert Collect.by_time(times, 2, 2).steps == (4, 8)
    assert Collect.by_time([1.0] * 10, 2, 4).steps == Collect.spread(10, 2, 4).steps
    with pytest.raises(ValueError, match="draws must fit after the burn-in; got 9 draws in 8 steps"):
        Collect.by_time(times, 2, 9)


# --- coordinates as a transform ---------------------------------------------------------------------------------------


class Quadratic:
    """U = -½ (θ - μ)ᵀ A (θ - μ), without noise."""

    def __init__(self, matrix, mean):
        self.matrix, self.mean = matrix, mean

    def __call__(self, params, batch):
        away = params[THETA] - self.mean
        return -0.5 * (away @ self.matrix * away).sum(-1), torch.zeros(())

    def value_and_grad(self, params, batch):
        value, outputs = self(params, batch)
        return value, outputs, {THETA: -(params[THETA] - self.mean) @ self.matrix}


BUILDERS = {
    "sgld": lambda joint: sgld.build(joint, 0.05, 0.1),
    "sghmc": lambda joint: sghmc.build(joint, 0.1, 0.1, 2.0),
    "baoab": lambda joint: baoab.build(joint, 0.1, 0.1, 2.0),
    "sgnht": lambda joint: sgnht.build(joint, 0.05, 0.1, 2.0),
}


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("inplace", [False, True])
def test_coordinates_of_unit_scale_are_the_sampler_itself(name, inplace):
    joint = Quadratic(torch.tensor([[2.0, 0.3], [0.3, 1.0]]), torch.tensor([0.5, -1.0]))
    plain, other = BUILDERS[name](joint), whitened.build(joint, Diagonal(torch.ones(2)), BUILDERS[name])
    states = []
    for transform in (plain, other):
        torch.manual_seed(0)
        state = transform.init({THETA: torch.tensor([1.0, 2.0])})
        for _ in range(20):
            state, _ = transform.update(state, None, inplace=inplace)
        states.append(state)
    torch.testing.assert_close(states[1].params[THETA], states[0].params[THETA], atol=1e-4, rtol=1e-4)


def test_a_chain_in_coordinates_has_the_exact_law_and_temperature():
    """BAOAB is exact on a Gaussian whatever the step: 3000 chains in rows, each seen once."""
    matrix, mean = torch.tensor([[4.0, 1.0], [1.0, 1.0]], dtype=torch.float64), torch.tensor([0.5, -1.0]).double()
    root, heat = Dense(torch.linalg.cholesky(torch.linalg.inv(matrix))), 0.1
    transform = whitened.build(
        Quadratic(matrix, mean), root, lambda joint: baoab.build(joint, 0.7, heat, 1.0), burn_in=30
    )
    torch.manual_seed(0)
    state = transform.init({THETA: torch.zeros(3000, 2, dtype=torch.float64) + mean})
    for _ in range(60):
        state, _ = transform.update(state, None, inplace=True)
    draws = state.params[THETA] - mean
    assert_mean(state.params[THETA], mean)
    assert_mean((draws.unsqueeze(2) * draws.unsqueeze(1)).flatten(1), (heat * torch.linalg.inv(matrix)).flatten())
    assert int(state.measured) == 30
    assert_mean(whitened.configuration(state), torch.tensor(heat).double())


def at(kind="dense", largest=1.0, regime="gaussian"):
    one = torch.ones(2)
    return Coordinates(one, Diagonal(one), kind, largest, 0.0, 1.0, regime, one, one, 0.0)


def test_one_epoch_is_one_unit_of_time_whatever_the_number_of_data():
    for per_epoch in (4.0, 20.0, 100.0):
        pace = momentum_pace(at(), per_epoch)
        assert pace.time == pytest.approx(1)
        assert pace.epochs == 100
        assert langevin_pace(at(), per_epoch).time == pytest.approx(min(0.5, 0.1 * per_epoch))
        thermostat = thermostat_pace(at(), per_epoch)
        assert thermostat.step * (2 * thermostat.friction + thermostat.time) < 0.1 + 1e-9
    assert momentum_pace(at("kron", 16.0), 2.0).step == pytest.approx(0.5 / 4)
    assert momentum_pace(at("kron"), 20.0).friction == 0.3
    assert momentum_pace(at(), 1.0).epochs == 200  # half a unit of time per epoch: twice as many
    assert [langevin_pace(at(), m).epochs for m in (1.0, 2.0, 20.0)] == [800, 400, 150]  # 800 steps at least
    assert [thermostat_pace(at(), m).epochs for m in (1.0, 2.0, 20.0)] == [800, 400, 200]
    assert momentum_pace(at(), 20.0, temperature=0.125).time == pytest.approx(0.5)


def test_a_thermostat_says_where_it_cools_directions_that_only_the_prior_determines():
    """Half of the directions without batch noise: 2α/(2α + h m/2) of their variance; with equal shares all of it."""
    pace = Pace(0.0125, 0.7, 200, 20.0)

    def coldest(data, scatter=None):
        curvature = torch.tensor(data) + 1
        root = Dense(torch.diag(curvature.rsqrt()))
        found = Coordinates(curvature, root, "dense", 1.0, 0.0, 1.0, "gaussian", curvature, torch.ones(2), 0.0)
        return langevin_checks.coldest(found, pace, torch.diag(torch.tensor(scatter or data)))

    assert coldest([1e9, 0.0]) == pytest.approx(1.4 / (1.4 + 0.25 / 2), rel=1e-4)
    assert coldest([3.0, 3.0]) == pytest.approx(1)
    assert coldest([3.0, 3.0], [3.0, 9.0]) == pytest.approx((1.4 + 0.25 * 0.75) / (1.4 + 0.25 * 1.5))
    weak, _, _ = regression(1000, 1e3)
    clear, _, _ = regression(1000, 3.0)
    assert "cold directions" in {doubt.check for doubt in fit(bf.Sgnht(epochs=40), weak).doubts}
    assert "cold directions" not in {doubt.check for doubt in fit(bf.Sgnht(epochs=40), clear).doubts}
    assert "cold directions" not in {doubt.check for doubt in fit(bf.Sghmc(epochs=40), weak).doubts}
    x = torch.randn(200, 3)  # a bias that the prior holds 5 below the targets: residuals of all examples are alike
    far = x, x.sum(1, keepdim=True) + 1000 + torch.randn(200, 1)
    told = bf.fit(nn.Linear(3, 1), far, likelihood=bf.Gaussian(1.0), method=bf.Sgnht(epochs=40), progress=False).doubts
    assert "cold directions" in {doubt.check for doubt in told}


def test_a_pace_is_translated_to_the_units_of_the_transforms():
    """log joint / N at temperature 1/N: lr = h √N and friction γ/√N with momenta, lr = h N without."""
    assert Pace(0.05, 1.0, 100, 20.0).units(1000) == pytest.approx((1.58, 0.0316), rel=1e-2)
    assert Pace(0.025, None, 100, 20.0).units(1000) == (25.0, None)


def test_batches_are_evened_so_that_a_small_last_one_does_not_heat_the_chain():
    """51 examples in batches of 50 would be 50 and 1: the spread was 3 to 4 times the posterior's."""
    assert bf.Training(batch_size=50).evened(51).batch_size == 26
    assert bf.Training(batch_size=50).evened(1001).batch_size == 48
    assert bf.Training(batch_size=50).evened(20).batch_size == 20
    g = torch.Generator().manual_seed(0)
    x = torch.randn(51, 3, generator=g)
    y = x.sum(1, keepdim=True) + 0.5 * torch.randn(51, 1, generator=g)
    model = torch.nn.Linear(3, 1, bias=False)
    posterior = bf.fit(model, (x, y), likelihood=bf.Gaussian(0.5), method=bf.Sghmc())
    covariance = torch.linalg.inv(x.mT @ x / 0.25 + torch.eye(3))
    ratio = posterior.theta.std(0) / covariance.diagonal().sqrt()
    assert ((ratio > 0.7) & (ratio < 1.4)).all(), ratio
    assert posterior.doubts == ()
