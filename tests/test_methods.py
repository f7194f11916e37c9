"""Methods that keep networks as they are: one result in every strategy; dropout that really drops."""

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.methods import build_method
from tests.nets import Keyword, Mlp, Normed, Tied, blobs

FAST = bf.Training(epochs=4, batch_size=16, lr=0.02, warmup=5)


def fit(method=None, model=Mlp, data=None, **options):
    options = {"likelihood": "categorical", "training": FAST, "validation": blobs(30, seed=1), **options}
    return bf.fit(model, data or blobs(60), method=method, **options)


@pytest.mark.parametrize("strategy", ["batched", "processes"])
def test_strategies_give_the_same_ensemble(strategy):
    """In processes bit for bit; in lockstep sums are in another order, 1e-5 after 16 steps of Adam."""
    looped = fit(bf.Ensemble(3), strategy="looped")
    other = fit(bf.Ensemble(3), strategy=strategy, workers=2)
    assert (looped.facts["strategy"], other.facts["strategy"]) == ("looped", strategy)
    if strategy == "processes":
        assert torch.equal(other.theta, looped.theta)
    torch.testing.assert_close(other.theta, looped.theta, atol=1e-5, rtol=1e-4)
    assert other.facts["best_epoch"] == looped.facts["best_epoch"]


def test_strategies_give_the_same_predictions():
    """One vmapped pass adds up in another order: 1e-6 of a logit."""
    posterior, x = fit(bf.Ensemble(3), strategy="looped"), torch.randn(70, 3)
    looped = posterior.outputs(x, strategy="looped", batch_size=32).values
    batched = posterior.outputs(x, strategy="batched", batch_size=32).values
    torch.testing.assert_close(batched, looped, atol=1e-6, rtol=1e-5)
    auto = posterior.outputs(x, strategy="auto").values
    assert torch.equal(auto, looped) or torch.equal(auto, batched)
    with pytest.raises(ValueError, match="strategy must be 'auto', 'looped' or 'batched' for predictions; got 'proc"):
        posterior.predict(x, strategy="processes")


def test_naive_twin_of_an_ensemble_prediction():
    posterior, x = fit(bf.Ensemble(3)), torch.randn(9, 3)
    naive = torch.stack([posterior.module(i)(x).softmax(-1) for i in range(3)]).mean(0)
    torch.testing.assert_close(posterior.predict(x).probs, naive.detach())


def test_dropout_noise_is_that_of_the_seed_alone():
    """The first question is answered as the second: trials before it draw from streams of their own."""
    posterior, x = fit(bf.MCDropout(0.3, draws=4)), torch.randn(9, 3)
    first = posterior.outputs(x, strategy="looped").values
    assert torch.equal(posterior.outputs(x, strategy="looped").values, first)
    assert torch.equal(posterior.outputs(x).values, first)
    assert torch.equal(posterior.outputs(x, 2).values, first[:2])
    assert not torch.equal(posterior.outputs(x, seed=1, strategy="looped").values, first)
    assert not torch.equal(first[0], first[1])
    with pytest.raises(ValueError, match="'batched' is not possible here: every draw has a dropout stream"):
        posterior.outputs(x, strategy="batched")


def test_mc_dropout_drops_at_its_rate():
    """A linear network of one weight: outputs are 0 with probability p and x / (1 - p) otherwise."""

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.linear = nn.Dropout(0.9), nn.Linear(1, 1, bias=False)

        def forward(self, x):
            return self.linear(self.drop(x))

    data = bf.Data(torch.ones(20, 1), torch.ones(20, 1))
    posterior = bf.fit(One(), data, likelihood=bf.Gaussian(1.0), method=bf.MCDropout(0.25), training=FAST)
    found = posterior.outputs(torch.ones(400, 1), 10).values / posterior.theta.item()
    values, counts = found.round(decimals=4).unique(return_counts=True)
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / 0.75]), atol=1e-4, rtol=0)
    assert counts[0].item() == pytest.approx(1000, abs=5 * (4000 * 0.25 * 0.75) ** 0.5)


def test_members_differ_in_start_and_in_data_order():
    posterior = fit(bf.Ensemble(3))
    assert not torch.equal(posterior.theta[0], posterior.theta[1])
    given = fit(bf.Ensemble(3), model=Mlp())
    distances = (given.theta[0] - given.theta[1]).norm(), (posterior.theta[0] - posterior.theta[1]).norm()
    assert 0 < distances[0] < distances[1]  # the same start, another order
    assert given.facts["init"] == "given"
    assert posterior.facts["init"] == "built"
    fresh = fit(bf.Ensemble(3), model=Mlp(), init="fresh")
    assert (fresh.theta[0] - fresh.theta[1]).norm() > 2 * distances[0]


def test_member_zero_of_an_ensemble_is_the_mle_of_a_factory():
    assert torch.equal(fit(bf.Ensemble(2), strategy="looped").theta[0], fit(bf.Mle()).theta[0])


