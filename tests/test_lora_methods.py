"""BLoB and TFB: their laws, their limits, and the posteriors they give on small PEFT models."""

import math
import random

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import bayesformer as bf
from bayesformer.core.draws import drawing_from
from bayesformer.core.vectors import THETA
from bayesformer.inference import blob
from bayesformer.inference.optimise import Adam
from bayesformer.layers.blob_linear import BlobLinear, add_blob
from bayesformer.methods.lora import Tfb
from bayesformer.model.skeleton import shadow
from tests.laws import assert_mean

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


class OneLayer(nn.Module):
    def __init__(self, out=3):
        super().__init__()
        self.layer = nn.Linear(6, out)

    def forward(self, x):
        return self.layer(x)


def one_layer(rank=2, out=3, random_b=True):
    torch.manual_seed(0)
    model = get_peft_model(OneLayer(out), LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["layer"]))
    if random_b:
        with torch.no_grad():
            model.get_parameter("base_model.model.layer.lora_B.default.weight").normal_()
    return model


def bert():
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=2, **SIZES))
    return get_peft_model(model, LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"))


def reviews(n=60):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(40, (n, 8), generator=g)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": (ids[:, 0] > 20).long()}


def test_without_spread_or_without_b_blob_is_plain_lora():
    for random_b, spread in ((True, 0.0), (False, 1.0)):
        model, x = one_layer(random_b=random_b), torch.randn(4, 6)
        expected = model(x)
        added = add_blob(shadow(model)).train()
        with torch.no_grad():
            layer = next(m for m in added.modules() if isinstance(m, BlobLinear))
            layer.rho.fill_(spread)
        assert torch.equal(added(x), expected)


@pytest.mark.parametrize("flipout", ["token", "example", "none"])
def test_noise_has_the_variance_of_the_closed_form(flipout):
    """Var = Σ_j Ω²_ij x_j² for every mode; across tokens of an example 0 or Σ_j Ω²_ij x_tj x_t'j."""
    torch.manual_seed(2)
    layer = BlobLinear(nn.Parameter(torch.randn(2, 5)), flipout, epsilon=1.0).double()
    x = torch.randn(1, 3, 5, dtype=torch.float64)
    draws = 20_000
    with drawing_from([torch.Generator().manual_seed(3)]), torch.no_grad():
        noise = torch.stack([layer(x)[0] for _ in range(draws)]) - x[0] @ layer.weight.mT  # (draws, T, r)
    variance = layer.rho.detach() ** 4
    assert_mean(noise, torch.zeros(3, 2, dtype=torch.float64))
    assert_mean(noise.square(), x[0].square() @ variance.mT)
    across = (x[0, 0] * x[0, 1]) @ variance.mT
    assert_mean(noise[:, 0] * noise[:, 1], torch.zeros_like(across) if flipout == "token" else across)


def test_kl_is_that_of_torch_and_0_at_the_prior():
    mean, root = torch.randn(7, dtype=torch.float64), torch.rand(7, dtype=torch.float64) + 0.1
    q, p = torch.distributions.Normal(mean, root**2), torch.distributions.Normal(torch.zeros_like(mean), 0.2)
    torch.testing.assert_close(blob.kl_divergence_of(mean, root, 0.2), torch.distributions.kl_divergence(q, p).sum())
    at_prior = blob.kl_divergence_of(torch.zeros(7), torch.full((7,), math.sqrt(0.2)), 0.2)
    assert abs(at_prior.item()) < 1e-6


@pytest.mark.parametrize("cycle", [1, 3, 50, 2000])
def test_weights_of_the_kl_sum_to_one_in_a_cycle(cycle):
    for rising in (True, False):
        weights = blob.kl_weight(torch.arange(1, 2 * cycle + 1, dtype=torch.float64), cycle, rising)
        assert weights.isfinite().all()
        torch.testing.assert_close(weights.view(2, cycle).sum(1), torch.ones(2, dtype=torch.float64))


def test_the_last_step_of_a_cycle_has_half_of_the_weight():
    found = blob.kl_weight(torch.arange(1.0, 4.0), 3, True)
    torch.testing.assert_close(found, torch.tensor([1.0, 2.0, 4.0]) / 7)


def test_one_step_moves_g_by_plain_descent_and_m_by_both():
    means, roots = torch.tensor([0, 1]), torch.tensor([3, 4])
    start = torch.tensor([0.3, -0.2, 0.7, 0.5, 0.6], dtype=torch.float64)
    slope = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)

    def log_joint(params, batch):
        return (params[THETA] * slope).sum(), params[THETA]

    rule, rate, prior = Adam(1e-3), 0.01, 0.2
    for inplace in (False, True):
        transform = blob.build(log_joint, means, roots, rule=rule, kl_rate=rate, prior_sd=prior, cycle=4)
        state = transform.init({THETA: start.clone()})
        moved = transform.update(state, None, inplace=inplace)[0].params[THETA]
        plain, _ = rule.step({THETA: start}, {THETA: slope}, rule.init({THETA: start}))
        g, pi = start[roots], 2 / 30
        torch.testing.assert_close(moved[2], plain[THETA][2])
        m = plain[THETA][means]
        torch.testing.assert_close(moved[means], m - rate * pi * m / prior**2)
        slope_kl = torch.func.grad(lambda r: blob.kl_divergence_of(start[means], r, prior))(g)
        torch.testing.assert_close(moved[roots], g + rate * (slope[roots] - pi * slope_kl))


