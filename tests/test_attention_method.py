"""Stochastic attention as a method: conversion, the bound, annealing, samples, resuming, threads, and the oracle."""

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer import evaluate
from bayesformer.attention import (
    FAMILIES,
    MultiHeadAttention,
    Softmax,
    Weibull,
    attention_kl,
    build_family,
    families,
    install,
)
from bayesformer.bench.tasks import TASKS
from bayesformer.core.errors import OracleBeatenError
from bayesformer.core.types import Batch
from bayesformer.core.vectors import THETA
from bayesformer.data import as_batches
from bayesformer.layers.preparation import STEPS
from bayesformer.likelihoods import Categorical
from bayesformer.methods import METHODS, Problem
from bayesformer.methods.stochastic_attention import Annealing
from bayesformer.model.shell import Shell
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Space
from bayesformer.models.transformer import Encoder, Regressor
from bayesformer.train.objective import Objective
from bayesformer.train.prototype import Prototype
from bayesformer.train.training import Training
from tests.attention_models import T, V, bert_config
from tests.test_attention_contract import Leaky


def regressor(**options):
    return Regressor(Encoder(dim=8, heads=2, causal=True, **options))


def small_task():
    return replace(TASKS["toy/m1"](), train=200, validation=20, test=400, dim=16)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_keeps_the_weights_and_mean_attention(family):
    model, x = regressor(), torch.randn(3, 5, 1)
    converted = install(copy.deepcopy(model), family)
    assert [type(f) for f in families(converted)] == [type(build_family(family))]
    assert torch.equal(converted.eval()(x), model.eval()(x))
    assert not torch.equal(converted.train()(x), model.train()(x))
    assert isinstance(model.encoder.blocks[0].attention.family, Softmax)  # the model given is not changed


def test_conversion_by_name_and_with_a_function_of_heads_and_width():
    model = Regressor(Encoder(dim=8, depth=2, heads=2))
    seen = []
    converted = install(
        copy.deepcopy(model), lambda heads, width: (seen.append((heads, width)), Weibull())[1], "encoder.blocks.1.*"
    )
    assert seen == [(2, 4)]
    assert len(families(converted)) == 1
    with pytest.raises(ValueError, match="MultiHeadAttention of bayesformer; Linear has none"):
        install(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="attention module in names"):
        install(model, names="decoder.*")


def test_the_kl_of_a_layer_that_is_called_twice_counts_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = MultiHeadAttention(4, 2, Softmax())

        def forward(self, x):
            mask = torch.ones(1, 1, 1, x.shape[1], dtype=torch.bool)
            return self.attention(self.attention(x, mask), mask)

    model, seen = install(Twice(), "weibull"), []
    model.attention.family.register_forward_hook(lambda module, given, draw: seen.append(draw.kl))
    for _ in range(2):  # and a new pass starts anew
        seen.clear()
        model(torch.randn(3, 5, 4))
        assert len(seen) == 2
        torch.testing.assert_close(bf.kl_divergence(model), seen[0] + seen[1])


def test_an_interrupted_pass_leaves_nothing_behind():
    class Interrupted(Regressor):
        stop = False

        def forward(self, inputs):
            found = super().forward(inputs)
            if self.stop:
                raise KeyboardInterrupt
            return found

    model, x = install(Interrupted(Encoder(dim=8, heads=2)), "weibull"), torch.randn(3, 5, 1)
    model(x)
    expected = attention_kl(model)
    model.stop = True
    with pytest.raises(KeyboardInterrupt):
        model(x)
    model.stop = False
    model(x)
    torch.testing.assert_close(attention_kl(model), expected)  # of one layer, the KL does not see the draw


def prepared(method, model):
    """A shell of the model as the method trains it, in training mode."""
    network = method.preparation(copy.deepcopy(model))
    shell: Shell = Skeleton(network, Space.of(network)).shell()
    shell.module.train()
    return shell


def test_the_bound_is_the_mean_over_examples_whatever_n():
    """value = mean_b [log p(y_b) - KL_b]: latent variables belong to examples, so nothing is divided by N."""
    shell = prepared(bf.Attention(), regressor())
    batch = Batch(torch.randn(4, 6, 1), torch.randn(4, 6, 1))
    likelihood = bf.Gaussian()
    for num_data in (4, 1000):
        objective = Objective(shell, likelihood, num_data, kl_weight=Annealing(1.0, "none", 1.0))
        torch.manual_seed(0)
        value, _, grads = objective.value_and_grad({THETA: shell.theta.clone()}, batch)
        found = grads[THETA].clone()
        torch.manual_seed(0)
        outputs = shell(batch.inputs)
        kl = attention_kl(shell.module)
        assert kl.shape == (4,)
        expected = (likelihood.log_prob(outputs, batch.targets, None) - kl).mean()
        torch.testing.assert_close(value, expected.detach())
        weights = [shell.weights[name] for name in shell.space.names]
        exact = torch.autograd.grad(expected, weights)
        torch.testing.assert_close(found, torch.cat([g.flatten() for g in exact]), atol=1e-5, rtol=1e-4)


