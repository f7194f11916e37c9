"""Hmc and Nuts through bf.fit: exact posteriors, what they say of themselves, and what they refuse."""

import logging
import math

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.data import as_batches
from bayesformer.data.all_data import WholeData
from bayesformer.inference.diagnostics import (
    chain_words,
    effective_sample_size,
    energy_information,
    tail_effective_sample_size,
)
from bayesformer.likelihoods import as_likelihood
from bayesformer.methods import Problem
from bayesformer.methods.chain_checks import ChainRecord, examine
from bayesformer.train.objective import Objective
from tests.nets import Mlp, blobs

SHORT = {"chains": 2, "warm_up": 30, "draws": 8, "thin": 1}
ONE = {"chains": 1, "warm_up": 30, "draws": 5, "thin": 1}
quick = bf.Training(epochs=2, batch_size=16)
ignored = pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")


def regression(weights=4, data=40, condition=100.0):
    """Inputs, targets, and mean and covariance of the exact posterior with unit prior and noise ½."""
    source = torch.Generator("cpu").manual_seed(2)
    scale = torch.logspace(0, -0.5 * math.log10(condition), weights, dtype=torch.float64)
    turned, _ = torch.linalg.qr(torch.randn(weights, weights, dtype=torch.float64, generator=source))
    x = torch.randn(data, weights, dtype=torch.float64, generator=source) @ (turned * scale) @ turned.mT
    y = x @ torch.randn(weights, dtype=torch.float64, generator=source)
    y = y + 0.5 * torch.randn(data, dtype=torch.float64, generator=source)
    covariance = torch.linalg.inv(x.mT @ x / 0.25 + torch.eye(weights, dtype=torch.float64))
    return x.float(), y.float()[:, None], covariance @ x.mT @ y / 0.25, covariance


def assert_moments(theta, chains, mean, covariance):
    """Means and variances of all weights within 5 standard errors, from the effective sample sizes."""
    draws = theta.double().unflatten(0, (chains, -1))
    for values, expected in ((draws, mean), ((draws - mean).square(), covariance.diagonal())):
        error = (values.flatten(0, 1).var(0) / effective_sample_size(values, rank_normalised=False)).sqrt()
        z = (values.mean((0, 1)) - expected) / error
        assert z.abs().max() < 5, z


@pytest.mark.parametrize("method", [bf.Nuts, bf.Hmc])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_linear_regression_has_its_exact_posterior(method, precision):
    x, y, mean, covariance = regression()
    chosen = method(chains=2, warm_up=150, draws=250, thin=1, precision=precision)
    posterior = bf.fit(
        nn.Linear(4, 1, bias=False), (x, y), likelihood=bf.Gaussian(0.5), method=chosen, training=bf.Training(epochs=20)
    )  # a doubt would be an error here
    assert_moments(posterior.theta, 2, mean, covariance)
    found = posterior.facts["diagnostics"]
    assert posterior.theta.dtype == torch.float32
    assert posterior.facts["metric"] == "dense"
    assert found["divergences"] == 0
    assert found["rhat_outputs"] < 1.05
    assert min(found["ess_bulk_outputs"], found["ess_tail_outputs"]) > 70
    assert min(found["energy_information"]) > 0.5
    assert found["leapfrogs"] > 2 * 400
    said = repr(posterior)
    worst = max(found["rhat_outputs"], found["rhat_log_joint"])
    bulk, tail = (min(found[f"ess_{kind}_{of}"] for of in ("log_joint", "outputs")) for kind in ("bulk", "tail"))
    energy = min(found["energy_information"])
    assert f"R-hat {worst:.3f}, ESS {bulk:.0f} bulk, {tail:.0f} tail, 0 divergences, E-BFMI {energy:.2f}" in said


class Killed(Exception):
    """In the place of a process that is killed."""