def test_batched_refuses_what_it_cannot_reproduce():
    with pytest.raises(ValueError, match="the model has dropout or noise, and every member has a noise stream"):
        fit(bf.Ensemble(2), model=lambda: Mlp(dropout=0.3), strategy="batched")
    with pytest.raises(ValueError, match="changes the model's buffers"):
        fit(bf.Ensemble(2), model=Normed, strategy="batched")


def test_map_pulls_towards_its_prior():
    mle, tight = fit(bf.Mle()), fit(bf.Map("normal(0, 0.05)"), validation=None)
    assert tight.theta.norm() < 0.5 * mle.theta.norm()
    assert torch.equal(fit(bf.Map("flat")).theta, mle.theta)


def test_map_is_exact_on_a_linear_gaussian_model():
    x, noise = torch.randn(40, 2), 0.5
    y = x @ torch.tensor([[1.0], [-2.0]]) + noise * torch.randn(40, 1)
    training = bf.Training(epochs=1500, batch_size=40, lr=0.02, schedule="constant", clip=1e9)
    linear = nn.Linear(2, 1, bias=False)
    posterior = bf.fit(
        linear, (x, y), likelihood=bf.Gaussian(noise), method=bf.Map("normal(0, 0.3)"), training=training
    )
    ridge = torch.linalg.solve(x.T @ x + noise**2 / 0.3**2 * torch.eye(2), x.T @ y)
    torch.testing.assert_close(posterior.theta[0], ridge[:, 0], atol=1e-4, rtol=1e-4)
    assert posterior.facts["converged"] == [True]


def test_a_run_that_has_not_come_to_rest_says_so():
    long = bf.Training(epochs=60, batch_size=16, lr=1e-4, warmup=5)
    posterior = fit(bf.Mle(), training=long, validation=None)
    assert posterior.facts["converged"] == [False]
    assert "has not converged" in repr(posterior)
    assert "convergence unknown" in repr(fit(bf.Mle(), validation=None))


def test_frozen_and_tied_weights_and_keyword_inputs():
    data = bf.Data(
        {"input_ids": torch.randint(7, (30, 5)), "attention_mask": torch.ones(30, 5)}, torch.randint(3, (30,))
    )
    model = Keyword()
    model.embed.requires_grad_(False)
    before = model.embed.weight.clone()
    posterior = fit(bf.Ensemble(2), model=model, data=data, validation=None)
    assert posterior.theta.shape[1] == sum(p.numel() for p in model.head.parameters())
    assert torch.equal(posterior.module(1).embed.weight, before)
    tokens = bf.Data(torch.randint(5, (20, 4)), torch.randint(5, (20, 4)))
    tied = fit(bf.Mle(), model=Tied, data=tokens, validation=None).module()
    assert tied.head.weight is tied.embed.weight


def test_running_averages_belong_to_the_member():
    posterior, x = fit(bf.Ensemble(2), model=Normed), torch.randn(5, 3)
    averages = posterior.law.buffers["norm.running_mean"]
    assert not torch.equal(averages[0], averages[1])
    looped = posterior.outputs(x, strategy="looped").values
    torch.testing.assert_close(posterior.outputs(x, strategy="batched").values, looped, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(torch.stack([posterior.module(i)(x) for i in range(2)]).detach(), looped)


def test_running_averages_are_those_of_a_plain_loop():
    """Mle on BatchNorm: the averages after training are those that torch's own modules would have."""
    from bayesformer.core.seeds import generator, stream

    def build():
        model = Normed()
        model.inner.bias.requires_grad_(False)  # the norm takes it out: its gradient is rounding, which Adam blows up
        return model

    posterior = fit(bf.Mle(), model=build, validation=None)
    with stream(0, "init", 0):
        model = build().train()
    data, optimiser = blobs(60), torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    step = 0
    for epoch in range(4):
        order = torch.randperm(60, generator=generator(0, 0, epoch, "order"))
        for start in range(0, 60, 16):
            step += 1
            optimiser.param_groups[0]["lr"] = 0.02 * min(step / 5, (5 / step) ** 0.5)
            optimiser.zero_grad()
            index = order[start : start + 16]
            nn.functional.cross_entropy(model(data.inputs[index]), data.targets[index]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
    torch.testing.assert_close(
        posterior.law.buffers["norm.running_mean"][0], model.norm.running_mean, atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(
        posterior.law.buffers["norm.running_var"][0], model.norm.running_var, atol=1e-5, rtol=1e-4
    )
    assert posterior.law.buffers["norm.num_batches_tracked"].item() == 16


def test_functional_attention_dropout_is_on():
    """nn.MultiheadAttention keeps its rate in a float: switching nn.Dropout modules would miss it."""

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    data = bf.Data(torch.randn(20, 5, 6), torch.randint(2, (20,)))
    posterior = fit(bf.MCDropout(0.4, draws=8), model=Attends(), data=data, validation=None)
    assert (posterior.outputs(data.inputs[:3]).values.std(0) > 0).all()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "vit"])
def test_hugging_face_attention_dropout_is_on(kind, attention):
    """Rates of the model itself, 0 everywhere but in attention."""
    transformers = pytest.importorskip("transformers")
    common = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.5, "num_labels": 2}
    inputs = {"input_ids": torch.randint(2, 30, (12, 9))}
    if kind == "bert":
        config = transformers.BertConfig(vocab_size=30, **common, **quiet)
        model = transformers.BertForSequenceClassification(config)
    elif kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=30, n_embd=16, n_layer=1, n_head=2, num_labels=2, pad_token_id=0,
            embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.5,
        )  # fmt: skip
        model = transformers.GPT2ForSequenceClassification(config)
    elif kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=30, num_key_value_heads=1, **common, attention_dropout=0.5, num_labels=2, pad_token_id=0
        )
        model = transformers.LlamaForSequenceClassification(config)
    else:
        config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, **common, **quiet)
        model = transformers.ViTForImageClassification(config)
        inputs = {"pixel_values": torch.randn(12, 1, 8, 8)}
    model.set_attn_implementation(attention)
    data = bf.Data(inputs, torch.arange(12) % 2)
    training = bf.Training(epochs=1, batch_size=6)
    noisy = fit(bf.MCDropout(None, draws=3), model=model, data=data, validation=None, training=training)
    outputs = noisy.outputs({name: value[:4] for name, value in inputs.items()}).values
    assert not torch.equal(outputs[0], outputs[1])
    quiet_outputs = fit(bf.Mle(), model=model, data=data, validation=None, training=training).outputs(inputs).values
    assert quiet_outputs.shape == (1, 12, 2)


