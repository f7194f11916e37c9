"""Chains where the posterior is a network's: anchored starts, the plan of their epochs, and what they say."""

import math
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call

import bayesformer as bf
from bayesformer.core.seeds import generator
from bayesformer.laws import Dense, GaussianLaw
from bayesformer.likelihoods import Gaussian
from bayesformer.methods import Problem, network_chains
from bayesformer.methods.chain_run import ChainRun
from bayesformer.methods.network_chains import LOST, plan_of, why_not
from bayesformer.model.space import Space
from bayesformer.priors.prior import as_prior
from bayesformer.reference.digits_patches import DigitsPatches
from bayesformer.train.anchored import AnchoredPrior, anchored_optima, anchored_rate, prior_draw, prior_scale
from bayesformer.train.network_plan import forecast, optimum_share, plan, step_cost
from bayesformer.train.prototype import Prototype
from bayesformer.train.training import Training
from bayesformer.train.vector_prior import FlatPrior, GaussianPrior, NamedPrior
from tests.laws import assert_mean
from tests.nets import Mlp, Normed, blobs, shell_of

N, ROOT = 40, Path(__file__).parent.parent


def waves(count=N):
    g = torch.Generator().manual_seed(0)
    x = torch.rand(count, 1, generator=g) * 4 - 2
    return x, torch.sin(2 * x) + 0.1 * torch.randn(count, 1, generator=g)


def small():
    return nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))


def fitted(method, model=small, data=None, likelihood=None, epochs=10, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bf.FidelityWarning)
        return bf.fit(
            model,
            data or waves(),
            likelihood=likelihood or Gaussian(0.5),
            method=method,
            training=Training(epochs=epochs),
            progress=False,
            **more,
        )


# The plan


def test_few_epochs_make_few_chains_and_a_number_given_wins():
    assert [plan(1000, epochs, 100, fresh=True).chains for epochs in (100, 200, 400, 5000)] == [1, 2, 4, 4]
    assert plan(1000, 100, 100, fresh=True, chains=3).chains == 3


@pytest.mark.parametrize("num_data", [100, 1000, 5000])
def test_a_plan_spends_what_it_is_given(num_data):
    found = plan(num_data, 500, 100, fresh=True)
    assert found.chains * found.optimum == pytest.approx(250, abs=2)
    assert found.sampling == pytest.approx(250, rel=0.05)
    root = max(10, math.sqrt(num_data))
    assert (found.batch, found.longest) == (round(root), root)
    assert found.cost == pytest.approx((2 + 4 / 3) / root + (found.rows + 3 * found.batch) / (10 * num_data), rel=0.02)


def test_chains_from_a_mode_spend_nothing_on_optima_and_small_data_take_all_of_them():
    found = plan(12, 100, 100, fresh=False)
    assert (found.optimum, found.longest, found.rows) == (0, 1.0, 12)
    assert step_cost(12, 10, 1.0, 12) > 1


def test_the_optima_get_less_of_a_longer_run():
    assert [optimum_share(times) for times in (0.5, 5, 20, 100)] == pytest.approx([0.5, 0.5, 0.2, 0.2])
    assert 0.2 < optimum_share(10) < 0.5


def test_the_forecast_counts_time_in_the_metric_of_the_prior():
    found = plan(1000, 500, 100, fresh=True)
    assert found.worth(2e5) == pytest.approx(found.chains * found.steps / math.sqrt(6e5) / 3)
    assert found.worth(2e5) == pytest.approx(250 / (9 * math.sqrt(6e5 / 1000)), rel=0.25)  # 9 √(λ/N) epochs per draw
    assert "with 500 epochs the chains are worth about" in forecast(found, 2e5)
    longer = plan(1000, found.needed(2e5), 100, fresh=True)
    assert longer.worth(2e5) == pytest.approx(20, rel=0.3)


# Anchored starts


def test_an_anchored_prior_has_the_gradient_of_its_logarithm():
    prior = AnchoredPrior(torch.randn(5).double(), torch.rand(5).double())
    theta = torch.randn(5).double().requires_grad_()
    slope = torch.autograd.grad(prior.log_prob(theta), theta)[0]
    grad = torch.empty(5).double()
    value = prior.write(theta.detach(), grad, 0.25)
    torch.testing.assert_close(grad, 0.25 * slope)
    torch.testing.assert_close(value, 0.25 * prior.log_prob(theta.detach()))
    torch.testing.assert_close(prior.precision_times(theta, torch.ones(5).double()), prior.precision(theta))


