"""What every family of attention must keep to: exact zeros, no future, finite numbers, softmax in mean mode, its KL."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributions import Gamma

from bayesformer.attention import (
    AttentionFamily,
    MultiHeadAttention,
    Softmax,
    attention_kl,
    attention_mode,
    families,
    masked_softmax,
)
from bayesformer.models.transformer import Encoder, Regressor, Tagger
from tests.attention_zoo import EXTREME, FAMILIES, STOCHASTIC, B, H, S, T, d

MASKS = {
    "all": lambda: torch.ones(1, 1, 1, S, dtype=torch.bool),
    "causal": lambda: torch.ones(1, 1, T, S, dtype=torch.bool).tril(),
    "padding": lambda: (torch.arange(S) < torch.tensor([6, 3, 1])[:, None])[:, None, None],
    "rows without keys": lambda: torch.ones(B, H, T, S, dtype=torch.bool).tril(-1),
}


def call(family, logits, mask, keys=None):
    if not getattr(family, "wants_keys", False):
        return family(logits, mask)
    return family(logits, mask, torch.randn(*logits.shape[:-2], logits.shape[-1], d) if keys is None else keys)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_masked_weights_are_exactly_zero_and_other_rows_sum_to_one(name, kind, training):
    mask, logits = MASKS[kind](), 3 * torch.randn(B, H, T, S)
    weights, kl = call(FAMILIES[name]().train(training), logits, mask)
    full = mask.expand(B, H, T, S)
    assert weights.shape == logits.shape
    assert kl.shape == (B,)
    assert (weights[~full] == 0).all()
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), full.any(-1).float())
    assert torch.isfinite(kl).all()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_masked_has_no_say_in_weights_or_kl(name, training):
    """The gradient in a hidden logit, and in a hidden key, is exactly 0, whatever the hidden logit is."""
    family = FAMILIES[name]().train(training)
    mask = MASKS["causal"]()
    logits = torch.randn(B, H, T, S).masked_fill(~mask, 50.0).requires_grad_()
    keys = torch.randn(B, H, S, d, requires_grad=True)
    weights, kl = call(family, logits, mask, keys)
    for row in range(T):
        (grad,) = torch.autograd.grad(weights[:, :, row].square().sum(), logits, retain_graph=True)
        assert (grad[:, :, :row] == 0).all()
        assert (grad[:, :, row + 1 :] == 0).all()
        assert (grad[:, :, row, row + 1 :] == 0).all()
    if training and name != "softmax":
        of_logits = torch.autograd.grad(kl.sum(), logits, retain_graph=True, allow_unused=True)[0]
        assert of_logits is None or (of_logits[~mask.expand_as(logits)] == 0).all()


@pytest.mark.parametrize("name", STOCHASTIC)
def test_the_kl_of_a_row_does_not_see_the_future(name):
    """One row left visible at a time: its KL has no gradient in later logits or keys. (The prior counts too.)"""
    family = STOCHASTIC[name]()
    logits, keys = torch.randn(B, H, T, S, requires_grad=True), torch.randn(B, H, S, d, requires_grad=True)
    for row in range(T):
        mask = MASKS["causal"]() & (torch.arange(T) == row)[:, None]
        kl = call(family, logits, mask, keys).kl
        if not kl.requires_grad:
            continue
        of_logits, of_keys = torch.autograd.grad(kl.sum(), [logits, keys], allow_unused=True)
        assert of_logits is None or (of_logits[..., row + 1 :] == 0).all()
        assert of_keys is None or (of_keys[..., row + 1 :, :] == 0).all()


@pytest.mark.parametrize("name", STOCHASTIC)
def test_what_is_masked_is_not_in_the_kl(name):
    """A row of three keys costs what it costs among six of which three are hidden; so do other lengths."""
    family, keys = STOCHASTIC[name](), torch.randn(B, H, S, d)
    if name in {"gaussian dd rows", "dirichlet dd rows"}:
        family.spread.inner.weight.data[:, 3:] = 0  # a network that is fed rows knows the position of every key
    logits = torch.randn(B, H, T, S)
    mask = (torch.arange(S) < 3)[None, None, None]
    long = call(family, logits, mask, keys).kl
    short = call(family, logits[..., :3], mask[..., :3], keys[:, :, :3]).kl
    torch.testing.assert_close(long, short, rtol=1e-5, atol=1e-4)
    assert call(family, logits, torch.zeros_like(mask), keys).kl.abs().max() == 0


@pytest.mark.parametrize("name", STOCHASTIC)
def test_mean_mode_is_softmax_attention_bit_for_bit(name):
    family, mask = STOCHASTIC[name](), MASKS["causal"]()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        logits = torch.randn(B, H, T, S).to(dtype)
        expected = masked_softmax(logits, mask)
        with attention_mode(family.train(), "mean"):
            weights, kl = call(family, logits, mask)
        assert torch.equal(weights, expected)
        assert torch.equal(kl, torch.zeros(B, dtype=kl.dtype))
        assert torch.equal(call(family.eval(), logits, mask).weights, expected)
        with attention_mode(family, "draw"):
            assert not torch.equal(call(family, logits, mask).weights, expected)
        assert family.mode is None


@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", {**STOCHASTIC, **EXTREME})
def test_finite_values_and_gradients_at_extremes(name, dtype, scale):
    """CompressedRows of one key, rows of none, logits of ±100, the corners of every law's parameters."""
    family = {**STOCHASTIC, **EXTREME}[name]()
    for kind in ("causal", "rows without keys", "padding"):
        logits = (scale * torch.randn(B, H, T, S)).to(dtype).requires_grad_()
        keys = torch.randn(B, H, S, d).to(dtype).requires_grad_()
        weights, kl = call(family, logits, MASKS[kind](), keys)
        assert weights.dtype == dtype
        assert torch.isfinite(weights).all()
        assert torch.isfinite(kl).all()
        loss = (weights.float() * torch.randn(B, H, T, S)).sum() + kl.sum()
        inputs = [logits, keys, *family.parameters()]
        for grad in torch.autograd.grad(loss, inputs, allow_unused=True):
            assert grad is None or torch.isfinite(grad).all()


