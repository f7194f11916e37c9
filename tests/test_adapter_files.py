"""Posteriors over adapters beside PEFT's files: PEFT loads the mean, servers the draws, we the whole."""

import json
import re

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import bayesformer as bf
from bayesformer.predict import saving

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def base(seed=0, labels=2):
    torch.manual_seed(seed)
    return BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=labels, **SIZES)).eval()


def adapted(model=None, name="default"):
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    return get_peft_model(base() if model is None else model, config, adapter_name=name)


def data(n=24):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(40, (n, 6), generator=g)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": (ids[:, 0] > 20).long()}


def fitted(method, model=None):
    training = bf.Training(epochs=2, batch_size=12, lr=1e-2)
    return bf.fit(model or adapted(), data(), likelihood="categorical", method=method, training=training)


def batch():
    return {name: value for name, value in data(5).items() if name != "labels"}


@pytest.mark.parametrize("name", ["default", "other"])
@pytest.mark.parametrize("method", [bf.Ensemble(3), bf.Blob(draws=3)], ids=["ensemble", "blob"])
def test_peft_loads_the_mean_and_we_the_whole_on_the_plain_base(method, name, tmp_path):
    posterior = fitted(method, adapted(name=name))
    posterior.save(tmp_path)
    mean = PeftModel.from_pretrained(base(), tmp_path).eval()
    with posterior.at_mean.borrow() as shell, torch.no_grad():
        torch.testing.assert_close(mean(**batch()).logits, shell(batch()), atol=1e-6, rtol=1e-5)
    plain = base()
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    whole = bf.Posterior.load(tmp_path, plain)
    assert torch.equal(whole.predict(batch()).probs, posterior.predict(batch()).probs)
    assert plain.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in plain.state_dict().items())
    again = bf.Posterior.load(tmp_path, adapted(name=name))
    assert torch.equal(again.predict(batch()).probs, posterior.predict(batch()).probs)


def test_stochastic_attention_loads_on_the_plain_base_and_leaves_no_older_adapter(tmp_path):
    fitted(bf.Ensemble(2)).save(tmp_path)
    posterior = fitted(bf.Attention("weibull"))
    posterior.save(tmp_path)
    assert not (tmp_path / "adapter_model.safetensors").exists()  # there is no plain mean, least of all the ensemble's
    plain, state = base(), torch.get_rng_state()
    whole = bf.Posterior.load(tmp_path, plain)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(whole.predict(batch()).probs, posterior.predict(batch()).probs)


def test_a_posterior_of_another_model_takes_older_adapters_away(tmp_path):
    fitted(bf.Ensemble(2)).save(tmp_path)
    model = torch.nn.Linear(3, 2)
    x = torch.randn(20, 3)
    posterior = bf.fit(model, (x, (x[:, 0] > 0).long()), likelihood="categorical", method=bf.Laplace(structure="full"))
    posterior.save(tmp_path)
    assert torch.equal(bf.Posterior.load(tmp_path, model).predict(x).probs, posterior.predict(x).probs)


def test_loading_adapters_leaves_random_states_alone(tmp_path):
    fitted(bf.Ensemble(2)).save(tmp_path)
    plain, state = base(), torch.get_rng_state()
    bf.Posterior.load(tmp_path, plain)
    assert torch.equal(state, torch.get_rng_state())


def test_draws_are_plain_adapters_whose_average_is_the_prediction(tmp_path):
    posterior = fitted(bf.Blob(draws=4))
    folders = posterior.export_adapters(tmp_path, draws=4, seed=3)
    assert [folder.name for folder in folders] == ["draw-0", "draw-1", "draw-2", "draw-3"]
    probs = []
    for folder in folders:
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["peft_type"] == "LORA"
        assert config["inference_mode"] is True
        with torch.no_grad():
            probs.append(PeftModel.from_pretrained(base(), folder).eval()(**batch()).logits.softmax(-1))
    expected = posterior.predict(batch(), draws=4, seed=3).probs
    torch.testing.assert_close(torch.stack(probs).mean(0), expected, atol=1e-6, rtol=1e-5)
    assert posterior.model.peft_config["default"].inference_mode is False


