"""Attention in windows: Swin's per image, sliding ones exactly zero outside, and what is no softmax refused."""

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.attention import Weibull, attention_mode, families, install, uninstall
from tests.attention_models import B, T, V

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def swin(size=16, depths=(2, 2), **options):
    torch.manual_seed(0)
    config = transformers.SwinConfig(
        image_size=size,
        patch_size=2,
        num_channels=1,
        embed_dim=8,
        depths=list(depths),
        num_heads=[2] * len(depths),
        window_size=4,
        drop_path_rate=0.0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
        **options,
    )
    return transformers.SwinForImageClassification(config)


def drawn(model, images):
    """The KL and the weights of every attention module in one pass, window by window."""
    seen = []
    handles = [
        f.register_forward_hook(lambda module, given, draw: seen.append((given[0], draw))) for f in families(model)
    ]
    outputs = model.train()(images).logits
    for handle in handles:
        handle.remove()
    return outputs, seen


@pytest.mark.parametrize("size", [16, 20], ids=["whole windows", "padded windows"])
def test_the_kl_of_swin_is_per_image_and_summed_over_windows(size):
    images = torch.randn(3, 1, size, size)
    model = install(swin(size), Weibull(3.0, 0.5, 0.7))
    _, seen = drawn(model, images)
    kl = bf.kl_divergence(model)
    assert kl.shape == (3,)
    assert max(len(draw.kl) for _, draw in seen) == 3 * (4 if size == 16 else 9)  # windows in the first stage
    expected = torch.zeros(3)
    for _, draw in seen:
        windows = len(draw.kl) // 3
        for image in range(3):
            for window in range(windows):
                expected[image] += draw.kl[image * windows + window]
    torch.testing.assert_close(kl, expected)


def test_the_kl_of_an_image_is_its_own():
    """Windows of one image stand side by side: an image alone costs what it costs among others."""
    images = torch.randn(3, 1, 16, 16)
    model = install(swin(depths=(1,)), Weibull(3.0, 0.5, 0.7)).train()  # the KL of one layer does not see draws
    model(images)
    together = bf.kl_divergence(model)
    for image in range(3):
        model(images[image : image + 1])
        torch.testing.assert_close(bf.kl_divergence(model), together[image : image + 1], rtol=1e-5, atol=1e-5)


def test_shifted_windows_hide_what_the_shift_made_neighbours():
    images = torch.randn(2, 1, 16, 16)
    model = install(swin(), Weibull(3.0, 0.5, 0.7))
    _, seen = drawn(model, images)
    plain, shifted = seen[0][1].weights, seen[1][1].weights  # (2 · 4, H, 16, 16)
    assert (plain > 0).all()
    block = model.swin.encoder.layers[0].blocks[1]
    mask = block.get_attn_mask(8, 8, torch.float32, images.device)  # (4, 16, 16)
    hidden = (mask != 0)[:, None].repeat(2, 1, 1, 1).expand_as(shifted)
    assert 0.2 < hidden.float().mean() < 0.8
    assert (shifted[hidden] == 0).all()
    assert (shifted[~hidden] > 0).all()
    k = 3.0  # and the KL counts visible entries only
    logits, weibull = seen[1][0], Weibull(k, 0.5, 0.7)
    alone = weibull(logits, ~hidden).kl
    torch.testing.assert_close(seen[1][1].kl, alone)


@pytest.mark.parametrize("size", [16, 20])
def test_mean_mode_of_swin_is_swin(size):
    images, model = torch.randn(2, 1, size, size), swin(size).eval()
    expected = model(images).logits
    install(model, Weibull())
    torch.testing.assert_close(model(images).logits, expected, rtol=1e-5, atol=1e-5)
    with attention_mode(model, "draw"):
        assert not torch.allclose(model(images).logits, expected, 0.0, 1e-6)
    uninstall(model)
    assert torch.equal(model(images).logits, expected)


def test_fit_takes_swin_and_its_bound_is_per_image():
    images, labels = torch.randn(8, 1, 16, 16), torch.arange(8) % 3
    method = bf.Attention("weibull", draws=3)
    posterior = bf.fit(
        swin(), (images, labels), likelihood="categorical", method=method, training=bf.Training(epochs=1, batch_size=4)
    )
    values = posterior.outputs(images).values
    assert values.shape == (3, 8, 3)
    assert not torch.equal(values[0], values[1])