def test_mc_dropout_refuses_a_model_without_dropout():
    text = "mc_dropout needs a model with dropout; a training pass of this one draws no random numbers"
    with pytest.raises(ValueError, match=text):
        fit(bf.MCDropout(0.2), model=nn.Linear(3, 2))
    with pytest.raises(ValueError, match=text):
        fit(bf.MCDropout(None), model=Mlp)  # its rate is 0


@pytest.mark.parametrize("seed", range(8))
def test_mc_dropout_takes_small_models_whatever_their_seed(seed):
    """Two examples through eight units can agree by chance: what counts is that numbers are drawn."""
    torch.manual_seed(seed)
    model = Mlp(hidden=2, dropout=0.01)
    assert fit(bf.MCDropout(None, draws=2), model=model, training=bf.Training(epochs=1), seed=seed).noisy_draws == 2


def test_wrong_problems_are_named():
    with pytest.raises(ValueError, match="train data: targets must lie in 0..1 .* got 2"):
        fit(data=blobs(60, classes=3))
    with pytest.raises(ValueError, match="validation data: targets must lie in 0..1"):
        fit(validation=blobs(60, classes=3))
    with pytest.raises(ValueError, match="train data: targets of a gaussian likelihood must have shape"):
        fit(likelihood="gaussian")
    with pytest.raises(ValueError, match="unknown method 'ensembel'. Did you mean 'ensemble'"):
        fit("ensembel")
    with pytest.raises(ValueError, match="unknown setting of ensemble 'member'. Did you mean 'members'"):
        build_method("ensemble", {"member": 3})
    with pytest.raises(ValueError, match="unknown strategy 'loop'. Did you mean 'looped'"):
        fit(bf.Ensemble(2), strategy="loop")
    with pytest.raises(ValueError, match=r"ensemble.members must be a whole number.*at least 1; got 0"):
        bf.Ensemble(0)
    with pytest.raises(ValueError, match="rate must lie strictly between 0 and 1, or be none; got 1.0"):
        bf.MCDropout(1.0)
    with pytest.raises(ValueError, match="must match a parameter; names are"):
        fit(bf.Map({"attn*": "normal(0, 1)", "*": "flat"}))
    with pytest.raises(ValueError, match="seed must be a whole number; got 'a'"):
        fit(seed="a")
    with pytest.raises(ValueError, match="init must be 'given', 'fresh' or 'head'; got 'new'"):
        fit(init="new")
    with pytest.raises(ValueError, match="head must name the weights to draw anew, with init='head' and only then"):
        fit(init="head")


def test_an_interrupted_ensemble_resumes_and_keeps_finished_members(tmp_path):
    class Stop(Exception):
        pass

    class Interrupts:
        """A data set that fails after so many items have been read."""

        def __init__(self, fail_after):
            self.left, self.data = fail_after, blobs(60)

        def __len__(self):
            return 60

        def __getitem__(self, index):
            self.left -= 1
            if self.left < 0:
                raise Stop
            return self.data.inputs[index], self.data.targets[index]

    def run(data, folder=None):
        return fit(bf.Ensemble(3), data=data, strategy="looped", checkpoint=folder, validation=None)

    whole = run(Interrupts(10**9))
    with pytest.raises(Stop):
        run(Interrupts(60 * 4 + 130), tmp_path)  # in the third epoch of the second member
    finished = tmp_path / "ensemble-0-0.safetensors"
    stamp = finished.stat().st_mtime_ns
    resumed = run(Interrupts(10**9), tmp_path)
    assert finished.stat().st_mtime_ns == stamp
    assert torch.equal(resumed.theta, whole.theta)
