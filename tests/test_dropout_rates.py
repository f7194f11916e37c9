"""Dropout under any name: where it is, at which rates, and all of it at another rate."""

import pytest
import torch
from torch import nn

from bayesformer.model.dropout import dropout_sites, observed_rates
from bayesformer.model.randomness import find_randomness, pass_noise

IDS = torch.randint(2, 30, (2, 9), generator=torch.Generator().manual_seed(0))
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def bloom(t):
    config = t.BloomConfig(
        vocab_size=30, hidden_size=16, n_layer=1, n_head=2, hidden_dropout=0.1, attention_dropout=0.2
    )
    return t.BloomModel(config), {"input_ids": IDS}


def bert(t):
    return t.BertModel(t.BertConfig(vocab_size=30, **SMALL)), {"input_ids": IDS}


def gpt2(t):
    return t.GPT2Model(t.GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2)), {"input_ids": IDS}


def llama(t):
    return t.LlamaModel(t.LlamaConfig(vocab_size=30, num_key_value_heads=1, **SMALL)), {"input_ids": IDS}


def vit(t):
    config = t.ViTConfig(image_size=8, patch_size=4, num_channels=1, hidden_dropout_prob=0.1, **SMALL)
    return t.ViTModel(config), {"pixel_values": torch.randn(2, 1, 8, 8)}


def t5(t):
    config = t.T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return t.T5Model(config), {"input_ids": IDS, "decoder_input_ids": IDS}


def encoder_layer(_):
    return nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True), {"src": torch.randn(2, 5, 16)}


def multi_head(_):
    x = torch.randn(5, 2, 16)
    return nn.MultiheadAttention(16, 2, dropout=0.1), {"query": x, "key": x, "value": x, "need_weights": False}


def functional(_):
    class Hidden(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.3, self.training)

    return Hidden(), {"x": torch.randn(2, 5)}


# Model, number of dropouts in a pass, their rates.
MODELS = {
    "bloom": (bloom, 3, {0.1, 0.2}),
    "bert": (bert, 4, {0.1}),
    "gpt2": (gpt2, 4, {0.1}),
    "llama": (llama, 1, {0.0}),
    "vit": (vit, 4, {0.0, 0.1}),
    "t5": (t5, None, {0.1}),
    "encoder layer": (encoder_layer, 4, {0.1}),
    "multi-head": (multi_head, 1, {0.1}),
    "functional": (functional, 1, {0.3}),
}
CASES = [
    (kind, attention)
    for kind in MODELS
    for attention in (("eager", "sdpa") if kind in ("bert", "gpt2", "llama", "vit") else ("",))
]


def made(kind, attention):
    model, inputs = MODELS[kind][0](pytest.importorskip("transformers"))
    if attention:
        model.set_attn_implementation(attention)

    def call():
        out = model(**inputs)
        return out if isinstance(out, torch.Tensor) else out[0]

    return model.train(), call


@pytest.mark.parametrize(("kind", "attention"), CASES)
def test_the_rates_of_a_pass_are_seen(kind, attention):
    model, call = made(kind, attention)
    modes = [module.training for module in model.eval().modules()]
    rates, (_, count, expected) = observed_rates(model, call), MODELS[kind]
    assert set(rates) == expected
    assert count in (None, len(rates))
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize(("kind", "attention"), CASES)
def test_one_rate_reaches_every_dropout(kind, attention):
    model, call = made(kind, attention)
    attributes = [getattr(module, name) for module, name in dropout_sites(model)]
    source = torch.Generator()
    with pass_noise(source.manual_seed(0), dropout_rate=0.0):
        off, again = call(), call()
    assert torch.equal(off, again)
    torch.testing.assert_close(off, made_off(model, call), rtol=1e-4, atol=1e-5)
    found = find_randomness(model, call, backward=kind != "functional", dropout_rate=0.4)
    assert found.kind == "own"
    with found.passing(source.manual_seed(1), dropout_rate=0.4):
        first, second = call(), call()
    with found.passing(source.manual_seed(1), dropout_rate=0.4):
        assert torch.equal(call(), first)
    assert not torch.equal(first, second)
    assert find_randomness(model, call, dropout_rate=0.0).kind == "none"
    assert [getattr(module, name) for module, name in dropout_sites(model)] == attributes


def made_off(model, call):
    model.eval()
    try:
        return call()
    finally:
        model.train()


def test_the_rate_replaces_all_others():
    x = torch.ones(10_000)
    with pass_noise(torch.Generator().manual_seed(0), dropout_rate=0.5):
        for rate in (0.0, 0.1):
            assert nn.functional.dropout(x, rate).unique().tolist() == [0, 2]
        assert torch.equal(nn.functional.dropout(x, 0.1, training=False), x)
    for wrong in (-0.1, 1.0):
        said = pytest.raises(ValueError, match=f"dropout_rate must be at least 0 and below 1; got {wrong}")
        with said, pass_noise(torch.Generator(), dropout_rate=wrong):
            pass


def test_sites_by_name():
    transformers = pytest.importorskip("transformers")
    names = {name for _, name in dropout_sites(bloom(transformers)[0])}
    assert names == {"p", "hidden_dropout"}
    model = nn.Module()
    model.attn_drop, model.layerdrop, model.hidden_dropout_prob, model.dropout_seed = 0.1, 0.1, 0.2, 3
    assert [name for _, name in dropout_sites(model)] == ["attn_drop", "hidden_dropout_prob"]
