"""Laplace on what people bring: curvature and linearised prediction by brute force, and every way of predicting."""

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations

import bayesformer as bf
from bayesformer.laplace import estimate
from bayesformer.likelihoods import Categorical
from bayesformer.model.space import Space
from tests.curvature_zoo import assembled, ggn, jacobian
from tests.nets import Tied

B, T, V = 5, 4, 11
F64 = torch.float64


class Scaled(nn.Module):
    """Logits times a parameter without dimensions, as in CLIP, and plus another."""

    def __init__(self, exponential):
        super().__init__()
        self.layer, self.exponential = nn.Linear(6, 3), exponential
        self.scale, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        return self.layer(x) * (self.scale.exp() if self.exponential else self.scale) + self.shift


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.head = kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.inner(x)[0][:, -1])


def two_layers(first=None, last=None):
    return nn.Sequential(first or nn.Linear(6, 5), nn.Tanh(), last or nn.Linear(5, 3))


def frozen(model, *patterns):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(p) or name.endswith(p) for p in patterns))
    return model


def normed(model, x):
    model(x)  # running averages that are not those of a new network
    return model


def kinds():
    x, images, series = torch.randn(B, 6), torch.randn(B, 2, 6, 6), torch.randn(B, T, 4)
    conv = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.ReLU()]
    return {
        "scalar": (Scaled(False), x),
        "exponential scalar": (Scaled(True), x),
        "weight norm": (two_layers(parametrizations.weight_norm(nn.Linear(6, 5))), x),
        "weight norm of the head": (two_layers(last=parametrizations.weight_norm(nn.Linear(5, 3))), x),
        "orthogonal": (two_layers(parametrizations.orthogonal(nn.Linear(6, 5))), x),
        "spectral norm": (two_layers(parametrizations.spectral_norm(nn.Linear(6, 5))), x),
        "frozen first": (frozen(two_layers(), "0."), x),
        "frozen head": (frozen(two_layers(), "2."), x),
        "only biases": (frozen(two_layers(), "weight"), x),
        "batch norm": (normed(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)), x), x),
        "cnn": (normed(nn.Sequential(*conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), images), images),
        "lstm": (Recurrent(nn.LSTM), series),
        "gru": (Recurrent(nn.GRU), series),
        "tied": (Tied(), torch.randint(5, (B, 1))),
    }


@pytest.mark.parametrize("name", kinds())
def test_curvature_and_linearised_outputs_equal_brute_force(name):
    model, x = kinds()[name]
    model, x = model.double().eval(), x.double() if x.is_floating_point() else x
    targets = torch.randint(3, (B, 1) if name == "tied" else (B,))
    data, likelihood, space = bf.Data(x, targets), Categorical(), Space.of(model)
    exact = ggn(model, likelihood, data)
    diagonal = assembled(estimate(model, likelihood, data, "diag", kind="ggn", batch_size=3), space.size)
    torch.testing.assert_close(diagonal.diagonal(), exact.diagonal(), rtol=2e-6, atol=1e-9)
    full = assembled(estimate(model, likelihood, data, "full", kind="ggn", batch_size=3), space.size)
    torch.testing.assert_close(full, exact, rtol=2e-6, atol=1e-9)
    posterior = bf.laplace(model, data, likelihood=likelihood, structure="full", curvature="ggn", prior_precision=1.0)
    covariance = (exact + torch.eye(space.size, dtype=F64)).inverse()
    rows, outputs = jacobian(model, bf.Data(x[:1], targets[:1]).take(slice(0, 1)))
    found = posterior.outputs(x)
    torch.testing.assert_close(found.mean[:1], outputs)
    expected = (rows @ covariance @ rows.T).view(found.covariance[:1].shape)
    torch.testing.assert_close(found.covariance[:1], expected, rtol=5e-6, atol=1e-9)


SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "vocab_size": V,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
ROWS = 6


