"""Stochastic attention in files: every family comes back as it was, on the plain model, or the file is refused."""

import json

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer import likelihoods
from bayesformer.attention import (
    AttentionFamily,
    Contextual,
    GaussianLogits,
    Learned,
    Softmax,
    Weibull,
    describe_families,
    families,
    install,
    install_described,
    register_family,
)
from bayesformer.attention import describe as registry
from bayesformer.core.errors import DamagedFileError
from bayesformer.core.storage import checksum, write_json, write_tensors
from bayesformer.model.space import Space
from bayesformer.models.gat import GraphAttentionNetwork
from bayesformer.models.transformer import Encoder, Regressor
from bayesformer.models.vit import VisionTransformer
from tests.attention_models import T, V, bert_config, gpt2_config
from tests.attention_zoo import STOCHASTIC

transformers = pytest.importorskip("transformers")
TRAINING = bf.Training(epochs=1, batch_size=4, warmup=1)


class TorchClassifier(nn.Module):
    """nn.TransformerEncoder, and a head on the mean of its positions."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


def bert():
    return transformers.BertForSequenceClassification(bert_config(num_labels=3))


def gpt2():
    return transformers.GPT2ForSequenceClassification(gpt2_config(num_labels=3))


def graph(**options):
    return GraphAttentionNetwork(4, 3, width=4, heads=2, out_heads=2, dropout=0.1, **options)


def tokens():
    ids = torch.randint(3, V, (8, T))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids[:, 0] % 3


def vectors():
    x = torch.randn(8, T, 8)
    return x, x[:, 0, 0].gt(0).long()


def images():
    x = torch.randn(8, 1, 8, 8)
    return x, x[:, 0, 0, 0].gt(0).long()


def nodes():
    x, edges = torch.randn(1, 6, 4), torch.tensor([[[0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0, 3]]])
    return (x, edges), torch.randint(3, (1, 6))


PLACES = {
    "bert": (bert, tokens),
    "gpt2": (gpt2, tokens),
    "torch": (TorchClassifier, vectors),
    "own": (lambda: VisionTransformer(8, 4, 1, 3, dim=8, heads=2), images),
    "graph": (graph, nodes),
}


def built(make, seed=0):
    torch.manual_seed(seed)
    return make()


def answers(posterior, inputs):
    """Outputs, and the mean and spread of all maps: these tell drawn attention from mean attention."""
    maps = posterior.attention_maps(inputs, draws=posterior.draws) if families(posterior.skeleton.shadow()) else []
    return posterior.outputs(inputs, seed=3).values, maps


def assert_same(one, other, inputs):
    first, second = answers(one, inputs), answers(other, inputs)
    assert torch.equal(first[0], second[0])
    assert [m.name for m in first[1]] == [m.name for m in second[1]]
    assert first[1]
    for before, after in zip(first[1], second[1], strict=True):
        assert torch.equal(before.mean, after.mean)
        assert torch.equal(before.sd, after.sd)
        assert (before.sd > 0).any()


@pytest.mark.parametrize("name", STOCHASTIC)
def test_a_family_is_rebuilt_from_its_description(name):
    model = Regressor(Encoder(dim=8, heads=2, depth=2, family=STOCHASTIC[name]))
    described = describe_families(model)
    assert list(described) == ["encoder.blocks.0.attention", "encoder.blocks.1.attention"]
    plain = Regressor(Encoder(dim=8, heads=2, depth=2))
    assert install_described(plain, json.loads(json.dumps(described))) is plain
    assert describe_families(plain) == described
    plain.load_state_dict(model.state_dict())  # the same parameters under the same names
    x = torch.randn(3, 5, 1)
    found = []
    for network in (model, plain):
        torch.manual_seed(1)
        found.append((network.train()(x), bf.kl_divergence(network)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("name", [n for n in STOCHASTIC if "rows" not in n and "position" not in n])
@pytest.mark.parametrize("place", PLACES)
def test_install_and_fit_come_back_on_the_plain_model(place, name, tmp_path):
    make, data = PLACES[place]
    torch.manual_seed(1)
    inputs, targets = data()
    model = install(built(make), STOCHASTIC[name]())
    posterior = bf.fit(
        model, (inputs, targets), likelihood="categorical", method=bf.Ensemble(2), training=TRAINING, strategy="looped"
    )
    posterior.save(tmp_path)
    plain = built(make, 7)
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    kinds = [type(m) for m in plain.modules()]
    loaded = bf.Posterior.load(tmp_path, plain)
    assert_same(posterior, loaded, inputs)
    assert not families(plain)
    assert [type(m) for m in plain.modules()] == kinds
    assert list(plain.state_dict()) == list(before)
    assert all(torch.equal(plain.state_dict()[key], value) for key, value in before.items())
    if hasattr(plain, "config"):
        assert plain.config._attn_implementation != "bayesformer"
    again = bf.Posterior.load(tmp_path, install(built(make, 8), STOCHASTIC[name]()))
    assert_same(posterior, again, inputs)


@pytest.mark.parametrize("place", PLACES)
def test_mle_after_install_keeps_its_attention(place, tmp_path):
    make, data = PLACES[place]
    inputs, targets = data()
    model = install(built(make), "weibull", spread=2.0)  # no parameter of its own: only the description tells
    posterior = bf.fit(model, (inputs, targets), likelihood="categorical", method="mle", training=TRAINING)
    posterior.save(tmp_path)
    loaded = bf.Posterior.load(tmp_path, built(make, 7))
    assert describe_families(loaded.model) == describe_families(model) != {}
    drawn = []
    for one in (posterior, loaded):
        with torch.no_grad(), one.shells.borrow() as shell:
            shell.load(one.theta[0])
            shell.module.train()
            torch.manual_seed(4)
            drawn.append(shell(inputs))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "method",
    [
        bf.Attention("weibull", prior="contextual", draws=3),
        bf.Attention("gaussian", data_dependent=True, draws=3),
        bf.Attention("dirichlet", spread=3.0, draws=3),
        bf.Combined("lognormal", {"prior": "contextual", "spread": 0.5}, "ensemble", {"members": 2}),
    ],
    ids=["weibull", "gaussian", "dirichlet", "combined"],
)
def test_methods_with_attention_come_back_on_the_plain_model(method, place, tmp_path):
    make, data = PLACES[place]
    inputs, targets = data()
    posterior = bf.fit(
        built(make), (inputs, targets), likelihood="categorical", method=method, training=TRAINING, strategy="looped"
    )
    loaded = bf.Posterior.load(posterior.save(tmp_path), built(make, 7))
    assert_same(posterior, loaded, inputs)


def test_frozen_weights_of_a_family_are_in_the_file(tmp_path):
    """A plain model does not have them, and other random ones would be another law."""
    inputs, targets = tokens()
    model = install(built(bert), Weibull(2.0, contextual=Contextual(4, 3)))
    posterior = bf.fit(
        model,
        (inputs, targets),
        likelihood="categorical",
        method=bf.Ensemble(2),
        infer="classifier*",
        training=TRAINING,
    )
    assert not any("contextual" in name for name in posterior.infer)
    posterior.save(tmp_path)
    loaded = bf.Posterior.load(tmp_path, built(bert))
    for ours, theirs in zip(families(posterior.skeleton.shadow()), families(loaded.skeleton.shadow()), strict=True):
        assert torch.equal(ours.contextual.inner.weight, theirs.contextual.inner.weight)
    assert_same(posterior, loaded, inputs)
    with pytest.raises(DamagedFileError, match="the frozen weights differ"):
        bf.Posterior.load(tmp_path, built(bert, 7))
    # The family's own weights are inferred or in the file: those of the model that is given do not matter.
    torch.manual_seed(9)
    installed = install(built(bert), Weibull(2.0, contextual=Contextual(4, 3)))
    assert_same(posterior, bf.Posterior.load(tmp_path, installed), inputs)


def test_another_family_is_refused_and_both_are_named(tmp_path):
    data = tokens()
    posterior = bf.fit(install(built(bert), "weibull"), data, likelihood="categorical", method="mle", training=TRAINING)
    posterior.save(tmp_path)
    with pytest.raises(DamagedFileError, match=r"(?s)'weibull'.* in the file and .*'lognormal'.* in the model"):
        bf.Posterior.load(tmp_path, install(built(bert), "lognormal"))
    with pytest.raises(DamagedFileError, match=r"(?s)'k': 10.0.* in the file and .*'k': 3.0.* in the model"):
        bf.Posterior.load(tmp_path, install(built(bert), "weibull", spread=3.0))
    with pytest.raises(DamagedFileError, match=r"(?s)layer.0.* in the file and {'bert.encoder.layer.1"):
        bf.Posterior.load(tmp_path, install(built(bert), "weibull", "*layer.1.*"))
    small = transformers.BertForSequenceClassification(bert_config(num_labels=3, num_hidden_layers=1))
    with pytest.raises(DamagedFileError, match=r"belongs to another model: unknown attention module .*layer.1"):
        bf.Posterior.load(tmp_path, small)
    plain = bf.fit(built(bert), data, likelihood="categorical", method="mle", training=TRAINING)
    plain.save(tmp_path / "plain")
    with pytest.raises(DamagedFileError, match=r"stochastic attention nowhere in the file and .*weibull"):
        bf.Posterior.load(tmp_path / "plain", install(built(bert), "weibull"))


def test_a_file_with_attention_never_loads_without_it(tmp_path):
    """Taking the description out of the file is seen, whichever part of it says that attention is stochastic."""
    data = tokens()
    for key, empty, posterior in [
        ("attention", {}, bf.fit(install(built(bert)), data, likelihood="categorical", training=TRAINING)),
        ("preparation", [], bf.fit(built(bert), data, likelihood="categorical", method="attention", training=TRAINING)),
    ]:
        folder = posterior.save(tmp_path / key)
        saved = json.loads((folder / "posterior.json").read_text())
        saved[key] = empty
        (folder / "posterior.json").write_text(json.dumps(saved))
        with pytest.raises(DamagedFileError, match="checksum differs"):
            bf.Posterior.load(folder, built(bert))


@pytest.mark.parametrize("method", ["attention", "combined"])
def test_a_file_of_the_first_version_does_not_lose_its_attention_either(method, tmp_path):
    """It does not describe families, and those without parameters leave no trace in it but the method's name."""
    model = built(bert)
    law = bf.fit(model, tokens(), likelihood="categorical", training=TRAINING).law
    space, tensors = Space.of(model), law.tensors()
    saved = {
        "format": 1,
        "version": "0.1.0",
        "names": list(space.names),
        "shapes": [list(shape) for shape in space.shapes],
        "frozen": checksum({}),
        "checksum": checksum(tensors),
        "likelihood": likelihoods.to_json(bf.Categorical()),
        "noisy_draws": 3,
        "default_draws": 3,
        "facts": {"method": {"name": method}},
    }
    write_tensors(tmp_path / "posterior.safetensors", tensors, {"format": 1})
    write_json(tmp_path / "posterior.json", saved)
    with pytest.raises(DamagedFileError, match=r"version 0.1.0 with stochastic attention, .* install it in the model"):
        bf.Posterior.load(tmp_path, model)
    loaded = bf.Posterior.load(tmp_path, install(built(bert), "weibull"))
    assert families(loaded.model)


