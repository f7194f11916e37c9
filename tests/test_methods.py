"""Methods and the engine: three strategies, one result; dropout that really drops."""

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.dropout import dropout_sites, set_dropout
from bayesformer.methods import build_method
from bayesformer.network import stochastic_mode
from tests.nets import Keyword, Mlp, Normed, Tied, blobs

FAST = bf.Training(epochs=4, batch_size=16, lr=0.02, warmup=5)


def fit(method=None, model=Mlp, data=None, **options):
    options = {"likelihood": "categorical", "training": FAST, "validation": blobs(30, seed=1), **options}
    return bf.fit(model, data or blobs(60), method=method, **options)


@pytest.mark.parametrize("strategy", ["batched", "processes"])
def test_strategies_give_the_same_ensemble(strategy):
    looped = fit(bf.Ensemble(3), strategy="looped")
    other = fit(bf.Ensemble(3), strategy=strategy, workers=2)
    if strategy == "processes":
        assert torch.equal(other.theta, looped.theta)
    torch.testing.assert_close(other.theta, looped.theta, atol=1e-5, rtol=1e-4)
    assert other.facts["best_epoch"] == looped.facts["best_epoch"]


@pytest.mark.parametrize("strategy", ["batched", "processes"])
def test_strategies_give_the_same_predictions(strategy):
    posterior, x = fit(bf.Ensemble(3), strategy="looped"), torch.randn(70, 3)
    looped = posterior.outputs(x, strategy="looped", batch_size=32).values
    other = posterior.outputs(x, strategy=strategy, batch_size=32, workers=2).values
    torch.testing.assert_close(other, looped, atol=1e-5, rtol=1e-4)
    assert torch.equal(posterior.outputs(x, strategy="auto").values.argmax(-1), looped.argmax(-1))


def test_naive_twin_of_an_ensemble_prediction():
    posterior, x = fit(bf.Ensemble(3)), torch.randn(9, 3)
    naive = torch.stack([posterior.module(i)(x).softmax(-1) for i in range(3)]).mean(0)
    torch.testing.assert_close(posterior.predict(x).probs, naive.detach())


def test_dropout_noise_is_the_same_in_a_loop_and_in_processes():
    posterior, x = fit(bf.MCDropout(0.3, draws=4)), torch.randn(9, 3)
    looped = posterior.outputs(x, strategy="looped").values
    assert torch.equal(posterior.outputs(x, strategy="processes", workers=2).values, looped)
    assert torch.equal(posterior.outputs(x, strategy="looped").values, looped)
    assert not torch.equal(posterior.outputs(x, seed=1, strategy="looped").values, looped)
    assert not torch.equal(looped[0], looped[1])
    with pytest.raises(ValueError, match="'batched' is not possible here: every draw has a dropout stream"):
        posterior.outputs(x, strategy="batched")


def test_members_differ_in_start_and_in_data_order():
    posterior = fit(bf.Ensemble(3))
    assert not torch.equal(posterior.theta[0], posterior.theta[1])
    given = fit(bf.Ensemble(3, init="given"), model=Mlp())
    distances = (given.theta[0] - given.theta[1]).norm(), (posterior.theta[0] - posterior.theta[1]).norm()
    assert 0 < distances[0] < distances[1]  # the same start, another order


def test_member_zero_of_an_ensemble_is_the_mle_of_a_factory():
    assert torch.equal(fit(bf.Ensemble(2)).theta[0], fit(bf.Mle()).theta[0])


def test_batched_refuses_what_it_cannot_reproduce():
    with pytest.raises(ValueError, match="the model has dropout or noise, and every member has a noise stream"):
        fit(bf.Ensemble(2), model=_Dropping, strategy="batched")
    with pytest.raises(ValueError, match="changes the model's buffers"):
        fit(bf.Ensemble(2), model=Normed, strategy="batched")


def _Dropping():
    return Mlp(dropout=0.3)


def test_map_pulls_towards_its_prior():
    mle, tight = fit(bf.Mle()), fit(bf.Map("normal(0, 0.05)"), validation=None)
    assert tight.theta.norm() < 0.5 * mle.theta.norm()
    flat = fit(bf.Map("flat"))
    assert torch.equal(flat.theta, mle.theta)


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


