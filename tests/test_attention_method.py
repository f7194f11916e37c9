"""Stochastic attention as a method: conversion, the bound, annealing, resuming, saving, and never above the oracle."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer import evaluate
from bayesformer.attention import FAMILIES, MultiHeadAttention, Softmax, Weibull, build_family, families, install
from bayesformer.bench.tasks import TASKS
from bayesformer.core.errors import OracleBeatenError
from bayesformer.core.types import Batch
from bayesformer.core.vectors import THETA
from bayesformer.methods import METHODS, Problem, build_method, wrap
from bayesformer.methods.stochastic_attention import STEPS, Cost
from bayesformer.models.transformer import Encoder, Regressor
from bayesformer.network import FlatLogJoint, FlatModel, reinitialise
from bayesformer.train.loop import Training
from tests.test_attention_contract import Leaky


def regressor(**options):
    return Regressor(Encoder(dim=8, heads=2, causal=True, **options))


def small_task():
    return replace(TASKS["toy/m1"](), train=200, validation=20, test=400, dim=16)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_keeps_the_weights_and_mean_attention(family):
    model, x = regressor(), torch.randn(3, 5, 1)
    converted = install(copy.deepcopy(model), family)
    assert [type(f).__name__.lower() for f in families(converted)] == [family]
    assert torch.equal(converted.eval()(x), model.eval()(x))
    assert not torch.equal(converted.train()(x), model.train()(x))
    assert isinstance(model.encoder.blocks[0].attention.family, Softmax)  # the model given is not changed
    reinitialise(converted)


def test_conversion_by_name_and_with_a_function_of_heads_and_width():
    model = Regressor(Encoder(dim=8, depth=2, heads=2))
    seen = []
    converted = install(
        copy.deepcopy(model), lambda heads, width: (seen.append((heads, width)), Weibull())[1], "encoder.blocks.1.*"
    )
    assert seen == [(2, 4)]
    assert len(families(converted)) == 1
    with pytest.raises(ValueError, match="Attention of bayesformer; Linear has none"):
        install(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="attention module in names"):
        install(model, names="decoder.*")


def test_a_layer_that_is_called_twice_owes_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = MultiHeadAttention(4, 2, Softmax())

        def forward(self, x):
            mask = torch.ones(1, 1, 1, x.shape[1], dtype=torch.bool)
            once, self.first = self.attention(x, mask)
            twice, self.second = self.attention(once, mask)
            return twice

    model = install(Twice(), "weibull")
    for _ in range(2):  # and a new pass starts anew
        model(torch.randn(3, 5, 4))
        torch.testing.assert_close(bf.kl_divergence(model), model.first + model.second)


def test_the_bound_is_the_mean_over_examples_whatever_n():
    """value = mean_b [log p(y_b) - KL_b]: latent variables belong to examples, so nothing is divided by N."""
    method = bf.Attention(annealing="none", temperature=1.0)
    flat = FlatModel(method.wrap(regressor()).train())
    batch = Batch(torch.randn(4, 6, 1), torch.randn(4, 6, 1))
    likelihood = bf.Gaussian()
    for num_data in (4, 1000):
        joint = FlatLogJoint(flat, likelihood, None, num_data, Cost(num_data, 1.0, "none", 1.0))
        torch.manual_seed(0)
        value, outputs, grads = joint.value_and_grad({THETA: flat.theta}, batch)
        torch.manual_seed(0)
        outputs, kl = flat.module.outputs_and_kl(batch.inputs)
        expected = (likelihood.log_prob(outputs, batch.targets, None) - kl).mean()
        torch.testing.assert_close(value, expected)
        exact = torch.autograd.grad(expected, [p for p in flat.module.parameters() if p.requires_grad])
        torch.testing.assert_close(grads[THETA], torch.cat([g.flatten() for g in exact]), atol=1e-5, rtol=1e-4)


def test_annealing_follows_the_paper():
    t = torch.arange(5.0)
    torch.testing.assert_close(Cost(1, 0.5, "sigmoid", 0.2).weight(t), 0.5 * torch.sigmoid(0.2 * t))
    torch.testing.assert_close(Cost(1, 2.0, "linear", 0.4).weight(t), torch.tensor([0.0, 0.8, 1.6, 2.0, 2.0]))
    torch.testing.assert_close(Cost(1, 0.7, "none", 0.4).weight(t), torch.full((5,), 0.7))
    model = bf.Attention().wrap(regressor()).train()
    for _ in range(3):
        model(torch.randn(2, 4, 1))
        Cost(1, 1.0, "sigmoid", 0.1)(model)
    assert model.get_buffer(STEPS) == 3


def fit(method, folder=None, epochs=3, **options):
    task = small_task()
    data = task.load()
    training = Training(epochs=epochs, batch_size=50, lr=1e-2, schedule="cosine", warmup=10, patience=0)
    problem = Problem(task.model, task.likelihood, data.train, data.validation, training, checkpoint=folder, **options)
    return method.fit(problem), data, task


def test_a_resumed_fit_anneals_on_where_it_was(tmp_path, monkeypatch):
    method = bf.Attention(rho=0.1)
    whole, _, _ = fit(method)
    original = Cost.__call__
    calls = []

    def killed(self, model):
        calls.append(1)
        if len(calls) > 6:  # in the second epoch of four steps
            raise KeyboardInterrupt
        return original(self, model)

    monkeypatch.setattr(Cost, "__call__", killed)
    with pytest.raises(KeyboardInterrupt):
        fit(method, tmp_path, checkpoint_seconds=0.0)
    monkeypatch.setattr(Cost, "__call__", original)
    resumed, _, _ = fit(method, tmp_path, checkpoint_seconds=0.0)
    assert torch.equal(resumed.theta, whole.theta)
    assert resumed.weights.buffers[STEPS].item() == 12


def test_predictions_are_draws_and_survive_saving(tmp_path):
    posterior, data, task = fit(bf.Attention("lognormal", spread=0.5, draws=5))
    inputs = data.test.inputs[:4]
    prediction = posterior.predict(inputs)
    assert posterior.outputs(inputs).values.shape[0] == 5
    assert (prediction.epistemic > 0).any()
    posterior.save(tmp_path)
    method = build_method("attention", {k: v for k, v in posterior.facts["method"].items() if k != "name"})
    loaded = bf.Posterior.load(tmp_path, wrap(method, task.model()))
    assert torch.equal(loaded.outputs(inputs).values, posterior.outputs(inputs).values)
    mean = posterior.module()  # evaluation mode: softmax attention
    assert torch.equal(mean(inputs), mean(inputs))


VARIANTS = {
    "gaussian": {},
    "gaussian dd": {"data_dependent": True},
    "dirichlet": {},
    "dirichlet dd": {"data_dependent": True},
    "dirichlet thesis": {"spread": 9e-4, "prior_scale": 1.0, "divergence": "gamma"},
    "weibull": {},
    "weibull contextual": {"prior": "contextual"},
    "lognormal": {},
    "lognormal contextual": {"prior": "contextual"},
}


def gap(posterior, data, task):
    ours = evaluate.log_likelihood(posterior.predict(data.test.inputs, strategy="looped"), data.test.targets, None)
    return evaluate.oracle_gap(ours, task.process.log_likelihood(data.test))


@pytest.mark.parametrize("name", VARIANTS)
def test_no_family_beats_the_oracle(name):
    posterior, data, task = fit(bf.Attention(name.split()[0], **VARIANTS[name], draws=4), epochs=4)
    found = gap(posterior, data, task)
    evaluate.check_not_above(found, label=name)
    assert math.isfinite(found.mean)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "weibul"}, "weibull"),
        ({"family": "weibull", "data_dependent": True}, "data_dependent must be left out for weibull attention"),
        ({"family": "lognormal", "length": 4}, "length must be left out for lognormal attention"),
        ({"family": "gaussian", "prior": "contextual"}, "prior of gaussian attention"),
        ({"family": "dirichlet", "prior_location": 1.0}, "prior_location must be left out for dirichlet attention"),
        ({"prior": "contextual", "prior_location": 1.0}, "prior_location must be left out with a contextual prior"),
        ({"spread": -1.0}, "k must be positive and finite; got -1.0"),
        ({"rho": 0.0}, "attention.rho must be a number greater than 0; got 0.0"),
        ({"draws": -1}, "attention.draws must be a whole number of at least 0; got -1"),
        ({"annealing": "cosine"}, "attention.annealing must be one of 'none', 'linear', 'sigmoid'; got 'cosine'"),
    ],
)
def test_errors_name_argument_rule_and_value(settings, message):
    with pytest.raises(ValueError, match=message):
        bf.Attention(**settings)


def test_the_method_is_registered_and_every_family_has_a_builder():
    assert METHODS["attention"] is bf.Attention
    assert {type(build_family(name)).__name__.lower() for name in FAMILIES} == set(FAMILIES)
    with pytest.raises(ValueError, match="family"):
        build_family("gumbel")


def test_the_leak_of_the_thesis_beats_the_oracle():  # so the test above could fail
    task = replace(TASKS["toy/m1"](), test=400)
    data = task.load()
    training = Training(epochs=6, batch_size=50, lr=1e-2, schedule="cosine", warmup=10, patience=0)
    problem = Problem(leaky_regressor, task.likelihood, data.train, None, training)
    found = gap(replace(bf.Mle().fit(problem), noisy_draws=8), data, task)
    with pytest.raises(OracleBeatenError, match="Only a leak can do that"):
        evaluate.check_not_above(found)


def leaky_regressor():
    return Regressor(Encoder(dim=32, causal=True, family=Leaky))