class Gumbel(AttentionFamily):
    """A user's own: exponential scores."""

    def __init__(self, rate: float = 1.0, contextual: Contextual | None = None) -> None:
        super().__init__()
        self.rate, self.contextual = rate, contextual

    def draw(self, logits, mask, keys):
        return Weibull(self.rate).draw(logits, mask, keys)


class Forgetful(Gumbel):
    """Does not keep its argument."""

    def __init__(self, speed: float = 1.0) -> None:
        super().__init__(speed)


def test_a_family_of_ones_own_is_registered_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "KINDS", dict(registry.KINDS))
    data = tokens()
    posterior = bf.fit(
        install(built(bert), Gumbel(2.0)), data, likelihood="categorical", method=bf.Ensemble(2), training=TRAINING
    )
    with pytest.raises(ValueError, match=r"got Gumbel. Make it known: .*register_family\('gumbel', Gumbel\)"):
        posterior.save(tmp_path)
    assert not list(tmp_path.iterdir())
    register_family("gumbel", Gumbel)
    posterior.save(tmp_path)
    assert_same(posterior, bf.Posterior.load(tmp_path, built(bert)), data[0])
    del registry.KINDS["gumbel"]
    with pytest.raises(DamagedFileError, match="unknown registered attention family 'gumbel'"):
        bf.Posterior.load(tmp_path, built(bert))