def test_frozen_and_tied_weights_and_keyword_inputs():
    data = bf.Data(
        {"input_ids": torch.randint(7, (30, 5)), "attention_mask": torch.ones(30, 5)}, torch.randint(3, (30,))
    )
    model = Keyword()
    model.embed.requires_grad_(False)
    before = model.embed.weight.clone()
    posterior = fit(bf.Ensemble(2, init="given"), model=model, data=data, validation=None)
    assert posterior.theta.shape[1] == sum(p.numel() for p in model.head.parameters())
    assert torch.equal(posterior.module(1).embed.weight, before)
    tokens = bf.Data(torch.randint(5, (20, 4)), torch.randint(5, (20, 4)))
    tied = fit(bf.Mle(), model=Tied, data=tokens, validation=None).module()
    assert tied.head.weight is tied.embed.weight


def test_running_averages_belong_to_the_member():
    posterior, x = fit(bf.Ensemble(2), model=Normed), torch.randn(5, 3)
    assert not torch.equal(
        posterior.weights.buffers["norm.running_mean"][0], posterior.weights.buffers["norm.running_mean"][1]
    )
    looped = posterior.outputs(x, strategy="looped").values
    torch.testing.assert_close(posterior.outputs(x, strategy="batched").values, looped)
    torch.testing.assert_close(torch.stack([posterior.module(i)(x) for i in range(2)]).detach(), looped)


def test_functional_attention_dropout_is_on():
    """nn.MultiheadAttention keeps its rate in a float: switching nn.Dropout modules would miss it."""

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    model = Attends()
    assert [name for _, name in dropout_sites(model)] == ["dropout"]
    data = bf.Data(torch.randn(20, 5, 6), torch.randint(2, (20,)))
    posterior = fit(bf.MCDropout(0.4, draws=8), model=model, data=data, validation=None)
    outputs = posterior.outputs(data.inputs[:3]).values
    assert (outputs.std(0) > 0).all()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "vit"])
def test_hugging_face_attention_dropout_is_on(kind, attention):
    transformers = pytest.importorskip("transformers")
    common = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ids = torch.randint(2, 30, (3, 9))
    torch.manual_seed(0)
    if kind == "bert":
        model = transformers.BertModel(transformers.BertConfig(vocab_size=30, **common))
    elif kind == "gpt2":
        model = transformers.GPT2Model(transformers.GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2))
    elif kind == "llama":
        model = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=30, num_key_value_heads=1, **common))
    else:
        model = transformers.ViTModel(transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, **common))
        ids = torch.randn(3, 1, 8, 8)
    model.set_attn_implementation(attention)
    set_dropout(model, 0.0)
    for module, name in dropout_sites(model):
        if "ttention" in type(module).__name__ or any(
            (module is inner and "attn_dropout" in path)
            or (("attention.self" in path or "attention.attention" in path) and module is inner)
            for path, inner in model.named_modules()
        ):
            setattr(module, name, 0.5)
    stochastic_mode(model)
    with torch.no_grad():
        first, second = model(ids)[0], model(ids)[0]
    assert not torch.equal(first, second)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(ids)[0], model(ids)[0])


def test_mc_dropout_refuses_a_model_without_dropout():
    with pytest.raises(ValueError, match="has 0 dropout sites and two training passes agree exactly"):
        fit(bf.MCDropout(0.2), model=nn.Linear(3, 2))
    with pytest.raises(ValueError, match="has 1 dropout sites"):
        fit(bf.MCDropout(None), model=Mlp)


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
    with pytest.raises(ValueError, match="ensemble.members must be at least 1; got 0"):
        bf.Ensemble(0)
    with pytest.raises(ValueError, match="rate must lie strictly between 0 and 1, or be none; got 1.0"):
        bf.MCDropout(1.0)
    with pytest.raises(ValueError, match="must match a parameter; names are"):
        fit(bf.Map({"attn*": "normal(0, 1)", "*": "flat"}))


def test_an_interrupted_ensemble_resumes_and_keeps_finished_members(tmp_path):
    class Stop(Exception):
        pass

    whole = fit(bf.Ensemble(3), strategy="looped")
    finished = tmp_path / "ensemble-0-0.safetensors"

    calls = []
    from bayesformer.methods import members

    real = members.train

    def stop_at_second(job, *rest):
        calls.append(job.members)
        if job.members == (1,) and len(calls) == 2:
            raise Stop
        return real(job, *rest)

    members.train = stop_at_second
    try:
        with pytest.raises(Stop):
            fit(bf.Ensemble(3), strategy="looped", checkpoint=tmp_path)
    finally:
        members.train = real
    stamp = finished.stat().st_mtime_ns
    resumed = fit(bf.Ensemble(3), strategy="looped", checkpoint=tmp_path)
    assert finished.stat().st_mtime_ns == stamp
    assert torch.equal(resumed.theta, whole.theta)
