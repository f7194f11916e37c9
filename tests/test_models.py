"""The reference models: causality, padding, positions, initial law, and the transforms of torch.func."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from bayesformer.attention import AttentionFamily, Linear, Softmax, attention_kl, masked_softmax
from bayesformer.likelihoods import Gaussian
from bayesformer.models import (
    CnnLstm,
    Encoder,
    FeatureTransformer,
    MlpRegressor,
    Regressor,
    SequenceClassifier,
    Tagger,
    VisionTransformer,
)
from bayesformer.models.cnn_lstm import LstmLayer
from bayesformer.models.transformer import LearnedPositions, SinusoidalPositions, sinusoids
from bayesformer.models.vit import patches, some_tokens
from tests.laws import assert_law

B, T, D, V, C = 3, 7, 8, 11, 4


def tokens() -> torch.Tensor:
    return torch.randint(V, (B, T))


def valid() -> torch.Tensor:
    """Lengths 7, 4 and 1, as Hugging Face writes them."""
    return (torch.arange(T) < torch.tensor([[7], [4], [1]])).long()


def encoder(**settings) -> Encoder:
    return Encoder(**{"dim": D, "depth": 2, "heads": 2, "max_length": 9} | settings)


MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "regressor": (
        lambda **s: Regressor(encoder(causal=True, **s), inputs=2, outputs=3),
        lambda: (torch.randn(B, T, 2),),
    ),
    "tagger": (lambda **s: Tagger(encoder(**s), V, C), lambda: (tokens(), valid())),
    "classifier": (
        lambda **s: SequenceClassifier(encoder(positions="learned", **s), V, C),
        lambda: (tokens(), valid()),
    ),
    "vit": (lambda **s: VisionTransformer(6, 2, 3, C, **{"dim": D} | s), lambda: (torch.randn(B, 3, 6, 6),)),
    "features": (lambda **s: FeatureTransformer(encoder(**s), 5, outputs=2), lambda: (torch.randn(B, 5),)),
}


def as_double(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x.double() if x.is_floating_point() else x for x in inputs)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("regressor", (B, T, 6)), ("tagger", (B, T, C)), ("classifier", (B, C)), ("vit", (B, C)), ("features", (B, 4))],
)
def test_shapes_on_any_device_and_type(name, shape):
    build, inputs = MODELS[name]
    model, args = build(), inputs()
    assert model(*args).shape == shape
    assert model.to("meta")(*(x.to("meta") for x in args)).shape == shape  # nothing is made on a fixed device
    assert build().double()(*as_double(args)).dtype == torch.float64


def test_regressor_outputs_fit_the_gaussian_likelihood():
    model = Regressor(Encoder(D), inputs=1, outputs=2)
    Gaussian(scale=None).check(model(torch.randn(B, T, 1)), torch.randn(B, T, 2))


def test_parameter_count_of_the_toy_model():
    model = Regressor(Encoder(64, causal=True, positions="learned", max_length=24))
    affine = {
        "in": 1 * 64 + 64,
        "qkvo": 4 * (64 * 64 + 64),
        "mlp": 64 * 256 + 256 + 256 * 64 + 64,
        "out": 64 * 2 + 2,
    }
    norms, positions = 3 * 2 * 64, 24 * 64
    assert sum(p.numel() for p in model.parameters()) == sum(affine.values()) + norms + positions == 51_906


# Causality and padding


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("name", ["regressor", "tagger"])
def test_causal_model_has_no_gradient_from_the_future(name, positions):
    settings = {"causal": True, "positions": positions}
    model = Regressor(encoder(**settings), D) if name == "regressor" else Tagger(encoder(**settings), V, C)
    if name == "tagger":
        model.embedding = nn.Identity()  # take embedded tokens, which have gradients
    x = torch.randn(1, T, D)
    jacobian = torch.autograd.functional.jacobian(lambda x: model(x).sum((0, -1)), x)[:, 0]  # (T out, T in, D)
    size = jacobian.abs().sum(-1)
    assert (size.triu(1) == 0).all()
    assert (size[torch.ones(T, T).tril() > 0] > 0).all()


def test_bidirectional_encoder_sees_everything():
    assert (influence(encoder()) > 0).all()


def test_attention_is_the_only_place_positions_mix():
    model = encoder()
    for block in model.blocks:
        nn.init.zeros_(block.attention.out.weight)
    size = influence(model)
    assert (size.diagonal() > 0).all()
    assert torch.equal(size, torch.diag(size.diagonal()))


def influence(model: Encoder) -> torch.Tensor:
    """(T out, T in): size of the gradient. Outputs are weighted, since a LayerNorm's plain sum is 0."""
    x, weights = torch.randn(1, T, D), torch.randn(D)
    return torch.autograd.functional.jacobian(lambda x: (model(x) @ weights)[0], x)[:, 0].abs().sum(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [Tagger, SequenceClassifier])