def test_annealing_follows_the_paper():
    """Fan et al. (2020), algorithm 1: the KL of step t = 0, 1, ... has the weight sigmoid(rho t)."""
    assert [Annealing(0.5, "sigmoid", 0.2).weight(torch.tensor(float(t))).item() for t in (0, 5)] == pytest.approx(
        [0.25, 0.5 / (1 + math.exp(-1.0))]
    )
    t = torch.arange(5.0)
    torch.testing.assert_close(Annealing(2.0, "linear", 0.4).weight(t), torch.tensor([0.0, 0.8, 1.6, 2.0, 2.0]))
    torch.testing.assert_close(Annealing(0.7, "none", 0.4).weight(t), torch.full((5,), 0.7))


@pytest.mark.parametrize("samples", [1, 3])
def test_a_step_is_counted_once_whatever_its_samples(samples):
    shell = prepared(bf.Attention(), regressor())
    batch = Batch(torch.randn(4, 6, 1), torch.randn(4, 6, 1))
    objective = Objective(shell, bf.Gaussian(), 10, kl_weight=Annealing(1.0, "linear", 0.25), samples=samples)
    for step in range(4):
        assert shell.module.get_buffer(STEPS) == step
        objective.value_and_grad({THETA: shell.theta.clone()}, batch)
        kl = attention_kl(shell.module).mean()  # of one layer, whatever the sample
        torch.testing.assert_close(objective.named["kl"], 0.25 * step * kl.detach())