def test_what_cannot_be_exported_or_loaded_is_refused(tmp_path):
    posterior = fitted(bf.Ensemble(2))
    posterior.save(tmp_path / "p")
    with pytest.raises(bf.DamagedFileError, match="another base model|another model"):
        bf.Posterior.load(tmp_path / "p", base(labels=5))
    with pytest.raises(bf.DamagedFileError, match="frozen weights differ"):
        bf.Posterior.load(tmp_path / "p", base(seed=7))
    with pytest.raises(ValueError, match="between 1 and 2"):
        posterior.export_adapters(tmp_path / "d", draws=3)
    assert len(posterior.export_adapters(tmp_path / "all")) == 2
    with pytest.raises(ValueError, match="no draws of an earlier export"):
        posterior.export_adapters(tmp_path / "all", draws=1)
    x, y = torch.randn(8, 2), torch.randint(2, (8,))
    plain = bf.fit(torch.nn.Linear(2, 2), (x, y), likelihood="categorical", training=bf.Training(1))
    with pytest.raises(ValueError, match="adapters of a PEFT model; got Linear"):
        plain.export_adapters(tmp_path / "d", draws=1)
    noisy = fitted(bf.MCDropout(draws=2))
    with pytest.raises(ValueError, match="random network"):
        noisy.export_adapters(tmp_path / "d", draws=2)


def test_a_base_that_peft_has_changed_is_no_plain_base(tmp_path):
    fitted(bf.Ensemble(2)).save(tmp_path)
    plain = base()
    adapted(plain)
    with pytest.raises(ValueError, match="this is a base whose layers PEFT has replaced already"):
        bf.Posterior.load(tmp_path, plain)


def with_head(seed):
    """The base with a head of its own, as one has it who loads an encoder and adds a new head."""
    model = base()
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.classifier.weight)
    return model


def test_the_untrained_head_that_no_pass_uses_may_be_any(tmp_path):
    posterior = fitted(bf.Ensemble(2), adapted(with_head(1)))
    posterior.save(tmp_path)
    expected = posterior.predict(batch()).probs
    for other in (adapted(with_head(2)), with_head(3)):
        assert torch.equal(bf.Posterior.load(tmp_path, other).predict(batch()).probs, expected)
    idle = adapted(with_head(4))
    idle.add_adapter("idle", LoraConfig(r=3, target_modules=["query"], task_type="SEQ_CLS"))
    assert torch.equal(bf.Posterior.load(tmp_path, idle).predict(batch()).probs, expected)
    changed = with_head(2)
    changed.bert.pooler.dense.bias.data += 1.0
    with pytest.raises(bf.DamagedFileError, match="frozen weights differ"):
        bf.Posterior.load(tmp_path, adapted(changed))


def test_a_head_that_passes_use_must_be_the_same(tmp_path):
    training = bf.Training(epochs=1, batch_size=12)
    only_lora = bf.fit(adapted(with_head(1)), data(), likelihood="categorical", training=training, infer="*lora_*")
    only_lora.save(tmp_path / "lora")  # the head's copy is frozen and not in the file
    with pytest.raises(bf.DamagedFileError, match="frozen weights differ"):
        bf.Posterior.load(tmp_path / "lora", adapted(with_head(2)))

    def tied(seed):  # the original embedding is the output layer, too
        torch.manual_seed(seed)
        inner = GPT2LMHeadModel(
            GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
        )
        torch.manual_seed(0)
        for name, p in inner.named_parameters():
            if "wte" not in name:
                torch.nn.init.normal_(p)
        return get_peft_model(
            inner, LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["wte"], fan_in_fan_out=True)
        )

    ids = data()["input_ids"]
    trained = bf.fit(tied(1), {"input_ids": ids, "labels": ids}, likelihood=bf.NextToken(), training=training)
    trained.save(tmp_path / "tied")
    assert bf.Posterior.load(tmp_path / "tied", tied(1))
    with pytest.raises(bf.DamagedFileError, match="frozen weights differ"):
        bf.Posterior.load(tmp_path / "tied", tied(2))