def hugging_face(name):
    """Model, inputs, targets, and what else prediction needs."""
    ids, mask = torch.randint(2, V, (ROWS, T)), torch.ones(ROWS, T, dtype=torch.int64)
    mask[:3, 3:] = 0
    text, labels, words = {"input_ids": ids, "attention_mask": mask}, torch.randint(3, (ROWS,)), {"num_labels": 3}
    image = {"num_channels": 1, **words}
    if name == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, **words)), text, labels
    if name == "vit":
        sizes = {key: SMALL[key] for key in SMALL if key.startswith(("hidden", "num", "inter"))}
        config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, **image)
        return transformers.ViTForImageClassification(config), torch.randn(ROWS, 1, 8, 8), labels
    if name == "swin":
        config = transformers.SwinConfig(
            image_size=16, patch_size=2, embed_dim=4, depths=[1, 1], num_heads=[1, 2], window_size=4, **image
        )
        return transformers.SwinForImageClassification(config), torch.randn(ROWS, 1, 16, 16), labels
    tokens = {"vocab_size": V, "pad_token_id": 0, "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 1}
    if name == "t5":
        config = transformers.T5Config(d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, **tokens)
        return transformers.T5ForConditionalGeneration(config), text, torch.randint(2, V, (ROWS, 3))
    if name == "whisper":
        sides = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in
                 {"layers": 1, "attention_heads": 2, "ffn_dim": 12}.items()}  # fmt: skip
        config = transformers.WhisperConfig(
            d_model=8, num_mel_bins=4, max_source_positions=8, max_target_positions=8, **sides, **tokens
        )
        model = transformers.WhisperForConditionalGeneration(config)
        return model, {"input_features": torch.randn(ROWS, 4, 16)}, torch.randint(2, V, (ROWS, 3))
    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, **tokens, **words)
    return transformers.GPT2ForSequenceClassification(config), {"input_ids": ids}, labels


def asked(name, inputs, targets):
    """What such a model is asked with: a decoder needs its inputs."""
    extra = {"decoder_input_ids": targets} if name in ("t5", "whisper") else {}
    return {**inputs, **extra} if isinstance(inputs, dict) else inputs


@pytest.mark.parametrize("structure", ["diag", "kron", "last_layer"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "swin", "t5", "whisper"])
def test_transformers_of_every_kind(name, structure):
    model, inputs, targets = hugging_face(name)
    model.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    posterior = bf.laplace(
        model, (inputs, targets), likelihood="categorical", structure=structure, prior_precision=10.0
    )
    for way in ("linearised", "sampled"):
        probs = posterior.predict(asked(name, inputs, targets), predictive=way, draws=3, full=True).probs
        torch.testing.assert_close(probs.sum(-1), torch.ones(probs.shape[:-1]))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def adapted(half=False, head=False):
    model, inputs, targets = hugging_face("bert")
    model = model.to(torch.bfloat16) if half else model
    kept = ["classifier"] if head else None
    config = peft.LoraConfig(
        r=2, target_modules=["query", "value"], init_lora_weights=False, modules_to_save=kept, task_type="SEQ_CLS"
    )
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if half and "lora" in name:
            parameter.data = parameter.data.float()
        if not head:
            parameter.requires_grad_("lora" in name)
    return model.eval(), inputs, targets


def test_the_last_layer_is_the_one_that_gives_the_outputs_and_never_an_adapter():
    model, inputs, targets = adapted()
    data = (inputs, targets)
    message = r"'last_layer' needs the layer that gives the outputs, base_model.*classifier.*, to be inferred.*infer="
    for settings in ({"structure": "last_layer"}, {"subset": "last_layer"}):
        with pytest.raises(ValueError, match=message):
            bf.laplace(model, data, likelihood="categorical", **settings)
    model, inputs, targets = adapted(head=True)
    posterior = bf.laplace(model, data, likelihood="categorical", structure="last_layer", prior_precision=1.0)
    spread = posterior.space.views(posterior.law.variance())
    assert {name for name, variance in spread.items() if variance.any()} == {
        name for name in posterior.space.names if "classifier" in name
    }
    on_head = peft.LoraConfig(r=2, target_modules=["2"], init_lora_weights=False)
    model = peft.get_peft_model(two_layers(), on_head).eval()
    with pytest.raises(ValueError, match="outputs depend on its weights through one last layer; this one has none"):
        bf.laplace(model, (torch.randn(B, 6), torch.randint(3, (B,))), likelihood="categorical", subset="last_layer")