def test_errors_name_argument_rule_and_value(monkeypatch):
    monkeypatch.setattr(registry, "KINDS", dict(registry.KINDS))
    with pytest.raises(ValueError, match="kind must be a class of attention families or of their parts; got .*Softmax"):
        register_family("softmax", Softmax)
    with pytest.raises(ValueError, match="name must not be taken by another class; 'weibull' is Weibull"):
        register_family("weibull", Gumbel)
    register_family("forgetful", Forgetful)
    with pytest.raises(ValueError, match=r"attention_family.speed must be a number.*; it is no attribute"):
        describe_families(install(built(bert), Forgetful()))
    described = describe_families(install(built(bert), GaussianLogits(Learned(0.2, 2))))
    with pytest.raises(ValueError, match="must not have stochastic attention installed; BertForSequenceClassification"):
        install_described(install(built(bert)), described)
    assert describe_families(built(bert)) == {}
    with pytest.raises(ValueError, match="unknown attention module 'bert.encoder.layer.0.attention.self'"):
        install_described(TorchClassifier(), described)


def test_peft_wraps_a_part_of_a_family(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["contextual", "classifier"])

    def adapted():
        torch.manual_seed(0)
        return peft.get_peft_model(install(built(bert), "weibull", prior="contextual"), config)

    data = tokens()
    posterior = bf.fit(adapted(), data, likelihood="categorical", method=bf.Ensemble(2), training=TRAINING)
    loaded = bf.Posterior.load(posterior.save(tmp_path), adapted())
    assert_same(posterior, loaded, data[0])