def test_samples_average_over_passes_of_one_step():
    shell, batch = prepared(bf.Attention(), regressor()), Batch(torch.randn(4, 6, 1), torch.randn(4, 6, 1))
    theta = {THETA: shell.theta.clone()}
    found = {}
    for samples in (1, 4):
        objective = Objective(shell, bf.Gaussian(), 10, kl_weight=Annealing(1.0, "none", 1.0), samples=samples)
        torch.manual_seed(0)
        runs = [objective.value_and_grad(theta, batch) for _ in range(4 // samples)]
        found[samples] = torch.stack([value for value, _, _ in runs]).mean()
        gradient = objective.value_and_grad(theta, batch)[2][THETA]
        assert torch.isfinite(gradient).all()
    torch.testing.assert_close(found[4], found[1])


def test_fit_takes_samples_and_they_change_the_fit():
    one, *_ = fit(bf.Attention(spread=2.0), epochs=1)
    three, *_ = fit(bf.Attention(spread=2.0, samples=3), epochs=1)
    assert not torch.equal(one.theta, three.theta)
    assert three.facts["method"]["samples"] == 3
    assert three.facts["steps"] == one.facts["steps"]


def fit(method, folder=None, epochs=3, **options):
    task = small_task()
    data = task.load()
    training = Training(epochs=epochs, batch_size=50, lr=1e-2, schedule="cosine", warmup=10, patience=0)
    problem = Problem(task.model, task.likelihood, data.train, data.validation, training, checkpoint=folder, **options)
    return method.fit(problem), data, task


def test_a_resumed_fit_anneals_on_where_it_was(tmp_path, monkeypatch):
    method = bf.Attention(rho=0.1)
    whole, _, _ = fit(method)
    original = Annealing.__call__
    calls = []

    def killed(self, module):
        calls.append(1)
        if len(calls) > 6:  # in the second epoch of four steps
            raise KeyboardInterrupt
        return original(self, module)

    monkeypatch.setattr(Annealing, "__call__", killed)
    with pytest.raises(KeyboardInterrupt):
        fit(method, tmp_path, checkpoint_seconds=0.0)
    monkeypatch.setattr(Annealing, "__call__", original)
    resumed, _, _ = fit(method, tmp_path, checkpoint_seconds=0.0)
    assert torch.equal(resumed.theta, whole.theta)
    assert resumed.law.buffers[STEPS].item() == 12


def test_predictions_are_draws_and_survive_saving(tmp_path):
    posterior, data, task = fit(bf.Attention("lognormal", spread=0.5, draws=5))
    inputs = data.test.inputs[:4]
    prediction = posterior.predict(inputs)
    assert posterior.outputs(inputs).values.shape[0] == 5
    assert (prediction.epistemic > 0).any()
    posterior.save(tmp_path)
    loaded = bf.Posterior.load(tmp_path, task.model())
    assert torch.equal(loaded.outputs(inputs).values, posterior.outputs(inputs).values)
    mean = posterior.module()  # evaluation mode: softmax attention
    assert torch.equal(mean(inputs), mean(inputs))


def transformers_posterior():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids = torch.randint(1, V, (8, T))
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    model = transformers.BertForSequenceClassification(bert_config(num_labels=3))
    data = {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 3}
    method, training = bf.Attention("weibull", spread=2.0, draws=4), Training(epochs=1, batch_size=4)
    return bf.fit(model, data, likelihood="categorical", method=method, training=training), {
        "input_ids": ids,
        "attention_mask": mask,
    }


@pytest.mark.parametrize("kind", ["own", "transformers", "encoder-decoder"])
def test_eight_threads_get_what_one_gets(kind):
    if kind == "own":
        posterior, data, _ = fit(bf.Attention("dirichlet", draws=4), epochs=1)
        inputs = data.test.inputs[:6]
    elif kind == "transformers":
        posterior, inputs = transformers_posterior()
    else:
        posterior, inputs = encoder_decoder_posterior()
    expected = [posterior.outputs(inputs, seed=seed).values for seed in range(8)]
    assert not torch.equal(expected[0], expected[1])
    start = threading.Barrier(8)

    def ask(seed):
        start.wait()
        return [posterior.outputs(inputs, seed=seed).values for _ in range(4)]

    with ThreadPoolExecutor(8) as pool:
        for seed, found in enumerate(pool.map(ask, range(8))):
            assert all(torch.equal(values, expected[seed]) for values in found)


def encoder_decoder_posterior():
    """Cross-attention, whose queries are known from the self-attention before it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    ids = {"decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=V, **sizes, **ids))
    tokens = torch.randint(3, V, (8, T))
    mask = torch.ones_like(tokens)
    mask[1, 3:] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": tokens, "decoder_attention_mask": mask}
    method, training = bf.Attention("weibull", spread=2.0, draws=3), Training(epochs=1, batch_size=4)
    data = (inputs, tokens.masked_fill(mask == 0, -100))
    return bf.fit(model, data, likelihood="categorical", method=method, training=training), inputs


def test_two_fits_at_once_are_the_fits_alone():
    alone = [fit(bf.Attention(name), epochs=1)[0].theta for name in ("weibull", "gaussian")]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda name: fit(bf.Attention(name), epochs=1)[0].theta, ("weibull", "gaussian")))
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


VARIANTS = {
    "gaussian": {},
    "gaussian dd": {"data_dependent": True},
    "dirichlet": {},
    "dirichlet dd": {"data_dependent": True},
    "dirichlet of Cinquin et al.": {"spread": 9e-4, "prior_scale": 1.0, "divergence": "gamma"},
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
    assert len({type(build_family(name)) for name in FAMILIES}) == len(FAMILIES)
    with pytest.raises(ValueError, match="family"):
        build_family("gumbel")


def test_a_leaky_family_beats_the_oracle():  # so the test above could fail
    task = replace(TASKS["toy/m1"](), test=400)
    data = task.load()
    training = Training(epochs=6, batch_size=50, lr=1e-2, schedule="cosine", warmup=10, patience=0)
    problem = Problem(leaky_regressor, task.likelihood, data.train, None, training)
    found = gap(replace(bf.Mle().fit(problem), noisy_draws=8), data, task)
    with pytest.raises(OracleBeatenError, match="Only a leak can do that"):
        evaluate.check_not_above(found)


def leaky_regressor():
    return Regressor(Encoder(dim=32, causal=True, family=Leaky))


class Dropped(nn.Module):
    """Attention that most training passes leave out, as layer drop does."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        if not self.training or torch.rand(()) < 0.3:
            x = x + self.norm(self.attention(x, x, x)[0].mT).mT
        return self.head(x.mean(1))


def test_training_steps_that_drop_every_layer(caplog):
    torch.manual_seed(0)
    model, x, y = Dropped(), torch.randn(16, 3, 4), torch.arange(16) % 2
    training = bf.Training(epochs=4, batch_size=4)
    posterior = bf.fit(
        model, (x, y), likelihood="categorical", method=bf.Attention(), training=training, progress=False
    )
    assert posterior.predict(x).probs.isfinite().all()
    assert "do not depend on" not in caplog.text  # what one pass drops, another one uses
    installed = bf.attention.install(Dropped(), "weibull")
    found = set()
    for _ in range(40):
        installed(x)
        found.add(bool((bf.attention.attention_kl(installed) > 0).all()))
    assert found == {True, False}


def test_buffers_of_layers_that_are_dropped_at_random_are_seen():
    torch.manual_seed(0)
    problem = Problem(Dropped(), Categorical(), as_batches((torch.randn(8, 3, 4), torch.arange(8) % 2), "data"))
    found = Prototype(problem).probed
    assert found.unused == ()
    assert "norm.running_mean" in found.buffers_changed