def kill(method, model, data, likelihood, folder, transition):
    """A fit that ends before this transition of its first chain, with a checkpoint after every one."""

    class Kill:
        def update(self, task, done, total, note=""):
            if total == method.transitions and done == transition:
                raise Killed

    problem = Problem(
        model,
        as_likelihood(likelihood),
        as_batches(data, "data"),
        training=quick,
        checkpoint=folder,
        checkpoint_seconds=0.0,
        reporter=Kill(),
    )
    with pytest.raises(Killed):
        method.fit(problem)


@ignored
@pytest.mark.parametrize("method", [bf.Nuts(**ONE, max_depth=4), bf.Hmc(**ONE, max_leapfrogs=10)], ids=["nuts", "hmc"])
def test_a_chain_resumed_at_any_transition_is_the_same_chain(method, tmp_path):
    # Enough weights for a product with a matrix in columns to be rounded otherwise than with one in rows.
    data = blobs(60)
    model, options = Mlp(hidden=12), {"method": method, "likelihood": "categorical", "training": quick}
    whole = bf.fit(model, data, **options)
    assert whole.facts["metric"] == "dense"
    for transition in (3, 15, 28, 31, 33):  # first stage, a window, the last stage, draws
        folder = tmp_path / str(transition)
        kill(method, model, data, "categorical", folder, transition)
        assert torch.equal(bf.fit(model, data, checkpoint=folder, **options).theta, whole.theta), transition


@ignored
@pytest.mark.parametrize("workers", [None, 2])
def test_chains_resume_where_they_were_killed_and_in_processes_are_the_same(workers, tmp_path):
    x, y, *_ = regression()
    model, method = nn.Linear(4, 1), bf.Nuts(**SHORT)
    options = {"likelihood": bf.Gaussian(0.5), "training": quick}
    whole = bf.fit(model, (x, y), method=method, **options)
    if workers:
        assert torch.equal(bf.fit(model, (x, y), method=method, workers=2, **options).theta, whole.theta)
        return

    kill(method, model, (x, y), bf.Gaussian(0.5), tmp_path, 37)
    again = bf.fit(model, (x, y), method=method, checkpoint=tmp_path, **options)
    assert torch.equal(again.theta, whole.theta)
    assert again.facts["diagnostics"] == whole.facts["diagnostics"]


