"""Whole models run unmodified through the one-pass rule, and are left exactly as they were."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesformer.bench.tasks import TASKS
from bayesformer.data.inputs import first_tensor, map_inputs
from bayesformer.laws import gaussian
from bayesformer.model.calling import apply
from bayesformer.model.space import Space
from bayesformer.models import Encoder, SequenceClassifier, Tagger
from bayesformer.predict import one_pass
from bayesformer.predict.one_pass import (
    NoRuleError,
    OnePass,
    Settings,
    Uncertain,
    layer_shares,
)
from bayesformer.predict.one_pass.carrier import PassContext
from bayesformer.predict.one_pass.modules import standing_in


def one_pass_outputs(model, space, law, inputs, settings=None, batch_size=256):
    """The outputs of inputs held as tensors, some at a time."""
    count = len(first_tensor(inputs))
    starts = range(0, count, batch_size)
    batches = (map_inputs(inputs, lambda x, a=a: x[a : a + batch_size]) for a in starts)
    return one_pass.one_pass_outputs(model, space, law, batches, settings, count)


IDS = torch.tensor([[3, 17, 5, 40, 8], [9, 2, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
TEXT = {"input_ids": IDS, "attention_mask": MASK}
TOKENS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}


def bert(**options):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
                        max_position_embeddings=16, **options)  # fmt: skip
    return BertForSequenceClassification(config)


def gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=8, n_layer=2, n_head=2, n_positions=16, **TOKENS, **options)
    )


def gpt2_classifier():
    from transformers import GPT2Config, GPT2ForSequenceClassification

    return GPT2ForSequenceClassification(
        GPT2Config(vocab_size=50, n_embd=8, n_layer=2, n_head=2, n_positions=16, **TOKENS)
    )


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, **TOKENS, **options)  # fmt: skip
    return LlamaForCausalLM(config)


def windowed(kind, **options):
    """A model whose tokens attend to themselves and the one before, in some layers or all."""
    import transformers

    config, model = (
        getattr(transformers, f"{kind}Config"),
        getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM"),
    )
    sizes = {"head_dim": 4} if kind == "Gemma3Text" else {}
    return model(config(vocab_size=50, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
                        num_key_value_heads=1, sliding_window=2, **sizes, **TOKENS, **options))  # fmt: skip


def vit(**options):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8,
                       patch_size=4, num_labels=3, **options)  # fmt: skip
    return ViTForImageClassification(config)


def encoder(**options):
    layer = nn.TransformerEncoderLayer(8, 2, 16, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def convolutional():
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2),
                         nn.Flatten(), nn.Linear(12, 2))  # fmt: skip


IMAGES = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
SERIES = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 2)), SERIES),
    "convolutional": (convolutional, IMAGES),
    "encoder": (lambda: encoder(batch_first=True), SERIES),
    "encoder, norm first": (lambda: encoder(norm_first=True, activation="gelu"), SERIES),
    "regressor": (TASKS["toy/m1"]().model, SERIES[..., :1]),
    "vision": (TASKS["digits"]().model, IMAGES),
    "tagger": (lambda: Tagger(Encoder(8, 2, 2), 50, 3), TEXT),
    "sequence classifier": (lambda: SequenceClassifier(Encoder(8, 2, 2, positions="learned"), 50, 3), TEXT),
    "bert": (bert, TEXT),
    "bert, eager": (lambda: bert(attn_implementation="eager"), TEXT),
    "gpt2": (gpt2, TEXT),
    "gpt2, eager": (lambda: gpt2(attn_implementation="eager"), TEXT),
    "gpt2, no mask": (gpt2, {"input_ids": IDS}),
    "gpt2 classifier": (gpt2_classifier, TEXT),
    "llama": (llama, TEXT),
    "llama, eager": (lambda: llama(attn_implementation="eager"), TEXT),
    "mistral": (lambda: windowed("Mistral"), TEXT),
    "mistral, eager": (lambda: windowed("Mistral", attn_implementation="eager"), TEXT),
    "gemma 3": (lambda: windowed("Gemma3Text"), TEXT),
    "gemma 3, eager": (lambda: windowed("Gemma3Text", attn_implementation="eager"), TEXT),
    "vit": (vit, {"pixel_values": IMAGES.expand(2, 3, 8, 8)}),
}
ALL = [
    Settings(),
    Settings(propagate="full"),
    Settings(tokens="shared", queries_keys="first_order", activations="exact"),
    Settings(propagate="full", tokens="shared", layer_norm="jacobian", queries_keys="first_order"),
]


# A norm after every layer multiplies variances by up to 1e6 on padding whose embedding is 0: wider ones overflow.
SPREADS = {name: 1e-5 for name in MODELS if name.startswith(("mistral", "gemma"))}


def prepared(name):
    torch.manual_seed(3)
    sd = SPREADS.get(name, 0.05)
    build, inputs = MODELS[name]
    model = build().eval()
    space = Space.of(model)
    theta = space.pack(dict(model.named_parameters()))
    return model, space, gaussian(theta, torch.full_like(theta, sd)), inputs


def fingerprint(model):
    """Everything a pass could leave behind."""
    values = {name: value.clone() for name, value in model.state_dict().items()}
    parts = [(id(p), type(p), p.requires_grad) for p in model.parameters()]
    attributes = [(id(m), sorted(m.__dict__), m.training) for m in model.modules()]
    return values, parts, attributes


@pytest.mark.parametrize("name", MODELS)
def test_every_model_runs_unmodified_and_is_restored(name):
    model, space, weights, inputs = prepared(name)
    before = fingerprint(model)
    with torch.no_grad():
        expected = apply(model, inputs)
    for settings in ALL:
        found = one_pass_outputs(model, space, weights, inputs, settings)
        scale = expected.abs().max()
        if settings.activations == "linear":
            assert (found.mean - expected).abs().max() < 1e-5 * scale
        assert found.variance.shape == expected.shape
        assert (found.variance > 0).all()
        assert found.variance.isfinite().all()
    after = fingerprint(model)
    assert before[1:] == after[1:]
    assert all(torch.equal(value, after[0][key]) for key, value in before[0].items())


@pytest.mark.parametrize("name", ["gpt2", "llama", "encoder"])
def test_a_model_is_restored_after_an_error(name):
    model, _, weights, inputs = prepared(name)
    before = fingerprint(model)

    class Broken(nn.Module):
        def forward(self, x):
            return torch.logcumsumexp(x, 0)

    broken = nn.Sequential(model, Broken()).eval() if name == "encoder" else model
    if name != "encoder":
        head, model.lm_head = model.lm_head, nn.Sequential(model.lm_head, Broken()).eval()
    theta = weights.mean
    predictor = OnePass(broken, Space.of(broken), gaussian(theta, torch.full_like(theta, 0.1)))
    with pytest.raises(NoRuleError, match="logcumsumexp"):
        predictor(inputs)
    if name != "encoder":
        model.lm_head = head
    after = fingerprint(model)
    assert before[1:] == after[1:]


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "vision", "encoder"])
def test_one_bayesian_parameter_at_a_time_adds_variance(name):
    """Nothing is dropped on the way: each parameter that the output depends on shows in it."""
    model, space, weights, inputs = prepared(name)
    shares = layer_shares(OnePass(model, space, weights, Settings(queries_keys="first_order")), inputs)
    assert set(shares) == set(space.names)
    unused = {name for name, share in shares.items() if share <= 0}
    # Adding one vector to all keys leaves a softmax as it is; to first order with independent keys it does not.
    assert not unused, f"no variance from {unused}"
    known = layer_shares(OnePass(model, space, weights), inputs)
    quiet = {name for name, share in known.items() if share == 0}
    assert all(any(word in name for word in ("query", "key", "q_proj", "k_proj")) for name in quiet)


def test_padding_adds_no_variance():
    """What a padded token holds does not matter to the others."""
    model, space, weights, _ = prepared("bert")
    other = {**TEXT, "input_ids": IDS.masked_fill(MASK == 0, 33)}
    for settings in ALL:
        a, b = (one_pass_outputs(model, space, weights, x, settings) for x in (TEXT, other))
        assert torch.allclose(a.variance, b.variance, rtol=1e-5)


@pytest.mark.parametrize("name", ["mistral", "gemma 3"])
def test_windows_and_padding_together(name):
    """Padding outside every window attends to nothing; at real tokens all is as the eager attention has it."""
    model, space, law, inputs = prepared(name)
    eager = prepared(f"{name}, eager")[0]
    eager.load_state_dict(model.state_dict())
    real = MASK.bool()
    for settings in (Settings(), Settings(tokens="shared")):
        fused, plain = (one_pass_outputs(m, space, law, inputs, settings) for m in (model, eager))
        torch.testing.assert_close(fused.mean[real], plain.mean[real], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(fused.variance[real], plain.variance[real], rtol=1e-3, atol=0.0)
    # What lies outside the window of two tokens, in two layers, changes nothing.
    if name == "mistral":
        far = {**inputs, "input_ids": inputs["input_ids"].clone()}
        far["input_ids"][0, 0] = 44
        moved, still = (one_pass_outputs(model, space, law, x) for x in (far, inputs))
        torch.testing.assert_close(moved.variance[0, 3:], still.variance[0, 3:], rtol=1e-5, atol=0.0)
        assert not torch.allclose(moved.variance[0, 0], still.variance[0, 0], rtol=1e-3, atol=0.0)


def test_capped_logits_are_refused_before_any_number():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    model = Gemma2ForCausalLM(
        Gemma2Config(vocab_size=50, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=4, **TOKENS)
    ).eval()  # fmt: skip
    space = Space.of(model)
    theta = space.pack(dict(model.named_parameters()))
    with pytest.raises(ValueError, match="no rule for attention whose logits are capped.*attn_logit_softcapping=50.0"):
        OnePass(model, space, gaussian(theta, torch.full_like(theta, 0.1)))


def test_causal_models_do_not_look_ahead():
    for name in ("gpt2", "llama", "regressor"):
        model, space, weights, inputs = prepared(name)
        x = inputs["input_ids"] if isinstance(inputs, dict) else inputs
        changed = x.clone()
        changed[:, -1] = 7
        wrap = (lambda v: {"input_ids": v}) if isinstance(inputs, dict) else (lambda v: v)
        a, b = (one_pass_outputs(model, space, weights, wrap(v)) for v in (x, changed))
        assert torch.equal(a.variance[:, :-1], b.variance[:, :-1])
        assert not torch.equal(a.variance[:, -1], b.variance[:, -1])


def test_gelu_of_several_operations_is_one_function():
    """GPT-2's gelu_new is x · (1 + tanh(...)) of one x: its slope is the tanh GELU's."""
    model, *_ = prepared("gpt2")
    act = model.transformer.h[0].mlp.act
    x = Uncertain(torch.randn(5), torch.rand(5), PassContext(Settings()))
    with standing_in(model):
        found = act(x)
    expected = F.gelu(x, approximate="tanh")
    assert torch.allclose(found.m, expected.m, atol=1e-6)
    assert torch.allclose(found.s, expected.s, atol=1e-5)
    assert not torch.allclose(act(x).s, expected.s, rtol=0.05)  # step by step it is another thing


def test_rms_norm_of_several_operations_is_one_function():
    model, *_ = prepared("llama")
    norm = model.model.norm
    with torch.no_grad():
        norm.weight.copy_(torch.rand(8) + 0.5)
    x = Uncertain(torch.randn(2, 8), torch.rand(2, 8), PassContext(Settings(layer_norm="jacobian")))
    with standing_in(model):
        found = norm(x)
    expected = F.rms_norm(x, (8,), norm.weight, norm.variance_epsilon)
    assert torch.allclose(found.m, norm(x.m), atol=1e-6)
    assert torch.allclose(found.s, expected.s)


def test_rotary_positions_turn_variances():
    """With uncertain queries alone: (cos² s_i + sin² s_j), as the model's own rotation says."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q = Uncertain(torch.randn(1, 2, 3, 4), torch.rand(1, 2, 3, 4), PassContext(Settings()))
    angle = torch.randn(1, 3, 2).repeat(1, 1, 2)
    turned, _ = apply_rotary_pos_emb(q, torch.zeros(1, 2, 3, 4), angle.cos(), angle.sin())
    swapped = torch.cat([q.s[..., 2:], q.s[..., :2]], -1)
    assert torch.allclose(turned.s, angle.cos() ** 2 * q.s + angle.sin() ** 2 * swapped)


def test_gradient_reaches_the_variances_of_a_whole_transformer():
    model, space, weights, inputs = prepared("vision")
    predictor = OnePass(model, space, weights)
    scale = torch.tensor(1.0, requires_grad=True)
    parameters = {
        name: value.like(value.m, value.v * scale) if isinstance(value, Uncertain) else value
        for name, value in predictor.parameters.items()
    }
    total = predictor.carry(inputs, parameters).s.sum()
    (slope,) = torch.autograd.grad(total, scale)
    step = 1e-3
    higher, lower = (
        one_pass_outputs(model, space, gaussian(weights.mean, weights.sd * math.sqrt(1 + e)), inputs)
        for e in (step, -step)
    )
    difference = (higher.variance.double().sum() - lower.variance.double().sum()) / (2 * step)
    assert slope.item() == pytest.approx(difference.item(), rel=1e-2)