@pytest.mark.parametrize("name", STOCHASTIC)
def test_any_length_but_for_tables_of_positions(name):
    family = STOCHASTIC[name]()
    fixed = "position" in name or "rows" in name
    logits, mask = torch.randn(1, H, 9, 9), torch.ones(1, 1, 1, 9, dtype=torch.bool)
    if fixed:
        with pytest.raises(ValueError, match="length=8 must see no longer sequence; got 9 positions"):
            call(family, logits, mask)
    else:
        assert call(family, logits, mask).weights.shape == (1, H, 9, 9)
    assert call(family, logits[..., :1, :1], mask[..., :1]).weights.shape == (1, H, 1, 1)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_axes_before_the_batch_are_examples_of_their_own(name):
    family, mask = STOCHASTIC[name](), MASKS["causal"]()
    logits, keys = torch.randn(4, B, H, T, S), torch.randn(4, B, H, S, d)
    torch.manual_seed(0)
    together = call(family, logits, mask, keys)
    torch.manual_seed(0)
    flat = call(family, logits.flatten(0, 1), mask, keys.flatten(0, 1))
    torch.testing.assert_close(together.weights.flatten(0, 1), flat.weights)
    torch.testing.assert_close(together.kl.flatten(), flat.kl)


@pytest.mark.parametrize("name", FAMILIES)
def test_causality_through_a_model(name):
    """Outputs up to t have a gradient of exactly 0 in inputs after t, in training and evaluation."""
    keyed = "contextual" in name
    model = Regressor(Encoder(dim=8 if keyed else 6, heads=2, depth=2, causal=True, family=FAMILIES[name]))
    x = torch.randn(2, 5, 1, requires_grad=True)
    for training in (True, False):
        outputs = model.train(training)(x)
        for t in range(5):
            (grad,) = torch.autograd.grad(outputs[:, t].sum(), x, retain_graph=True)
            assert (grad[:, t + 1 :] == 0).all()
            assert (grad[:, : t + 1] != 0).any()