EARLIER = {
    "names of PEFT": saving.used_weights,
    "idle weights, too": lambda model: dict(model.named_parameters()),
}


@pytest.mark.parametrize("weights", EARLIER.values(), ids=EARLIER)
def test_files_with_an_earlier_fingerprint_still_load(weights, tmp_path, monkeypatch):
    def earlier(model, in_file):
        return saving.checksum({name: p for name, p in weights(model).items() if name not in in_file})

    posterior = fitted(bf.Ensemble(2), adapted(with_head(1)))
    with monkeypatch.context() as patch:
        patch.setattr(saving, "base_fingerprint", earlier)
        posterior.save(tmp_path)
    again = bf.Posterior.load(tmp_path, adapted(with_head(1)))
    assert torch.equal(again.predict(batch()).probs, posterior.predict(batch()).probs)
    other = adapted(with_head(1))
    torch.nn.init.normal_(other.base_model.model.bert.pooler.dense.weight)
    with pytest.raises(bf.DamagedFileError, match="frozen weights differ"):
        bf.Posterior.load(tmp_path, other)


def with_idle(rank=2, **settings):
    """The adapted model with a second adapter that is not active, around layers that the first leaves alone."""
    model = adapted()
    model.add_adapter("idle", LoraConfig(r=rank, target_modules=["key", "query", "pooler.dense"], **settings))
    return model


def test_an_adapter_that_is_not_active_may_be_around_any_layer(tmp_path):
    posterior = fitted(bf.Ensemble(2))
    posterior.save(tmp_path / "one")
    expected = posterior.predict(batch()).probs
    for other in (with_idle(), with_idle(modules_to_save=["LayerNorm"])):
        assert torch.equal(bf.Posterior.load(tmp_path / "one", other).predict(batch()).probs, expected)
    two = fitted(bf.Ensemble(2), with_idle())
    two.save(tmp_path / "two")
    expected = two.predict(batch()).probs
    read = PeftModel.from_pretrained(base(), tmp_path / "two", is_trainable=True)
    for other in (base(), adapted(), read, with_idle(), with_idle(rank=4)):
        assert torch.equal(bf.Posterior.load(tmp_path / "two", other).predict(batch()).probs, expected)
    other = with_idle()
    torch.nn.init.normal_(other.base_model.model.bert.pooler.dense.base_layer.weight)
    with pytest.raises(bf.DamagedFileError, match="frozen weights differ"):
        bf.Posterior.load(tmp_path / "two", other)


PROMPTS = {
    "prompt": (PromptTuningConfig, {}),
    "prefix": (PrefixTuningConfig, {}),
    "prefix by a network": (PrefixTuningConfig, {"prefix_projection": True, "encoder_hidden_size": 8}),
    "p-tuning": (PromptEncoderConfig, {"encoder_hidden_size": 8}),
}