def test_scales_and_draws_are_those_of_the_laws_and_flat_weights_stay():
    shell = shell_of(Mlp(hidden=400))
    law = {"net.0.weight": "normal(1, 0.5)", "net.0.bias": "laplace(0, 2)", "*": None}
    prior, slices = NamedPrior(as_prior(law), shell.space), shell.space.slices
    scale = prior_scale(prior, shell.theta)
    flat = shell.theta[slices["net.3.weight"].start :]
    assert set(scale[slices["net.0.weight"]].tolist()) == {0.5}
    assert set(scale[slices["net.0.bias"]].tolist()) == {2.0}
    torch.testing.assert_close(scale[-1], flat.square().mean().sqrt())
    drawn = prior_draw(prior, shell.theta, generator(0, "draw"))
    assert_mean(drawn[slices["net.0.weight"]], 1.0)
    assert_mean((drawn[slices["net.0.weight"]] - 1).square(), 0.25)
    assert torch.equal(drawn[slices["net.3.weight"].start :], flat)


def test_an_earlier_posterior_is_drawn_from_as_a_prior():
    root = torch.tensor([[2.0, 0.0], [1.0, 0.5]]).double()
    prior = GaussianPrior(GaussianLaw(torch.tensor([1.0, -1.0]).double(), (slice(0, 2),), (Dense(root),), {}))
    theta = torch.zeros(2).double()
    torch.testing.assert_close(prior_scale(prior, theta), (root @ root.mT).diagonal().sqrt())
    drawn = torch.stack([prior_draw(prior, theta, generator(i, "draw")) for i in range(2000)])
    assert_mean(drawn, prior.law.mean)
    away = drawn - prior.law.mean
    assert_mean(away[:, :, None] * away[:, None, :], root @ root.mT)
    assert torch.equal(prior_scale(FlatPrior(), theta), torch.ones(2).double())


