"""Softmax attention against torch's own, its masks, its derivatives."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp, vmap
from torch.nn import functional as F

from bayesformer.attention import AttentionFamily, Linear, MultiHeadAttention, Softmax, attention_kl, masked_softmax
from bayesformer.attention.multi_head import Dropout
from tests.laws import assert_law, assert_mean

B, H, T, S, D = 3, 2, 5, 6, 8


def causal(length: int) -> torch.Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril()


def random_mask(*shape: int) -> torch.Tensor:
    """Some keys hidden, but never all of a row's."""
    mask = torch.rand(shape) < 0.5
    mask[..., 0] |= ~mask.any(-1)
    return mask


@pytest.mark.parametrize("shape", [(B, H, T, S), (1, 1, T, S), (B, 1, 1, S), (1, 1, 1, S)])
def test_masked_weights_are_exactly_zero_and_rows_sum_to_one(shape):
    mask = random_mask(*shape)
    weights, kl = Softmax()(20 * torch.randn(B, H, T, S), mask)
    full = mask.expand(B, H, T, S)
    assert (weights[~full] == 0).all()
    assert (weights[full] > 0).any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, T))
    assert torch.equal(kl, torch.zeros(B))


def test_a_hidden_key_does_not_matter_however_large_its_logit():
    logits, mask = torch.randn(B, H, T, S), random_mask(B, H, T, S)
    moved = torch.where(mask, logits, 1e30)
    assert torch.equal(masked_softmax(logits, mask), masked_softmax(moved, mask))


def test_weights_equal_a_naive_twin():
    logits, mask = torch.randn(B, H, T, S, dtype=torch.float64), random_mask(B, H, T, S)
    weights = masked_softmax(logits, mask)
    for b, h, t, s in [(b, h, t, s) for b in range(B) for h in range(H) for t in range(T) for s in range(S)]:
        seen = [math.exp(logits[b, h, t, j]) for j in range(S) if mask[b, h, t, j]]
        expected = math.exp(logits[b, h, t, s]) / sum(seen) if mask[b, h, t, s] else 0.0
        assert weights[b, h, t, s].item() == pytest.approx(expected, abs=1e-15)


def test_a_row_without_keys_is_zero_with_zero_gradient():
    logits, mask = torch.randn(B, H, T, S, requires_grad=True), random_mask(B, H, T, S)
    mask[1, 0, 2] = False
    weights = masked_softmax(logits, mask)
    assert torch.equal(weights[1, 0, 2], torch.zeros(S))
    (grad,) = torch.autograd.grad((weights * torch.randn(B, H, T, S)).sum(), logits)
    assert torch.isfinite(grad).all()
    assert torch.equal(grad[1, 0, 2], torch.zeros(S))
    assert (grad[~mask] == 0).all()


def test_dropout_keeps_the_mean_of_the_weights_and_the_zeros():
    logits, mask, family = torch.randn(1, 1, T, S), random_mask(1, 1, T, S), Softmax(dropout=0.3)
    exact = masked_softmax(logits, mask)
    draws = torch.cat([family(logits.expand(500, 1, T, S), mask).weights for _ in range(20)])
    seen = mask.expand_as(draws)
    assert (draws[~seen] == 0).all()
    assert_mean((draws == 0)[seen].float(), 0.3)
    assert_mean(draws[:, mask[0]], exact[mask])
    torch.testing.assert_close(family.eval()(logits, mask).weights, exact)