@pytest.mark.parametrize(("kind", "settings"), PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_or_prefix_loads_on_the_plain_base(kind, settings, tmp_path):
    config = kind(task_type="SEQ_CLS", num_virtual_tokens=3, **settings)
    posterior = fitted(bf.Ensemble(2), get_peft_model(base(), config))
    posterior.save(tmp_path)
    whole = bf.Posterior.load(tmp_path, base())
    assert torch.equal(whole.predict(batch()).probs, posterior.predict(batch()).probs)
    with pytest.raises(bf.DamagedFileError, match="frozen weights differ"):
        bf.Posterior.load(tmp_path, base(seed=7))


def test_what_peft_refuses_is_told_in_its_words(tmp_path):
    fitted(bf.Ensemble(2)).save(tmp_path)
    with pytest.raises(bf.DamagedFileError, match="has an adapter that PEFT refuses: Target modules"):
        bf.Posterior.load(tmp_path, torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_of_two_active_adapters_no_file_holds_one_alone(tmp_path, caplog):
    def two():
        model = adapted()
        torch.manual_seed(5)
        model.add_adapter("b", LoraConfig(r=2, target_modules=["query"], init_lora_weights=False, task_type="SEQ_CLS"))
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.set_adapter(["default", "b"] if "b" in module.lora_A else ["default"])
        return model

    fitted(bf.Ensemble(2)).save(tmp_path)  # leaves PEFT's files of one adapter
    posterior = fitted(bf.Ensemble(2), two())
    assert any(".lora_A.b." in name for name in posterior.space.names)
    with pytest.raises(ValueError, match=r"one active adapter.* got .*'default', 'b'"):
        posterior.export_adapters(tmp_path / "draws")
    posterior.save(tmp_path)
    assert "without them" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["posterior.json", "posterior.safetensors"]
    again = bf.Posterior.load(tmp_path, two())
    assert torch.equal(again.predict(batch()).probs, posterior.predict(batch()).probs)
    with pytest.raises(bf.DamagedFileError, match="whose adapters are"):
        bf.Posterior.load(tmp_path, base())


def saved_with(tmp_path, **settings):
    fitted(bf.Ensemble(2), scaled(**{"lora_alpha": 64, **settings})).save(tmp_path)


def scaled(model=None, **settings):
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS", **settings)
    return get_peft_model(base() if model is None else model, config)


def configured(**settings):
    """The base with other settings and the same weights."""
    model = BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=2, **{**SIZES, **settings})).eval()
    model.load_state_dict(base().state_dict())
    return model


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: scaled(lora_alpha=8), "adapters.default.lora_alpha is 64 in the file and 8 in the model"),
        (lambda: scaled(lora_alpha=64, use_rslora=True), "adapters.default.use_rslora is False in the file and True"),
        (lambda: scaled(configured(layer_norm_eps=0.5), lora_alpha=64), "layer_norm_eps is 1e-12 in the file"),
        (lambda: scaled(configured(num_attention_heads=8), lora_alpha=64), "num_attention_heads is 4 in the"),
        (lambda: configured(hidden_act="relu"), "hidden_act is 'gelu' in the file and 'relu' in the model"),
    ],
    ids=["alpha", "rslora", "epsilon", "heads", "plain base"],
)
def test_equal_weights_under_other_settings_are_another_model(other, named, tmp_path):
    saved_with(tmp_path)
    with pytest.raises(bf.DamagedFileError, match=re.escape(named)):
        bf.Posterior.load(tmp_path, other())


def test_settings_that_leave_the_function_alone_may_be_any(tmp_path):
    saved_with(tmp_path)
    other = configured(use_cache=False, initializer_range=0.5, hidden_dropout_prob=0.3, id2label={0: "a", 1: "b"})
    other.config.problem_type, other.config.eos_token_id = "single_label_classification", 7
    other.config._attn_implementation = "eager"
    found = bf.Posterior.load(tmp_path, scaled(other, lora_alpha=64, lora_dropout=0.2))
    assert found.predict(batch()).probs.shape == (5, 2)
    facts = json.loads((tmp_path / "posterior.json").read_text())
    assert facts["configuration"]["adapters"]["default"]["r"] == 2


def test_rates_of_dropout_count_where_draws_are_of_dropout(tmp_path):
    fitted(bf.MCDropout(draws=2), base()).save(tmp_path)
    assert bf.Posterior.load(tmp_path, base())
    with pytest.raises(bf.DamagedFileError, match=r"hidden_dropout_prob is 0\.1 in the file and 0\.3"):
        bf.Posterior.load(tmp_path, configured(hidden_dropout_prob=0.3))


def test_files_without_a_configuration_load_as_they_did(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(saving, "configuration_of", lambda model, dropout: {})
        saved_with(tmp_path)
    assert bf.Posterior.load(tmp_path, scaled(lora_alpha=8))
    x, y = torch.randn(8, 2), torch.randint(2, (8,))
    plain = bf.fit(torch.nn.Linear(2, 2), (x, y), likelihood="categorical", training=bf.Training(1))
    assert bf.Posterior.load(plain.save(tmp_path / "plain"), torch.nn.Linear(2, 2))
    assert [*json.loads((tmp_path / "plain" / "posterior.json").read_text())["configuration"]] == ["modules"]