def test_anchored_optima_of_linear_regression_are_spread_as_theory_says():
    """θ = H⁻¹(Π θ_a + Xᵀy/σ²): mean of the posterior, covariance H⁻¹ Π H⁻¹."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(40, 2, generator=g) * torch.tensor([1.0, 0.1])
    y = x @ torch.tensor([[1.0], [-1.0]]) + torch.randn(40, 1, generator=g)
    model = nn.Linear(2, 1, bias=False)
    problem = Problem(model, Gaussian(1.0), (x, y), training=Training(buffers="moving"))
    prototype = Prototype(problem)
    prior = NamedPrior(as_prior("normal(0, 1)"), prototype.space)
    count = 6
    starts = [prototype.start(chain) for chain in range(count)]
    found = anchored_optima(prototype, "anchored", prior, starts, 150).theta.double()
    anchors = torch.stack([prior_draw(prior, s.theta, generator(0, "anchor", i)) for i, s in enumerate(starts)])
    inverse = torch.linalg.inv((x.mT @ x + torch.eye(2)).double())
    expected = (anchors.double() + (x.mT @ y)[:, 0].double()) @ inverse
    torch.testing.assert_close(found, expected, atol=0.005, rtol=0)
    assert found.std(0)[1] > 0.4  # the data hardly see this weight: it is spread as its anchors are


def test_the_rate_of_adam_follows_the_layers_and_the_prior():
    one = torch.ones(5)
    assert anchored_rate(small(), one) == 0.1
    assert anchored_rate(Normed(), one) == 0.03
    assert anchored_rate(nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)]), one) == 0.03
    assert anchored_rate(small(), 0.1 * one) == pytest.approx(0.012)


# The methods


@pytest.mark.parametrize("method", [bf.Sghmc(epochs=90), bf.Baoab(epochs=90)])
def test_both_samplers_take_the_recipe_and_say_what_they_measured(method):
    posterior = fitted(method)
    facts = posterior.facts["network"]
    assert posterior.facts["chains"] == 1
    assert posterior.facts["starts"] == "anchored optima, one per chain"
    assert posterior.facts["init"] == "built"
    assert facts["sampling_epochs"] + facts["optimum_epochs"] == pytest.approx(90, rel=0.4)
    assert 0.3 < facts["temperature"] < 3
    assert facts["worth_inside"] > 0
    assert {"forecast", "period", "largest", "worth_outside", "stiff_temperature"} <= set(facts)


def test_a_chain_that_is_too_short_says_so():
    posterior = fitted(bf.Sghmc(epochs=4), likelihood=Gaussian(0.05))
    assert posterior.doubts[0].check == "length"
    assert "Too short to sample this posterior: 4 epochs are worth about 0.0" in posterior.doubts[0].sentence


def test_sghmc_and_baoab_are_one_sampler_there():
    assert torch.equal(fitted(bf.Sghmc(), epochs=4).theta, fitted(bf.Baoab(), epochs=4).theta)


def test_a_pilot_decides_whether_every_step_takes_all_data_and_leaves_the_chain_as_it_is(monkeypatch):
    method, data = bf.Sghmc(), waves(400)
    calm = fitted(method, data=data, epochs=20)
    assert 0.5 < calm.facts["network"]["pilot_temperature"] < 2
    assert calm.facts["network"]["period"] > 1
    monkeypatch.setattr(network_chains, "FEWEST_STEPS", 10**6)
    without = fitted(method, data=data, epochs=20)
    assert without.facts["network"]["pilot_temperature"] is None
    assert torch.equal(without.theta, calm.theta)
    monkeypatch.setattr(network_chains, "FEWEST_STEPS", 20)
    monkeypatch.setattr(network_chains, "BOILING", 0.0)
    whole = fitted(method, data=data, epochs=20).facts["network"]
    assert whole["period"] == 1
    assert whole["sampling_epochs"] + whole["optimum_epochs"] == pytest.approx(100, rel=0.1)


def test_heat_along_stiff_directions_is_said_though_all_weights_together_are_not_hot():
    found = network_chains._of_temperature({"temperature": 1.05, "stiff_temperature": 8.0}, 10**5)
    assert [(doubt.check, doubt.value) for doubt in found] == [("temperature", 8.0)]
    assert "along stiff directions 8.00" in found[0].sentence
    assert network_chains._of_temperature({"temperature": 1.05, "stiff_temperature": 1.2}, 10**5) == []


def test_draws_that_lose_what_was_learned_are_doubted(monkeypatch):
    """Draws of a short anchored chain lose little; moved away by 3 in every weight they lose nearly all."""
    posterior = fitted(bf.Sghmc(), epochs=20)
    assert posterior.facts["network"]["loss"] < 1
    assert "draws" not in {doubt.check for doubt in posterior.doubts}
    run = network_chains.fit_stage

    def moved(*args):
        found = run(*args)
        return found if found.draws is None else replace(found, draws=found.draws + 3)

    monkeypatch.setattr(network_chains, "fit_stage", moved)
    lost = fitted(bf.Sghmc(), epochs=20)
    assert lost.facts["network"]["loss"] > 2
    assert "lost what the network had learned" in next(d.sentence for d in lost.doubts if d.check == "draws")


def test_given_weights_start_at_their_mode_and_equal_seeds_give_equal_chains():
    torch.manual_seed(0)
    model = small()
    first, again = (fitted(bf.Sghmc(epochs=20, chains=2, draws=5), model) for _ in range(2))
    assert torch.equal(first.theta, again.theta)
    assert first.theta.shape[0] == 10
    assert "chains of one start cannot see other modes" in first.facts["starts"]
    assert first.facts["network"]["optimum_epochs"] == 0
    assert not torch.equal(first.theta[0], first.theta[5])


def test_chains_do_not_run_in_lockstep():
    with pytest.raises(ValueError, match="'batched' is not possible here: every chain has an anchor of its own"):
        fitted(bf.Baoab(epochs=12, chains=2, draws=2), strategy="batched")


def test_dropout_is_off_and_running_averages_are_held():
    noisy = fitted(bf.Sghmc(epochs=12, draws=4), lambda: Mlp(dropout=0.5), blobs(), "categorical", epochs=2)
    assert noisy.facts["network"]["temperature"] < 3
    normed = fitted(bf.Sghmc(epochs=12, draws=4), Normed, blobs(), "categorical", epochs=2)
    averages = normed.law.buffers["norm.running_mean"]
    assert len(averages.unique(dim=0)) == 1


def test_augmented_data_are_said_not_to_be_those_of_one_posterior():
    class Jittered(torch.utils.data.Dataset):
        def __len__(self):
            return N

        def __getitem__(self, index):
            x, y = waves()
            return x[index] + 0.01 * torch.randn(1), y[index]

    posterior = fitted(bf.Sghmc(epochs=6, draws=2), data=Jittered(), epochs=2)
    assert "random data" in {doubt.check for doubt in posterior.doubts}


def test_where_the_recipe_is_not_possible_the_reason_is_known():
    def run(method, model=small):
        problem = Problem(model, Gaussian(0.1), waves(), training=Training(epochs=2))
        return ChainRun(method, Prototype(problem))

    assert why_not(run(bf.Sghmc())) is None
    assert why_not(run(bf.Sghmc(temperature=0.0))) == "at temperature 0 there is nothing to sample"
    assert why_not(run(bf.Sghmc(cycles=2))) == "its step size follows the curvature, not a schedule"
    assert why_not(run(bf.Sghmc(warm_up=0.5))) == "a warm_up was given"


def test_the_budget_is_five_times_the_training_for_fresh_weights_and_once_for_given_ones():
    def planned(model, **settings):
        problem = Problem(model, Gaussian(0.1), waves(1000), training=Training())
        return plan_of(ChainRun(bf.Sghmc(**settings), Prototype(problem)))

    assert planned(small).epochs == 500
    assert planned(small()).epochs == 100
    assert planned(small, epochs=77).epochs == 77
    assert planned(small, draws=900, epochs=1).steps >= 900 / 0.8


def test_a_cold_posterior_is_narrower():
    spread = [fitted(bf.Sghmc(epochs=400, chains=1, temperature=t)).theta.std(0).mean() for t in (1.0, 1e-3)]
    assert spread[1] < 0.1 * spread[0]


@pytest.mark.parametrize("init", ["given", "fresh"])
def test_chains_of_adapters_begin_at_the_base(init, monkeypatch):
    """B = 0 and A as PEFT draws it, anew for every chain, and there is the anchor; that of others is the prior's.

    The search for all weights begins where the model was built.
    """
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    seen = []

    class Seen(Exception):
        pass

    def stop(stage, count):
        seen.append(stage)
        raise Seen

    def build():
        layers = nn.Sequential(nn.Linear(1, 600), nn.Tanh(), nn.Linear(600, 1))
        return get_peft_model(layers, LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"]))

    model = build if init == "given" else build()
    monkeypatch.setattr("bayesformer.train.anchored.fit_stage", stop)
    with pytest.raises(Seen):
        fitted(bf.Sghmc(chains=2), model, init=init)
    (stage,) = seen
    starts = [stage.prototype.space.views(start.theta) for start in stage.starts]
    a, b, head = (next(n for n in starts[0] if part in n) for part in ("lora_A", "lora_B", "2.modules_to_save"))
    for chain, start in enumerate(starts):
        assert bool((start[b] == 0).all())
        assert float(start[a].abs().max()) <= 1  # U(-1, 1), as PEFT draws it for one input
        assert float(start[head].abs().max()) < 0.1  # U(±600^-½), as torch builds it
        anchor = stage.prototype.space.views(stage.priors[chain].anchor)
        assert float(anchor[head].abs().max()) > 1.5  # N(0, 1)
        torch.testing.assert_close(anchor[a], start[a])
        torch.testing.assert_close(anchor[b], start[b])
    assert not torch.equal(starts[0][a], starts[1][a])


def test_draws_of_hmc_lose_less_than_is_doubted():
    """On the 50 digits of the reference, over half the number of targets; optima lose next to nothing."""
    problem = DigitsPatches()
    train, model = problem.data().train, problem.model().eval()
    space = Space.of(model)
    draws = load_file(ROOT / "references" / "digits-vit.safetensors")["witness.theta"]
    for theta in draws:
        outputs = functional_call(model, dict(space.views(theta)), (train.inputs,))
        loss = 2 * nn.functional.cross_entropy(outputs, train.targets, reduction="mean")
        assert 0.5 < float(loss) < LOST