def test_padding_does_not_matter(kind, causal):
    model, ids, kept = kind(encoder(causal=causal), V, C).double(), tokens(), valid()
    rows = kept.bool() if kind is Tagger else slice(None)
    expected = model(ids, attention_mask=kept)[rows]
    other = torch.where(kept.bool(), ids, tokens())
    assert not torch.equal(other, ids)
    torch.testing.assert_close(model(other, attention_mask=kept)[rows], expected, atol=1e-12, rtol=0)
    wide, wide_kept = torch.cat([ids, tokens()], 1), torch.cat([kept, torch.zeros_like(kept)], 1)
    outputs = model(wide, attention_mask=wide_kept)
    outputs = outputs[:, :T][rows] if kind is Tagger else outputs
    torch.testing.assert_close(outputs, expected, atol=1e-12, rtol=0)
    for b, length in enumerate(kept.sum(1)):  # each sequence by itself, without padding and without a mask
        alone = model(ids[b : b + 1, :length])[0]
        batched = model(ids, kept.bool())[b]
        torch.testing.assert_close(batched[:length] if kind is Tagger else batched, alone, atol=1e-12, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_on_the_left_does_not_matter_and_is_finite(causal):
    model, ids, kept = Tagger(encoder(causal=causal), V, C).double(), tokens(), valid().flip(1)
    other = torch.where(kept.bool(), ids, tokens())
    outputs, moved = model(ids, kept), model(other, kept)
    assert torch.isfinite(outputs).all()  # a causal row that sees only padding has no key at all
    torch.testing.assert_close(moved[kept.bool()], outputs[kept.bool()], atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", [Tagger, SequenceClassifier])
def test_padding_has_no_gradient_and_a_sequence_of_padding_no_nan(kind):
    model, kept = kind(encoder(), V, C), valid()
    kept[2] = 0
    model.embedding = nn.Identity()
    x = torch.randn(B, T, D, requires_grad=True)
    outputs = model(x, kept)
    loss = outputs[kept.bool()].square().sum() if kind is Tagger else outputs.square().sum()
    loss.backward()
    assert torch.isfinite(outputs).all()
    assert (x.grad[kept == 0] == 0).all()
    assert (x.grad[kept == 1] != 0).any(-1).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_classifier_is_the_mean_of_valid_tokens():
    model, ids, kept = SequenceClassifier(encoder(), V, C).double(), tokens(), valid()
    x = model.encoder(model.embedding(ids), kept)
    for b, length in enumerate(kept.sum(1)):
        torch.testing.assert_close(model(ids, kept)[b], model.projection(sum(x[b, :length]) / length))
    torch.testing.assert_close(model(ids), model(ids, torch.ones_like(ids)))


# Positions


@pytest.mark.parametrize("dim", [6, 7])
def test_sinusoids_follow_the_formula(dim):
    table = sinusoids(50, dim)
    for t in range(50):
        for i in range(dim):
            angle = t / 10_000 ** (2 * (i // 2) / dim)
            expected = math.cos(angle) if i % 2 else math.sin(angle)
            assert table[t, i].item() == pytest.approx(expected, abs=1e-7)


def test_positions_are_added():
    x = torch.randn(B, T, D)
    torch.testing.assert_close(SinusoidalPositions(D, 9)(x), x + sinusoids(T, D))
    learned = LearnedPositions(D, 9)
    torch.testing.assert_close(learned(x), x + learned.table[:T])


def test_tables_extend_beyond_max_length():
    short, x = encoder(causal=True, max_length=3), torch.randn(B, T, D)
    long = encoder(causal=True, max_length=T)
    long.load_state_dict(short.state_dict())
    assert torch.equal(short(x, valid()), long(x, valid()))


def test_tables_are_not_saved():
    model = encoder(causal=True)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_without_positions_the_encoder_is_permutation_equivariant():
    model, x, order = encoder().double(), torch.randn(B, T, D, dtype=torch.float64), torch.randperm(T)
    assert (model(x[:, order]) - model(x)[:, order]).abs().max() > 1e-3
    model.positions = nn.Identity()
    torch.testing.assert_close(model(x[:, order]), model(x)[:, order], atol=1e-12, rtol=0)


# Against torch's own


@pytest.mark.parametrize("heads", [1, 2])
def test_block_equals_the_layer_of_torch(heads):
    block = Encoder(D, 1, heads, causal=True).double().blocks[0]
    layer = nn.TransformerEncoderLayer(
        D,
        heads,
        4 * D,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
        dtype=torch.float64,
    )
    a = block.attention
    with torch.no_grad():
        layer.self_attn.in_proj_weight.copy_(torch.cat([a.query.weight, a.key.weight, a.value.weight]))
    layer.self_attn.out_proj.load_state_dict(a.out.state_dict())
    layer.linear1.load_state_dict(block.mlp.up.state_dict())
    layer.linear2.load_state_dict(block.mlp.down.state_dict())
    x, mask = torch.randn(B, T, D, dtype=torch.float64), torch.ones(T, T, dtype=torch.bool).tril()
    torch.testing.assert_close(block(x, mask), layer(x, src_mask=~mask), atol=1e-12, rtol=0)


def test_encoder_ends_in_a_layer_norm():
    outputs = encoder()(10 * torch.randn(B, T, D))
    torch.testing.assert_close(outputs.mean(-1), torch.zeros(B, T), atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.var(-1, correction=0), torch.ones(B, T), atol=1e-3, rtol=0)


def test_patches_equal_a_strided_convolution():
    images, embedding = torch.randn(B, 3, 8, 12).double(), Linear(3 * 4 * 4, D).double()
    expected = nn.functional.conv2d(images, embedding.weight.view(D, 3, 4, 4), embedding.bias, stride=4)
    torch.testing.assert_close(embedding(patches(images, 4)), expected.flatten(2).mT)


# Rows of features


def test_a_feature_is_the_token_x_w_plus_b_after_a_class_token():
    model, x = FeatureTransformer(encoder(), 5), torch.randn(B, 5)
    first, w, b = model.embedding.weight.T[0], model.embedding.weight.T[1:6], model.embedding.weight.T[6:]
    tokens = model.embedding(model.rows(x))  # (B, 1 + 5, D)
    torch.testing.assert_close(tokens[:, 0], first.expand(B, -1))
    for j in range(5):
        torch.testing.assert_close(tokens[:, 1 + j], x[:, j : j + 1] * w[j] + b[j])


@pytest.mark.parametrize("build", [lambda: FeatureTransformer(encoder(), 5), lambda: MlpRegressor(5)])
def test_rows_are_answered_one_by_one_and_every_feature_counts(build):
    model, x = build().double(), torch.randn(7, 5, dtype=torch.float64)
    order = torch.randperm(7)
    torch.testing.assert_close(model(x[order]), model(x)[order])
    jacobian = torch.autograd.functional.jacobian(model, x)  # (7, 2, 7, 5)
    assert (jacobian.diagonal(dim1=0, dim2=2) != 0).all()
    assert (jacobian.permute(0, 2, 1, 3)[~torch.eye(7, dtype=torch.bool)] == 0).all()


def test_the_answer_is_read_off_the_class_token():
    model, x = FeatureTransformer(encoder(), 5), torch.randn(B, 5)
    encoded = model.encoder(math.sqrt(D) * model.embedding(model.rows(x)))
    torch.testing.assert_close(model(x), model.projection(encoded[:, 0]))


def test_mlp_regressor_is_the_network_of_the_uci_comparisons():
    model = MlpRegressor(13)
    assert sum(p.numel() for p in model.parameters()) == 13 * 50 + 50 + 50 * 2 + 2
    plain = nn.Sequential(model.hidden, nn.ReLU(), model.projection)
    x = torch.randn(4, 13)
    torch.testing.assert_close(model(x), plain(x))
    Gaussian(scale=None).check(model(x), torch.randn(4, 1))


# Initial law


def owners(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if list(module.parameters(recurse=False))]


@pytest.mark.parametrize("order", [list, reversed])
@pytest.mark.parametrize("name", list(MODELS))
def test_reset_parameters_renews_every_parameter_in_any_order(name, order):
    model = MODELS[name][0]()
    for p in model.parameters():
        nn.init.constant_(p, 7.0)
    for module in order([m for m in model.modules() if hasattr(m, "reset_parameters")]):
        module.reset_parameters()
    assert all(hasattr(module, "reset_parameters") for module in owners(model))
    for key, p in model.named_parameters():
        assert (p != 7).all(), key
    for module in owners(model):
        if isinstance(module, nn.Linear):
            assert module.weight.abs().max() <= math.sqrt(6 / sum(module.weight.shape))
            assert module.bias is None or torch.equal(module.bias, torch.zeros_like(module.bias))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Regressor(Encoder(64, 2, positions="learned"), inputs=64, outputs=32),
        lambda: Tagger(Encoder(64), 300, 50),
        lambda: SequenceClassifier(Encoder(64), 300, 50),
        lambda: VisionTransformer(28, 4, 3, 50),
        lambda: FeatureTransformer(Encoder(64), 30, outputs=40),
        lambda: MlpRegressor(30, outputs=40),
    ],
)
def test_every_matrix_starts_uniform_within_glorots_bound(build):
    model = build()
    for key, p in model.named_parameters():
        if p.dim() == 2:
            bound = math.sqrt(6 / sum(p.shape))
            assert_law(p.detach() / (2 * bound) + 0.5, "uniform")
        else:
            assert torch.equal(p, torch.full_like(p, float("norm.weight" in key)))


# KL, dropout, families


class Fixed(AttentionFamily):
    """Softmax with a KL of 2, 3, 4, ... for the examples."""

    def draw(self, logits, mask, keys):
        return masked_softmax(logits, mask), torch.arange(len(logits)) + 2.0


@pytest.mark.parametrize("name", list(MODELS))
def test_kl_is_the_sum_over_blocks_in_the_latest_pass(name):
    build, inputs = MODELS[name]
    model, args = build(family=Fixed, depth=3), inputs()
    for _ in range(2):
        model(*args)
        assert torch.equal(attention_kl(model), 3 * torch.tensor([2.0, 3.0, 4.0]))
    model.eval()(*args)
    assert torch.equal(attention_kl(model), torch.zeros(B))


def test_every_block_gets_its_own_family():
    blocks = encoder(family=partial(Softmax, dropout=0.2)).blocks
    assert blocks[0].attention.family is not blocks[1].attention.family
    assert blocks[0].attention.family.dropout.p == 0.2


@pytest.mark.parametrize("name", list(MODELS))
def test_dropout_acts_at_every_site_in_training_only(name):
    build, inputs = MODELS[name]
    model, args = build(dropout=0.4, depth=2), inputs()
    sites = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p == 0.4]
    assert len(sites) == 1 + 2 * 2
    for site in sites:
        model.eval()
        expected = model(*args)
        assert torch.equal(model(*args), expected)
        site.train()
        assert not torch.equal(model(*args), expected)


# torch.func


@pytest.mark.parametrize("name", list(MODELS))
def test_vmap_over_parameters_equals_a_loop(name):
    build, inputs = MODELS[name]
    model, args = build().double(), as_double(inputs())
    many = {key: p + 0.3 * torch.randn(4, *p.shape) for key, p in model.named_parameters()}

    def run(params):
        return functional_call(model, params, args)

    outputs = vmap(run)(many)
    loop = torch.stack([run({key: p[i] for key, p in many.items()}) for i in range(4)])
    torch.testing.assert_close(outputs, loop, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", list(MODELS))
def test_gradients_of_each_example_equal_a_loop(name):
    build, inputs = MODELS[name]
    model, args = build().double(), as_double(inputs())
    params = {key: p.detach() for key, p in model.named_parameters()}

    def loss(params, *example):
        return functional_call(model, params, tuple(x[None] for x in example)).square().sum()

    grads = vmap(torch.func.grad(loss), (None, *[0] * len(args)))(params, *args)
    for b in range(B):
        one = torch.func.grad(loss)(params, *(x[b] for x in args))
        for key in params:
            torch.testing.assert_close(grads[key][b], one[key], atol=1e-11, rtol=1e-11)


def test_vmap_draws_dropout_for_each_member():
    model, args = MODELS["regressor"][0](dropout=0.5), MODELS["regressor"][1]()
    many = {key: p.expand(4, *p.shape) for key, p in model.named_parameters()}
    outputs = vmap(lambda params: functional_call(model, params, args), randomness="different")(many)
    assert all(not torch.equal(outputs[0], outputs[i]) for i in range(1, 4))


@pytest.mark.parametrize("name", list(MODELS))
def test_gradients_are_those_of_finite_differences(name):
    build, inputs = MODELS[name]
    model, args = build(dim=4, heads=2, depth=1, mlp_ratio=1).double(), as_double(inputs())
    keys = [key for key, _ in model.named_parameters()]
    values = tuple(p.detach() + 0.1 * torch.randn_like(p) for p in model.parameters())

    def f(*values):
        return functional_call(model, dict(zip(keys, values, strict=True)), args)

    assert torch.autograd.gradcheck(f, tuple(v.requires_grad_() for v in values), fast_mode=True)


# Errors


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Encoder(10, heads=3), "dim must be a multiple of heads; got dim=10, heads=3."),
        (lambda: Encoder(8, depth=0), "depth must be at least 1; got 0."),
        (lambda: Encoder(8, max_length=0), "max_length must be at least 1; got 0."),
        (lambda: Encoder(8, dropout=-0.1), r"dropout must lie in \[0, 1\); got -0.1."),
        (lambda: Encoder(8, positions="learnt"), "unknown positions 'learnt'. Did you mean 'learned'?"),
        (
            lambda: encoder(positions="learned")(torch.randn(1, 10, D)),
            "a sequence with learned positions must be at most max_length=9; got 10.",
        ),
        (lambda: Regressor(encoder(), outputs=0), "outputs must be at least 1; got 0."),
        (lambda: Tagger(encoder(), V, 0), "classes must be at least 1; got 0."),
        (lambda: SequenceClassifier(encoder(), 0, C), "vocabulary must be at least 1; got 0."),
        (
            lambda: VisionTransformer(28, 5, 1, 10),
            "image_size must be a multiple of patch_size; got image_size=28, patch_size=5.",
        ),
        (
            lambda: VisionTransformer(8, 4, 1, 10)(torch.randn(2, 8, 8)),
            r"images must have shape \(B, 1, 8, 8\); got \(2, 8, 8\).",
        ),
        (lambda: FeatureTransformer(encoder(), 0), "features must be at least 1; got 0."),
        (
            lambda: FeatureTransformer(encoder(), 5)(torch.randn(2, 4)),
            r"inputs must have shape \(B, 5\); got \(2, 4\).",
        ),
        (lambda: MlpRegressor(5, hidden=0), "hidden must be at least 1; got 0."),
    ],
)
def test_errors_name_argument_rule_and_value(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_the_lstm_of_linear_layers_is_that_of_torch():
    ours, theirs = LstmLayer(3, 5), nn.LSTM(3, 5, batch_first=True)
    with torch.no_grad():
        ours.of_input.bias.normal_()
        theirs.weight_ih_l0.copy_(ours.of_input.weight)
        theirs.bias_ih_l0.copy_(ours.of_input.bias)
        theirs.weight_hh_l0.copy_(ours.of_state.weight)
        theirs.bias_hh_l0.zero_()
    x = torch.randn(2, 7, 3)
    torch.testing.assert_close(ours(x), theirs(x)[1][0][0])


def test_the_cnn_lstm_has_the_size_of_the_paper_and_reads_the_order_of_words():
    assert sum(p.numel() for p in CnnLstm(20_000).parameters()) == pytest.approx(2.64e6, rel=1e-3)
    model = CnnLstm(50, dim=4, filters=3, kernel=2, pool=2, hidden=5)
    ids = torch.randint(1, 50, (3, 12))
    assert not torch.allclose(model(ids), model(ids.flip(-1)))
    torch.testing.assert_close(torch.func.vmap(lambda row: model(row[None])[0])(ids), model(ids))
    with pytest.raises(ValueError, match="pool must be"):
        CnnLstm(50, pool=0)


def test_token_dropout_sees_a_share_of_the_patches_in_training_and_all_in_evaluation():
    torch.manual_seed(0)
    model = VisionTransformer(8, 2, 1, 3, dim=4, depth=1, token_keep=0.5)
    plain = VisionTransformer(8, 2, 1, 3, dim=4, depth=1)
    plain.load_state_dict(model.state_dict())
    images = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(model.eval()(images), plain.eval()(images))
    seen = []
    model.encoder.blocks[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[-2]))
    first, second = model.train()(images), model(images)
    assert seen == [8, 8]
    assert not torch.allclose(first, second)
    with pytest.raises(ValueError, match="token_keep must be above 0 and at most 1; got 0"):
        VisionTransformer(8, 2, 1, 3, token_keep=0)


def test_tokens_are_kept_with_equal_chance_and_never_twice():
    tokens = torch.arange(6.0).expand(4000, 6).unsqueeze(-1)
    kept = some_tokens(tokens, 1 / 3).squeeze(-1)
    assert kept.shape == (4000, 2)
    assert (kept[:, 0] != kept[:, 1]).all()
    shares = torch.stack([(kept == i).any(-1).double().mean() for i in range(6)])
    torch.testing.assert_close(shares, torch.full((6,), 1 / 3, dtype=torch.float64), atol=0.03, rtol=0)
    assert some_tokens(tokens, 0.01).shape == (4000, 1, 1)