def test_choices_of_one_question_are_one_example():
    config = transformers.BertConfig(vocab_size=V, max_position_embeddings=16, **SMALL)
    model = install(transformers.BertForMultipleChoice(config), Weibull(3.0, 0.5, 0.7)).train()
    ids = torch.randint(1, V, (B, 4, T))
    assert model(input_ids=ids).logits.shape == (B, 4)
    assert bf.kl_divergence(model).shape == (B,)


def test_rows_that_are_no_whole_examples_are_refused():
    family = Weibull()
    family.forward_pass.begin(1)
    family.forward_pass.examples = 2
    with pytest.raises(ValueError, match="got 3 rows of attention for 2 examples"):
        family(torch.randn(3, 1, 4, 4), torch.ones(1, 1, 1, 4, dtype=torch.bool))


MODELS = {
    "mistral": lambda **o: transformers.MistralModel(
        transformers.MistralConfig(
            vocab_size=V, num_key_value_heads=1, max_position_embeddings=16, sliding_window=3, **SMALL, **IDS, **o
        )
    ),
    "gemma 3": lambda **o: transformers.Gemma3TextModel(
        transformers.Gemma3TextConfig(
            vocab_size=V,
            num_key_value_heads=1,
            head_dim=4,
            max_position_embeddings=16,
            sliding_window=3,
            layer_types=["sliding_attention"] * 2,
            **SMALL,
            **IDS,
            **o,
        )
    ),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_sliding_window_is_exactly_zero_outside(name, padded):
    torch.manual_seed(0)
    model, length = install(MODELS[name](), Weibull(2.0)), 7
    mask = torch.ones(B, length, dtype=torch.long)
    mask[1, 5:] = 1 - int(padded)
    seen = []
    for family in families(model):
        family.register_forward_hook(lambda module, given, draw: seen.append(draw.weights))
    x = torch.randn(B, length, 8, requires_grad=True)
    outputs = model.train()(inputs_embeds=x, attention_mask=mask).last_hidden_state
    away = torch.arange(length)[:, None] - torch.arange(length)
    outside = (away < 0) | (away >= 3)
    assert len(seen) == 2
    for weights in seen:
        assert (weights[..., outside] == 0).all()
        assert (weights[0][..., ~outside] > 0).all()
        assert torch.isfinite(weights).all()
        if padded:
            assert (weights[1, :, :, 5:] == 0).all()
    assert torch.isfinite(bf.kl_divergence(model)).all()
    (grad,) = torch.autograd.grad(outputs[0, 6].square().sum(), x)  # two layers reach back four positions
    assert (grad[0, :2] == 0).all()
    assert (grad[0, 2:] != 0).any()


def gemma2(cap):
    config = transformers.Gemma2Config(
        vocab_size=V,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=16,
        attn_logit_softcapping=cap,
        **SMALL,
        **IDS,
    )
    return transformers.Gemma2Model(config)


def gpt_oss():
    config = transformers.GptOssConfig(
        vocab_size=V, num_key_value_heads=1, head_dim=4, num_local_experts=2, num_experts_per_tok=1, **SMALL, **IDS
    )
    return transformers.GptOssModel(config)


def test_what_changes_the_softmax_is_refused_at_install():
    with pytest.raises(
        ValueError, match=r"layers.0.self_attn \(Gemma2Attention\) uses softcap, which changes the softmax itself"
    ):
        install(gemma2(50.0))
    with pytest.raises(ValueError, match=r"\(GptOssAttention\) uses s_aux, which changes the softmax itself"):
        install(gpt_oss())
    model = install(gemma2(None)).train()  # turned off in the config
    model(torch.randint(3, V, (B, T)))
    assert (bf.kl_divergence(model) > 0).all()
    assert not families(gemma2(50.0))


def test_what_cannot_be_told_is_refused_at_install():
    from bayesformer.attention.softmax_check import check_plain_softmax

    class Odd(nn.Module):
        def forward(self, q, k, v):
            attention: object = ALL_ATTENTION_FUNCTIONS["eager"]  # noqa: F821
            return attention(self, q, k, v, None, scaling=1.0, temperature=self.heat)

    odd = Odd()
    with pytest.raises(ValueError, match=r"the model \(Odd\) uses temperature, which it does not know"):
        check_plain_softmax(odd, "")
    odd.heat = None
    check_plain_softmax(odd, "")
    space = {"nn": nn}
    exec(  # a class without source
        "class Made(nn.Module):\n"
        "    def forward(self, q):\n"
        "        return ALL_ATTENTION_FUNCTIONS['eager'](self, q, q, q, None, softcap=self.cap, **{})\n",
        space,
    )
    with pytest.raises(ValueError, match=r"\(Made\) uses softcap"):
        check_plain_softmax(space["Made"](), "layer")