@ignored
def test_chunks_and_forms_of_data_do_not_change_the_law():
    x, y, *_ = regression()
    model, options = nn.Linear(4, 1), {"likelihood": bf.Gaussian(0.5), "training": quick}
    thetas = []
    for data, chunk in (((x, y), "auto"), ((x, y), 7), (list(zip(x, y, strict=True)), 7)):
        method = bf.Nuts(**SHORT, chunk=chunk, start="given", precision="float64")
        thetas.append(bf.fit(model, data, method=method, **options).theta)
    torch.testing.assert_close(thetas[1], thetas[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(thetas[2], thetas[1], rtol=1e-4, atol=1e-4)


def test_whole_data_is_one_evaluation_of_all_examples():
    data = as_batches(blobs(30), "data")
    from bayesformer.model.skeleton import Skeleton
    from bayesformer.model.space import Space

    model = Mlp()
    objective = Objective(Skeleton(model, Space.of(model)).shell(), as_likelihood("categorical"), 30)
    params = {"theta": objective.shell.theta.clone()}
    value, _, grads = objective.value_and_grad(params, next(iter(data.in_order(30))))
    gradient = grads["theta"].clone()
    whole = WholeData(data, 7)
    for _ in range(2):
        again, _, grads = objective.value_and_grad(params, whole)
        torch.testing.assert_close(again, value)
        torch.testing.assert_close(grads["theta"], gradient)


@ignored
def test_a_subset_is_sampled_and_the_others_stay():
    posterior = bf.fit(
        Mlp(),
        blobs(40),
        likelihood="categorical",
        method=bf.Hmc(**SHORT, subset="net.3.*", max_leapfrogs=10),
        training=quick,
    )
    spread = posterior.space.views(posterior.theta.unflatten(0, (2, 8)).std(1).amax(0))  # a short chain may stand still
    assert all(bool((s > 0).all()) == name.startswith("net.3") for name, s in spread.items())


# --- what is said -----------------------------------------------------------------------------------------------------


@ignored
def test_dropout_is_switched_off_and_said_once(caplog):
    with caplog.at_level(logging.WARNING, "bayesformer"):
        bf.fit(Mlp(dropout=0.5), blobs(40), likelihood="categorical", method=bf.Nuts(**SHORT), training=quick)
    said = [r.message for r in caplog.records if "dropout is switched off" in r.message]
    assert len(said) == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING, "bayesformer"):
        bf.fit(Mlp(), blobs(40), likelihood="categorical", method=bf.Nuts(**SHORT), training=quick)
    assert not [r for r in caplog.records if "dropout" in r.message]


@ignored
def test_a_dense_metric_that_does_not_fit_is_said_and_not_used(caplog, monkeypatch):
    monkeypatch.setattr("bayesformer.methods.hamiltonian_chains._physical_memory", lambda: 1000)
    with caplog.at_level(logging.WARNING, "bayesformer"):
        posterior = bf.fit(
            Mlp(), blobs(40), likelihood="categorical", method=bf.Nuts(**SHORT, metric="dense"), training=quick
        )
    assert posterior.facts["metric"] == "diagonal"
    assert "a dense metric of 50 weights takes 0.0 GiB" in caplog.text
    assert "a diagonal is used" in caplog.text


def test_what_a_dense_metric_takes_is_said_before_work_begins(caplog, monkeypatch):
    monkeypatch.setattr("bayesformer.methods.hamiltonian_chains._physical_memory", lambda: 2**30)
    wide = nn.Sequential(nn.Linear(3, 2000), nn.Tanh(), nn.Linear(2000, 2))
    problem = Problem(wide, as_likelihood("categorical"), as_batches(blobs(40), "data"), reporter=Alarm())
    with caplog.at_level(logging.WARNING, "bayesformer"), pytest.raises(AssertionError, match="work began"):
        bf.Hmc(metric="dense", precision="float64").fit(problem)
    assert "hmc: a dense metric of 12002 weights takes 4.3 GiB, more than a quarter of 1.0 GiB" in caplog.text
    assert "a diagonal is used" in caplog.text


def record(chains=4, draws=500, **changes):
    source = torch.Generator("cpu").manual_seed(0)
    noise = torch.randn(3, chains, draws, dtype=torch.float64, generator=source)
    zero = torch.zeros(chains, draws, dtype=torch.float64)
    columns = {"log_joint": noise[0], "acceptance": zero + 0.8, "leapfrogs": zero + 7, "divergent": zero}
    columns |= {"energy": noise[1], "cut": zero, "all_leapfrogs": 7, "step_sizes": [0.1] * chains}
    return ChainRecord(**(columns | changes))


def slow(draws, rate):
    """A walk x ← rate · x + √(1 - rate²) z along the draws (C, S, ...)."""
    found = draws.clone()
    for t in range(1, draws.shape[1]):
        found[:, t] = rate * found[:, t - 1] + math.sqrt(1 - rate**2) * draws[:, t]
    return found


def test_good_chains_give_no_doubts_and_bad_ones_the_right_one():
    source = torch.Generator("cpu").manual_seed(1)
    outputs = torch.randn(4, 500, 100, generator=source)
    found, doubts = examine(record(), outputs)
    assert not doubts
    assert found["rhat_outputs"] < 1.02
    once = torch.zeros(4, 500, dtype=torch.float64)
    once[0, 3] = 1
    apart = outputs + torch.arange(4.0)[:, None, None] * 0.2
    cases = {
        "divergences": (record(divergent=once), outputs),
        "trajectory length": (record(cut=1 - once), outputs),
        "energy": (record(energy=slow(record().energy, 0.95)), outputs),
        "chain length": (record(), slow(outputs, 0.95)),
        "chains disagree": (record(), apart),
    }
    for name, (made, traces) in cases.items():
        _, doubts = examine(made, traces)
        assert [doubt.check for doubt in doubts] == [name]
        assert doubts[0].value != doubts[0].threshold


def test_doubts_become_warnings_of_the_fit():
    with pytest.warns(bf.FidelityWarning) as caught:
        posterior = bf.fit(
            Mlp(), blobs(40), likelihood="categorical", method=bf.Nuts(**SHORT, max_depth=2), training=quick
        )
    assert [str(warning.message) for warning in caught] == [doubt.sentence for doubt in posterior.doubts]
    assert "trajectory length" in {doubt.check for doubt in posterior.doubts}
    assert {"chain length", "chains disagree"} & {doubt.check for doubt in posterior.doubts}


def test_tail_size_and_energy_information_of_known_chains():
    draws = torch.randn(4, 1000, 50, generator=torch.Generator("cpu").manual_seed(0))
    tail = tail_effective_sample_size(draws)
    assert tail.shape == (50,)
    assert tail.median().item() == pytest.approx(4000, rel=0.1)
    assert tail_effective_sample_size(slow(draws, 0.9)).median() < 1200
    # E (x_t - x_{t-1})² = 2 (1 - ρ) var x: 2 for independent energies.
    assert energy_information(draws[..., 0]).mean().item() == pytest.approx(2, rel=0.1)
    assert energy_information(slow(draws, 0.9)[..., 0]).mean().item() == pytest.approx(0.2, rel=0.3)


# --- what is refused, before work begins ------------------------------------------------------------------------------


class Alarm:
    def update(self, task, done, total, note=""):
        raise AssertionError("work began")


def refused(model, data, method, match, **options):
    problem = Problem(model, as_likelihood("categorical"), as_batches(data, "data"), reporter=Alarm(), **options)
    with pytest.raises(ValueError, match=match):
        method.fit(problem)


def test_refusals_come_before_work():
    x, y = blobs(40).inputs, blobs(40).targets
    refused(Mlp(), (x, y), bf.Nuts(batch_size=16), "nuts.batch_size must be left out: with gradients of 16 of 40")
    norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    refused(norm, (x, y), bf.Hmc(), "change buffers .*Hold them with Training\\(buffers='fixed'\\)")
    refused(Mlp(), bf.Stream(iter(zip(x, y, strict=True)), num_data=40), bf.Nuts(), "it can be read once only")
    refused(bf.convert(Mlp()), (x, y), bf.Nuts(), "stochastic attention or random layers")
    with pytest.raises(ValueError, match=r"nuts.target must be strictly between 0 and 1; got 2"):
        bf.Nuts(target=2)
    with pytest.raises(ValueError, match=r"hmc.metric must be one of 'auto', 'diagonal', 'dense'; got 'round'"):
        bf.Hmc(metric="round")


@ignored
def test_fixed_buffers_and_full_batch_sizes_are_taken():
    x, y = blobs(40).inputs, blobs(40).targets
    norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    training = bf.Training(epochs=1, batch_size=16, buffers="fixed")
    method = bf.Nuts(**SHORT, batch_size=40, max_depth=3)
    posterior = bf.fit(norm, (x, y), likelihood="categorical", method=method, training=training)
    assert torch.equal(norm[1].running_mean, torch.zeros(4))
    assert posterior.draws == 16


def test_chains_too_short_to_tell_say_what_they_can():
    assert chain_words({"divergences": 2}) == "2 divergences"
    still = {"divergences": 0, "rhat_outputs": math.nan, "ess_bulk_outputs": math.nan, "ess_tail_outputs": math.nan}
    assert chain_words(still) == "0 divergences"
