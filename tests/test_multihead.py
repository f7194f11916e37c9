"""Multi-head attention in plain functions against torch's own."""

import itertools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesformer.model.multihead import multi_head_attention_forward as ours

B, H, T, S, D = 3, 2, 5, 6, 8


def module(batch_first, **options):
    attention = nn.MultiheadAttention(D, H, batch_first=batch_first, dtype=torch.float64, **options)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    return attention


def both(attention, *args, **kwargs):
    """The module with torch's function, and with ours in its place."""
    theirs = attention(*args, **kwargs)
    with mock.patch.object(F, "multi_head_attention_forward", ours):
        return theirs, attention(*args, **kwargs)


def assert_same(theirs, ours):
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-12, rtol=1e-12)
    assert (theirs[1] is None) == (ours[1] is None)
    if theirs[1] is not None:
        torch.testing.assert_close(ours[1], theirs[1], atol=1e-12, rtol=1e-12)


def hidden(*shape):
    """True where hidden; never all of a row."""
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    return mask


def masks(queries, keys):
    yield None
    yield hidden(queries, keys)
    yield hidden(B * H, queries, keys)
    yield torch.randn(queries, keys, dtype=torch.float64)
    yield torch.randn(B * H, queries, keys, dtype=torch.float64)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["self", "cross", "key_is_query", "separate"])
def test_equals_torch(kind, batch_first, need_weights):
    widths = {"kdim": 3, "vdim": 7} if kind == "separate" else {}
    attention = module(batch_first, bias=kind != "cross", **widths)

    def tensor(length, width=D):
        shape = (B, length, width) if batch_first else (length, B, width)
        return torch.randn(shape, dtype=torch.float64)

    x, y = tensor(T), tensor(S)
    inputs = {
        "self": (x, x, x),
        "cross": (x, y, y),
        "key_is_query": (x, x, tensor(T)),
        "separate": (x, tensor(S, 3), tensor(S, 7)),
    }[kind]
    keys = T if kind in {"self", "key_is_query"} else S
    for mask, padded in itertools.product(masks(T, keys), [False, True]):
        padding = hidden(B, keys) if padded else None
        if padded and mask is not None and mask.dtype != torch.bool:  # torch wants both masks of one type
            padding = torch.zeros(B, keys, dtype=torch.float64).masked_fill(padding, -torch.inf)
        options = {"attn_mask": mask, "key_padding_mask": padding, "need_weights": need_weights}
        assert_same(*both(attention, *inputs, average_attn_weights=False, **options))
        assert_same(*both(attention, *inputs, **options))


@pytest.mark.parametrize("need_weights", [True, False])
def test_causal_hint(need_weights):
    attention, x = module(True), torch.randn(B, T, D, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    theirs, mine = both(attention, x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)
    assert_same(theirs, mine)
    torch.testing.assert_close(mine[0], attention(x, x, x, attn_mask=mask)[0])
    (gradient,) = torch.autograd.grad(both(attention, x.requires_grad_(), x, x, attn_mask=mask)[1][0][:, 1].sum(), x)
    assert (gradient[:, 2:] == 0).all()


@pytest.mark.parametrize("need_weights", [True, False])
def test_unbatched(need_weights):
    attention, x = module(False), torch.randn(T, D, dtype=torch.float64)
    mask = hidden(T)
    assert_same(*both(attention, x, x, x, key_padding_mask=mask, need_weights=need_weights))


def test_gradients_equal_torch():
    attention, x, y = module(True), torch.randn(B, T, D).double(), torch.randn(B, S, D).double()
    theirs, mine = both(attention, x, y, y, key_padding_mask=hidden(B, S))
    expected = torch.autograd.grad(theirs[0].square().sum(), list(attention.parameters()))
    found = torch.autograd.grad(mine[0].square().sum(), list(attention.parameters()))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


def test_dropout_only_in_training():
    attention, x = module(True, dropout=0.5), torch.randn(B, T, D, dtype=torch.float64)
    with mock.patch.object(F, "multi_head_attention_forward", ours):
        assert not torch.equal(attention(x, x, x)[0], attention(x, x, x)[0])
        attention.eval()
        assert torch.equal(attention(x, x, x)[0], attention(x, x, x)[0])
    assert_same(*both(attention, x, x, x))


def test_encoder_layer_with_padding():
    layer = nn.TransformerEncoderLayer(D, H, 16, batch_first=True, dtype=torch.float64).eval()
    x, padding = torch.randn(B, T, D, dtype=torch.float64), hidden(B, T)
    theirs, mine = both(layer, x, src_key_padding_mask=padding)
    torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_bias_kv": True}, "not supported here with bias_k, bias_v"),
        ({"add_zero_attn": True}, "not supported here with add_zero_attn"),
    ],
)
def test_what_is_not_supported_is_an_error(options, message):
    attention, x = module(True, **options), torch.randn(B, T, D, dtype=torch.float64)
    with mock.patch.object(F, "multi_head_attention_forward", ours), pytest.raises(ValueError, match=message):
        attention(x, x, x)


def test_wrong_arguments_are_named():
    weight, x = torch.randn(3 * D, D), torch.randn(T, B, D)
    rest = (weight, None, None, None, False, 0.0, torch.randn(D, D), None)
    with pytest.raises(ValueError, match=r"attn_mask must have shape \(5, 5\) or \(6, 5, 5\); got \(4, 5\)"):
        ours(x, x, x, D, H, *rest, attn_mask=hidden(4, T))
    with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(3, 5\); got \(5, 3\)"):
        ours(x, x, x, D, H, *rest, key_padding_mask=hidden(T, B))
    with pytest.raises(ValueError, match=r"key_padding_mask must be boolean or floating point; got torch.int64"):
        ours(x, x, x, D, H, *rest, key_padding_mask=torch.zeros(B, T, dtype=torch.long))
    with pytest.raises(ValueError, match=r"query must be \(T, B, 6\).*num_heads=2; got \(5, 3, 8\)"):
        ours(x, x, x, 6, H, *rest)
    with pytest.raises(ValueError, match="attn_mask must be given with is_causal"):
        ours(x, x, x, D, H, *rest, is_causal=True)
    with pytest.raises(ValueError, match="q_proj_weight must be given"):
        ours(x, x, x, D, H, *rest, use_separate_proj_weight=True)