class Leaky(AttentionFamily):
    """Dirichlet attention as in Cinquin et al. (2021), by torch's Gamma: masked logits, no mask on what is drawn.

    At the sharpness it starts from, 1e-3, almost every Gamma draw underflows to the smallest number there is, for
    hidden keys as for others. With whatever keeps 0/0 away, such a row is uniform over all keys, future included.
    """

    def draw(self, logits, mask, keys):
        alpha = (9e-4 * masked_softmax(logits, mask)).clamp_min(1e-8)
        x = Gamma(alpha, 1.0).rsample() + 1e-8
        return x / x.sum(-1, keepdim=True), logits.new_zeros(len(logits))


def test_the_contract_catches_the_leak_of_rows_that_underflow():
    mask = MASKS["causal"]()
    weights = Leaky()(torch.randn(B, H, T, S), mask).weights
    assert (weights[~mask.expand_as(weights)] > 0.01).float().mean() > 0.5
    model = Regressor(Encoder(dim=6, heads=2, causal=True, family=Leaky))
    x = torch.randn(2, 5, 1, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
    assert (grad[:, 1:] != 0).any()


def test_padding_adds_nothing_to_the_kl_of_a_model():
    """Neither as keys nor as queries: a padded example costs what it costs alone."""
    for name in ("weibull", "gaussian dd", "dirichlet"):
        model = Tagger(Encoder(dim=8, heads=2, depth=1, family=STOCHASTIC[name]), 11, 3)
        ids = torch.randint(11, (2, 7))
        valid = (torch.arange(7) < torch.tensor([7, 4])[:, None]).long()
        model(ids, valid)
        padded = attention_kl(model)
        model(ids[1:, :4])
        alone = attention_kl(model)
        torch.testing.assert_close(padded[1:], alone, rtol=1e-4, atol=1e-4)


def test_the_kl_of_a_model_is_that_of_its_blocks_in_the_latest_pass():
    model = Regressor(Encoder(dim=8, heads=2, depth=2, family=STOCHASTIC["weibull"]))
    x = torch.randn(B, T, 1)
    seen = []
    for family in families(model):
        family.register_forward_hook(lambda module, given, draw: seen.append(draw.kl))
    outputs, kl = model(x), attention_kl(model)
    assert len(seen) == len(families(model)) == 2
    torch.testing.assert_close(seen[0] + seen[1], kl)
    (outputs.sum() + kl.sum()).backward()
    copied = copy.deepcopy(model)  # the KL has a graph, which cannot be copied
    with pytest.raises(ValueError, match="must be called before its KL is read"):
        attention_kl(copied)
    with pytest.raises(ValueError, match="must have stochastic attention; Linear has none"):
        attention_kl(nn.Linear(2, 2))


def test_dropout_of_weights_comes_after_the_draw():
    family = STOCHASTIC["weibull"]()
    family.dropout.p = 0.5
    weights = family(torch.randn(B, H, T, S), MASKS["all"]()).weights
    dropped = (weights == 0).float().mean()
    assert abs(dropped - 0.5) < 5 * math.sqrt(0.25 / weights.numel())
    assert family.eval()(torch.randn(B, H, T, S), MASKS["all"]()).weights.min() > 0


def test_attention_gives_keys_only_to_a_family_that_wants_them():
    attention = MultiHeadAttention(8, H, STOCHASTIC["weibull contextual"]())
    assert attention(torch.randn(B, T, 8), MASKS["all"]()[..., :T]).shape == (B, T, 8)
    with pytest.raises(ValueError, match="keys must be given to a family with a contextual prior; got None"):
        STOCHASTIC["weibull contextual"]()(torch.randn(B, H, T, S), MASKS["all"]())
    assert MultiHeadAttention(8, H, Softmax())(torch.randn(B, T, 8), MASKS["all"]()[..., :T]).shape == (B, T, 8)