def test_a_head_whose_logits_are_changed_afterwards_is_the_last_layer():
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return 2 * self.head(torch.tanh(self.inner(x))).mean(1).float()

    model = Averaged().eval()
    data = bf.Data(torch.randn(B, T, 4), torch.randint(3, (B,)))
    found = estimate(model, "categorical", data, "full", subset="last_layer")
    assert found.names == (("head.weight", "head.bias"),)


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")  # an untrained adapter is far from linear
def test_float32_adapters_on_a_bfloat16_base(structure):
    model, inputs, targets = adapted(half=True)
    settings = {"likelihood": "categorical", "structure": structure, "prior_precision": 1.0}
    posterior = bf.laplace(model, (inputs, targets), **settings)
    assert posterior.law.mean.dtype == torch.float32
    for way in ("linearised", "sampled", "streamlined"):
        probs = posterior.predict(inputs, predictive=way, draws=4).probs
        assert probs.dtype == torch.float32
        torch.testing.assert_close(probs.sum(-1), torch.ones(ROWS))
    whole = bf.laplace(model.float(), (inputs, targets), **settings)
    ratio = posterior.outputs(inputs).variance / whole.outputs(inputs).variance
    assert (ratio - 1).abs().max() < 0.1  # a bfloat16 has 8 bits


def test_a_head_of_a_bfloat16_model_has_the_variance_of_a_float32_one():
    model, inputs, targets = hugging_face("bert")
    frozen(model.to(torch.bfloat16).eval(), "bert")
    settings = {"likelihood": "categorical", "structure": "last_layer", "prior_precision": 1e6}
    posterior = bf.laplace(model, (inputs, targets), **settings)
    whole = bf.laplace(frozen(model.float(), "bert"), (inputs, targets), **settings)
    ratio = posterior.outputs(inputs).variance / whole.outputs(inputs).variance
    assert (ratio - 1).abs().max() < 0.05


@pytest.mark.parametrize("structure", ["diag", "kron", "full", "block", "low_rank", "subnetwork", "last_layer"])
def test_a_bfloat16_model_throughout(structure):
    model = two_layers().bfloat16().eval()
    x, y = torch.randn(30, 6).bfloat16(), torch.randint(3, (30,))
    posterior = bf.laplace(model, (x, y), likelihood="categorical", structure=structure, prior_precision=1.0)
    for way in ("linearised", "sampled"):
        assert torch.isfinite(posterior.predict(x, predictive=way, draws=3).probs).all()
    exact = bf.laplace(
        model.float(), (x.float(), y), likelihood="categorical", structure=structure, prior_precision=1.0
    )
    ratio = posterior.outputs(x).variance / exact.outputs(x.float()).variance
    assert (ratio - 1).abs().max() < 0.1


def test_batch_norm_averages_belong_to_the_law(tmp_path):
    model, x = kinds()["batch norm"]
    posterior = bf.laplace(model.eval(), (x, torch.randint(3, (B,))), likelihood="categorical", prior_precision=5.0)
    assert set(posterior.law.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    before = posterior.predict(x).probs
    with torch.no_grad():
        model[1].running_mean.add_(3.0)  # the user's model trains on: the posterior keeps its own
    torch.testing.assert_close(posterior.predict(x).probs, before)
    loaded = bf.Posterior.load(posterior.save(tmp_path / "p"), model)
    assert torch.equal(loaded.predict(x).probs, before)


@pytest.mark.filterwarnings("ignore::bayesformer.FidelityWarning")
@pytest.mark.parametrize("structure", ["kron", "diag", "full", "block", "low_rank"])
def test_a_parameter_without_numbers_changes_nothing(structure):
    class WithNone(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.none = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x):
            return super().forward(x) + self.none.sum()

    x, model = torch.randn(20, 4), WithNone().eval()
    y, plain = torch.randint(2, (20,)), nn.Linear(4, 2).eval()
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if name != "none"})
    options = {"likelihood": "categorical", "structure": structure, "prior_precision": 1.0}
    found, expected = (bf.laplace(one, (x, y), **options) for one in (model, plain))
    torch.testing.assert_close(found.law.variance(), expected.law.variance())
    torch.testing.assert_close(found.outputs(x).covariance, expected.outputs(x).covariance)
