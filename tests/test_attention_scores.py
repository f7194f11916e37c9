"""Score functions against their formulas, and attention to something else than itself."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesformer.attention import Additive, Gat, MultiHeadAttention, ScaledDot, Softmax, Weibull, attention_kl

B, H, T, S, d = 2, 3, 4, 5, 6
ALL = torch.ones(1, 1, 1, S, dtype=torch.bool)
SCORES = {"dot": ScaledDot, "additive": lambda: Additive(H, d), "gat": lambda: Gat(H, d)}


def naive(score, q, k, h):
    if isinstance(score, ScaledDot):
        return q @ k / math.sqrt(d)
    if isinstance(score, Additive):
        return score.v[h] @ torch.tanh(q + k)
    return F.leaky_relu(score.a[h] @ q + score.b[h] @ k, 0.2)


@pytest.mark.parametrize("name", SCORES)
def test_a_score_equals_its_formula_entry_by_entry(name):
    score = SCORES[name]().double()
    q, k = torch.randn(B, H, T, d).double(), torch.randn(B, H, S, d).double()
    logits = score(q, k)
    assert logits.shape == (B, H, T, S)
    for b, h, t, s in [(0, 0, 0, 0), (1, 2, 3, 4), (1, 0, 2, 1)]:
        torch.testing.assert_close(logits[b, h, t, s], naive(score, q[b, h, t], k[b, h, s], h))
    torch.testing.assert_close(score(q[None], k[None])[0], logits)  # axes before the batch


@pytest.mark.parametrize("name", SCORES)
def test_attention_takes_any_score_and_any_family(name):
    attention = MultiHeadAttention(H * d, H, Weibull(), score=SCORES[name]())
    out = attention(torch.randn(B, S, H * d), ALL)
    (out.sum() + attention_kl(attention).sum()).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in attention.score.parameters())


def test_cross_attention_equals_torchs():
    ours = MultiHeadAttention(6, 3, Softmax(), context_dim=8)
    theirs = nn.MultiheadAttention(6, 3, batch_first=True, kdim=8, vdim=8)
    with torch.no_grad():
        for name, part in {"q": ours.query, "k": ours.key, "v": ours.value}.items():
            getattr(theirs, f"{name}_proj_weight").copy_(part.weight)
        theirs.in_proj_bias.zero_()
        theirs.out_proj.load_state_dict(ours.out.state_dict())
    x, context = torch.randn(B, T, 6), torch.randn(B, S, 8)
    mask = torch.rand(B, 1, 1, S) < 0.7
    mask[..., 0] = True
    out = ours(x, mask, context)
    torch.testing.assert_close(out, theirs(x, context, context, key_padding_mask=~mask[:, 0, 0])[0])


def test_attention_to_itself_is_cross_attention_to_itself():
    attention, x = MultiHeadAttention(6, 3, Softmax()), torch.randn(B, S, 6)
    assert torch.equal(attention(x, ALL), attention(x, ALL, x))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Additive(0, 3), "heads must be at least 1; got 0"),
        (lambda: Gat(1, 0), "width must be at least 1; got 0"),
        (lambda: MultiHeadAttention(4, 2, Softmax(), context_dim=0), "context_dim must be at least 1; got 0"),
    ],
)
def test_errors_name_argument_rule_and_value(build, message):
    with pytest.raises(ValueError, match=message):
        build()