def test_blob_on_a_linear_model_finds_the_variances_of_its_bound():
    """y = c B A x + noise with B fixed: the optimal Ω² is 1 / (c² B² Σ x² / σ² + 1 / σ_p²) per entry of A."""
    torch.manual_seed(4)
    g = torch.Generator().manual_seed(5)
    x = torch.randn(200, 6, generator=g)
    y = 0.5 * torch.randn(200, 1, generator=g)
    model = one_layer(rank=1, out=1)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_A" in name)
    b = model.get_parameter("base_model.model.layer.lora_B.default.weight").item()
    method = bf.Blob(kl_lr=0.02, cycle=200, rising=False, epsilon=0.5, flipout="example", prior_sd=0.5)
    training = bf.Training(epochs=300, batch_size=50, lr=1e-2, clip=math.inf)
    posterior = bf.fit(model, (x, y), likelihood=bf.Gaussian(0.5), method=method, training=training)
    found = posterior.law.variance()
    curvature = 4 * b**2 * x.square().sum(0) / 0.25  # c = 2
    expected = 1 / (curvature + 1 / 0.25)
    assert ((found / expected).log().abs() < 0.35).all(), found / expected


def test_blob_is_a_posterior_over_the_plain_peft_model(tmp_path):
    model, data = bert(), reviews()
    before = {name: p.clone() for name, p in model.named_parameters()}
    training = bf.Training(epochs=3, batch_size=20, lr=3e-3)
    posterior = bf.fit(model, data, likelihood="categorical", method=bf.Blob(), training=training)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert {name for name in posterior.space.names if "rho" in name} == set()
    spread = posterior.space.views(posterior.law.variance())
    assert all((spread[name] > 0).all() for name in spread if "lora_A" in name)
    assert all((spread[name] == 0).all() for name in spread if "lora_A" not in name)
    batch = {"input_ids": data["input_ids"], "attention_mask": data["attention_mask"]}
    predictive = posterior.predict(batch)
    assert len(predictive.log_probs) == 10
    posterior.save(tmp_path)
    assert torch.equal(bf.Posterior.load(tmp_path, model).predict(batch).probs, predictive.probs)


def test_tfb_keeps_the_product_and_spreads_it_evenly():
    model = one_layer(rank=2, out=4)
    x, y = torch.randn(50, 6), torch.randint(4, (50,))
    posterior = bf.tfb(model.eval(), (x, y), likelihood="categorical", iterations=6)
    a, b = "base_model.model.layer.lora_A.default.weight", "base_model.model.layer.lora_B.default.weight"
    mean = posterior.space.views(posterior.law.mean)
    old_a, old_b = model.get_parameter(a), model.get_parameter(b)
    torch.testing.assert_close(mean[b] @ mean[a], old_b @ old_a, atol=1e-5, rtol=1e-5)
    gram = mean[b].mT @ mean[b]
    assert (gram - gram.diagonal().diag()).abs().max() < 1e-5
    u = mean[b] / gram.diagonal().sqrt()
    variance = posterior.space.views(posterior.law.variance())[a]  # (r, in)
    spread = mean[b].square() @ variance  # of (B' E)_oj
    expected = posterior.facts["sigma"] ** 2 * u.square().sum(1, True)  # σ² (U Uᵀ)_oo
    torch.testing.assert_close(spread, expected.expand(4, 6), atol=1e-6, rtol=1e-3)


def test_tfb_brackets_its_tolerance_and_takes_all_it_may():
    model = one_layer(rank=2, out=4)
    x, y = torch.randn(80, 6), torch.randint(4, (80,))
    wide = bf.tfb(model.eval(), (x, y), likelihood="categorical", tolerance=0.2)
    narrow = bf.tfb(model.eval(), (x, y), likelihood="categorical", tolerance=0.02)
    assert wide.facts["rise"] <= 0.2
    assert narrow.facts["rise"] <= 0.02
    assert narrow.facts["sigma"] < wide.facts["sigma"] < 1
    assert bf.tfb(model, (x, y), likelihood="categorical", tolerance=1e9).facts["sigma"] == 1
    torch.testing.assert_close(narrow.predict(x, draws=400).probs, model(x).softmax(-1).detach(), atol=0.1, rtol=0)


def test_tfb_trains_first_where_it_is_fitted():
    data = reviews()
    method, training = Tfb(anchors=20, iterations=4), bf.Training(epochs=2, batch_size=20)
    posterior = bf.fit(bert(), data, likelihood="categorical", method=method, training=training)
    assert posterior.facts["steps"] == [6]
    assert posterior.facts["sigma"] > 0


@pytest.mark.parametrize("method", [bf.Blob(), bf.Tfb()])
def test_models_without_adapters_are_refused_before_training(method):
    x, y = torch.randn(10, 3), torch.randint(2, (10,))
    with pytest.raises(ValueError, match="LoRA adapters that are"):
        bf.fit(nn.Linear(3, 2), (x, y), likelihood="categorical", method=method)


def test_equal_seeds_are_equal_fits_and_the_callers_streams_stay():
    data, training = reviews(), bf.Training(epochs=1, batch_size=20)
    python = random.getstate()
    one, two = (bf.fit(bert(), data, likelihood="categorical", method="blob", training=training) for _ in range(2))
    assert torch.equal(one.law.mean, two.law.mean)
    assert torch.equal(one.law.variance(), two.law.variance())
    assert random.getstate() == python


def test_signs_of_outputs_are_drawn_for_every_token():
    """One input: without them both outputs of a token flip together, and the mean product of four is not 0."""
    layer = BlobLinear(nn.Parameter(torch.zeros(2, 1)), "token", epsilon=1.0).double()
    x = torch.ones(1, 2, 1, dtype=torch.float64)
    with drawing_from([torch.Generator().manual_seed(3)]), torch.no_grad():
        noise = torch.stack([layer(x)[0] for _ in range(20_000)])  # (draws, T, r)
    assert_mean(noise.flatten(1).prod(1), torch.zeros((), dtype=torch.float64))