@pytest.mark.parametrize("kind", ["causal", "padding", "all"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_equals_the_attention_of_torch(heads, kind):
    mask = {"causal": causal(T), "padding": random_mask(B, 1, 1, T), "all": torch.ones(1, 1, 1, T).bool()}[kind]
    ours, x = MultiHeadAttention(D, heads, Softmax()).double(), torch.randn(B, T, D, dtype=torch.float64)
    theirs = nn.MultiheadAttention(D, heads, batch_first=True, dtype=torch.float64)
    parts = [ours.query, ours.key, ours.value]
    with torch.no_grad():
        for bias in (part.bias for part in [*parts, ours.out]):
            bias.normal_()
        theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        theirs.out_proj.load_state_dict(ours.out.state_dict())
    out = ours(x, mask)
    hidden = ~mask.expand(B, heads, T, T).flatten(0, 1)
    torch.testing.assert_close(out, theirs(x, x, x, attn_mask=hidden)[0], atol=1e-12, rtol=0)
    q, k, v = (ours.split(part(x)) for part in parts)
    fused = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, ours.out(fused.transpose(1, 2).flatten(-2)), atol=1e-12, rtol=0)


def test_attention_takes_weights_and_kl_from_its_family():
    class First(AttentionFamily):
        """All weight on the first key, and a KL one can recognise."""

        def draw(self, logits, mask, keys):
            assert logits.shape == (B, H, T, T)
            assert mask.shape == (1, 1, T, T)
            return F.one_hot(torch.zeros(B, H, T, dtype=torch.long), T).float(), torch.arange(B) + 1.0

    attention, x = MultiHeadAttention(D, H, First()), torch.randn(B, T, D)
    out, kl = attention(x, causal(T)), attention_kl(attention)
    first = attention.out(attention.value(x[:, :1]))
    torch.testing.assert_close(out, first.expand(B, T, D))
    assert torch.equal(kl, torch.tensor([1.0, 2.0, 3.0]))


def test_first_and_second_derivatives():
    attention = MultiHeadAttention(2, 1, Softmax()).double()
    x = torch.randn(1, 3, 2, dtype=torch.float64, requires_grad=True)
    mask = causal(3)
    mask[..., 0, 0] = False  # a row without keys
    names = [name for name, _ in attention.named_parameters()]

    def f(x, *values):
        return functional_call(attention, dict(zip(names, values, strict=True)), (x, mask))

    values = tuple(p.detach().requires_grad_() for p in attention.parameters())
    assert torch.autograd.gradcheck(f, (x, *values))
    assert torch.autograd.gradgradcheck(f, (x, *values))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, at its first jvp
def test_forward_derivative_equals_a_difference():
    attention = MultiHeadAttention(D, H, Softmax()).double()
    x, v = torch.randn(2, B, T, D, dtype=torch.float64)
    _, tangent = jvp(lambda x: attention(x, causal(T)), (x,), (v,))
    h = 1e-5
    difference = (attention(x + h * v, causal(T)) - attention(x - h * v, causal(T))) / (2 * h)
    torch.testing.assert_close(tangent, difference, atol=1e-7, rtol=1e-6)


def test_vmap_over_parameters_equals_a_loop():
    attention, x = MultiHeadAttention(D, H, Softmax()).double(), torch.randn(B, T, D, dtype=torch.float64)
    many = {name: torch.randn(4, *p.shape, dtype=p.dtype) for name, p in attention.named_parameters()}

    def run(params):
        return functional_call(attention, params, (x, causal(T)))

    out = vmap(run)(many)
    for i in range(4):
        one = run({name: p[i] for name, p in many.items()})
        torch.testing.assert_close(out[i], one, atol=1e-12, rtol=0)


def test_linear_starts_uniform_within_glorots_bound():
    linear, bound = Linear(300, 100), math.sqrt(6 / 400)
    assert_law(linear.weight.detach() / (2 * bound) + 0.5, "uniform")
    assert torch.equal(linear.bias, torch.zeros(100))
    assert Linear(3, 4, bias=False).bias is None


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MultiHeadAttention(10, 3, Softmax()), "dim must be a multiple of heads; got dim=10, heads=3."),
        (lambda: MultiHeadAttention(10, 0, Softmax()), "heads must be at least 1; got 0."),
        (lambda: MultiHeadAttention(-2, 1, Softmax()), "dim must be at least 1; got -2."),
        (lambda: Softmax(dropout=1.0), r"dropout must lie in \[0, 1\); got 1.0."),
    ],
)
def test_errors_name_argument_rule_and_value(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_dropout_has_the_law_of_dropout():
    drop, x = Dropout(0.3), torch.full((50_000,), 2.0, requires_grad=True)
    out = drop(x)
    kept = (out != 0).double()
    assert_mean(kept, 0.7)
    torch.testing.assert_close(out[out != 0], torch.full((int(kept.sum()),), 2 / 0.7))
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad != 0, out != 0)
    torch.testing.assert_close(grad[grad != 0], torch.full((int(kept.sum()),), 1 / 0.7))
    assert torch.equal(drop.eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    turned = Dropout(0.5)(torch.ones(3, 4).mT)
    assert turned.stride() == (1, 4)  # as it came: numbers of an edge stay together
    mapped = vmap(Dropout(0.5), randomness="different")(torch.ones(2, 100))
    assert not torch.equal(mapped[0], mapped[1])
