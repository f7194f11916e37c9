"""What a user does to a model after a fit is no part of the posterior, or is noticed."""

import peft
import pytest
import torch
import transformers
from torch import nn

import bayesformer as bf

IDS = torch.randint(3, 30, (8, 6), generator=torch.Generator().manual_seed(0))
LM = {"input_ids": IDS, "labels": IDS}
SHORT = bf.Training(epochs=1, batch_size=4)
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def adapted(seed=0):
    """A Llama with two LoRA adapters, the first active."""
    torch.manual_seed(seed)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, initializer_range=0.3))
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, lora)
    model.add_adapter("second", lora)
    return model


def fitted(model, **settings):
    return bf.fit(model, LM, likelihood=bf.NextToken(), method=bf.Vi(draws=2), training=SHORT, **settings)


@pytest.mark.parametrize("change", ["merge_adapter", "data"])
def test_writes_past_torchs_count_are_noticed(change):
    model = adapted()
    posterior = fitted(model)
    if change == "data":
        model.get_input_embeddings().weight.data.mul_(2)
    else:
        model.merge_adapter()
    for ask in (lambda: posterior.predict({"input_ids": IDS}), posterior.module, lambda: posterior.save("unused")):
        with pytest.raises(ValueError, match="model must not be changed after the fit"):
            ask()


def test_the_tree_is_taken_when_the_posterior_is_made():
    model, twin = adapted(), adapted()
    expected = fitted(twin).predict({"input_ids": IDS}, full=True)
    posterior = fitted(model)
    model.set_adapter("second")
    assert torch.equal(posterior.predict({"input_ids": IDS}, full=True).log_probs, expected.log_probs)


def test_a_file_says_which_adapter_was_active(tmp_path):
    fitted(adapted()).save(tmp_path)
    other = adapted()
    other.set_adapter("second")
    with pytest.raises(bf.DamagedFileError, match="belongs to a model whose adapters are .* Call set_adapter"):
        bf.Posterior.load(tmp_path, other)
    bf.Posterior.load(tmp_path, adapted())


def test_merged_adapters_are_refused_before_training():
    model = adapted()
    model.merge_adapter()
    with pytest.raises(ValueError, match="must not have merged adapters"):
        fitted(model, infer="*lora_*default*")


def test_a_checkpoint_knows_its_frozen_weights_and_its_modules(tmp_path):
    x, y = torch.randn(20, 4), torch.randint(2, (20,))

    def net(seed, inner=nn.Tanh):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), inner(), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        torch.manual_seed(0)
        model[2].reset_parameters()
        return model

    def fit(model):
        return bf.fit(model, (x, y), likelihood="categorical", training=SHORT, checkpoint=tmp_path)

    first = fit(net(1))
    assert torch.equal(fit(net(1)).theta, first.theta)
    for other in (net(2), net(1, nn.ReLU)):
        with pytest.raises(bf.DamagedFileError, match="belongs to another run"):
            fit(other)


def test_predictions_of_an_encoder_decoder_use_the_labels_given():
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config)
    data = {"input_ids": IDS, "labels": IDS.flip(1)}
    posterior = bf.fit(model, data, likelihood="categorical", training=SHORT)
    with torch.no_grad():
        logits = posterior.module()(**data).logits
    torch.testing.assert_close(posterior.predict(data, full=True).log_probs[0], logits.log_softmax(-1))
    with pytest.raises(ValueError, match="must have decoder_input_ids"):
        posterior.predict({"input_ids": IDS})


def test_checkpointed_segments_with_dropout_in_fused_attention_train():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, num_labels=2, max_position_embeddings=16)
    model = transformers.BertForSequenceClassification(config)
    model.gradient_checkpointing_enable()
    data = {"input_ids": IDS, "labels": torch.randint(2, (8,))}
    one, two = (bf.fit(model, data, likelihood="categorical", training=SHORT).theta for _ in range(2))
    assert torch.equal(one, two)
    with pytest.raises(ValueError, match="Switch gradient checkpointing off"):
        bf.fit(model, data, likelihood="categorical", method=bf.MCDropout(0.2), training=SHORT)


def _small(activation, heads=2):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, heads, 8, batch_first=True)
    return nn.Sequential(nn.Linear(3, 4), activation, nn.Unflatten(1, (1, 4)), layer, nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
def test_a_network_of_other_layers_with_the_same_weights_is_refused(tmp_path):
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    fit = bf.fit(_small(nn.Tanh()), (x, y), likelihood="categorical", method=bf.Ensemble(2), training=SHORT)
    fit.save(tmp_path / "p")
    same = bf.Posterior.load(tmp_path / "p", _small(nn.Tanh()))
    assert torch.equal(same.predict(x).probs, fit.predict(x).probs)
    with pytest.raises(bf.DamagedFileError, match="modules.1.class is 'Tanh' in the file and 'ReLU' in the model"):
        bf.Posterior.load(tmp_path / "p", _small(nn.ReLU()))
    with pytest.raises(bf.DamagedFileError, match="num_heads is 2 in the file and 1 in the model"):
        bf.Posterior.load(tmp_path / "p", _small(nn.Tanh(), 1))


def test_a_checkpoint_that_began_from_other_weights_says_so(tmp_path, caplog):
    x, y = torch.randn(20, 3), torch.randint(2, (20,))

    def fit(seed):
        torch.manual_seed(seed)
        return bf.fit(nn.Linear(3, 2), (x, y), likelihood="categorical", training=SHORT, checkpoint=tmp_path)

    first = fit(1)
    assert torch.equal(fit(1).theta, first.theta)
    assert not caplog.records
    assert torch.equal(fit(2).theta, first.theta)
    assert "began from other weights than those given now" in caplog.text
