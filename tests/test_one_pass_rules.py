"""Every rule of the one-pass rule against its definition: J S Jᵀ by autograd where it is of first order."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesformer.model.multihead import multi_head_attention_forward
from bayesformer.predict.one_pass import NoRuleError, Settings, Uncertain, module_rule, rule
from bayesformer.predict.one_pass.carrier import RULES, PassContext
from bayesformer.predict.one_pass.modules import MODULE_RULES, activation, standing_in
from tests.laws import assert_mean


def run(**settings):
    return PassContext(Settings(**settings))


def gaussian(*shape, full=False, **settings):
    """A random mean with random variances, or random covariances over the last axis."""
    m = torch.randn(*shape, dtype=torch.float64)
    if not full:
        return Uncertain(m, torch.rand(*shape, dtype=torch.float64) + 0.1, run(**settings))
    root = torch.randn(*shape, shape[-1], dtype=torch.float64)
    return Uncertain(m, root @ root.mT, run(propagate="full", **settings))


def sandwich(function, x):
    """J S Jᵀ of the flattened tensor, S block-diagonal over the last axis; then the blocks over the new last axis."""
    jacobian = torch.autograd.functional.jacobian(function, x.m)
    out = jacobian.shape[: jacobian.dim() - x.m.dim()]
    jacobian = jacobian.reshape(math.prod(out), x.m.numel())
    S = torch.block_diag(*x.S.reshape(-1, x.shape[-1], x.shape[-1]))
    whole = jacobian @ S @ jacobian.mT
    if not x.full:
        return whole.diagonal().reshape(out)
    width = out[-1] if out else 1
    blocks = whole.reshape(-1, width, whole.shape[0] // width, width)
    return torch.stack([blocks[i, :, i] for i in range(len(blocks))]).reshape(*out, width)


WEIGHT, KERNEL = torch.randn(3, 4, dtype=torch.float64), torch.randn(2, 3, 2, dtype=torch.float64)
MIX, MASK = torch.rand(2, 3, 3, dtype=torch.float64), torch.tensor([True, False, True, True])
COS, SIN = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)


def rotary(x):
    return x * COS + torch.cat((-x[..., 2:], x[..., :2]), dim=-1) * SIN


def from_heads(x):
    return x.unflatten(-1, (2, 2)).transpose(1, 2).transpose(1, 2).flatten(-2)


FIRST_ORDER = {
    "linear": lambda x: F.linear(x, WEIGHT, torch.ones(3, dtype=torch.float64)),
    "addmm": lambda x: torch.addmm(torch.ones(3, dtype=torch.float64), x.view(-1, 4), WEIGHT.mT),
    "matmul": lambda x: x @ WEIGHT.mT,
    "batched matmul": lambda x: torch.matmul(x, torch.stack([WEIGHT.mT, 2 * WEIGHT.mT])),
    "mixing": lambda x: MIX @ x,
    "times a vector": lambda x: x @ WEIGHT[0],
    "einsum": lambda x: torch.einsum("btd,od->bto", x, WEIGHT),
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": lambda x: x.sigmoid(),
    "elu": F.elu,
    "softplus": F.softplus,
    "exp": torch.exp,
    "pow": lambda x: x.pow(3),
    "square": lambda x: x * x,
    "double": lambda x: x + x,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "affine": lambda x: 2 - 3 * x / 4,
    "row factor": lambda x: x * COS + SIN,
    "column factor": lambda x: x * COS[:, :1],
    "reciprocal": lambda x: 1 / x,
    "masked": lambda x: x.masked_fill(MASK, 5.0),
    "where": lambda x: torch.where(MASK, x, 0.5),
    "rotary": rotary,
    "softmax": lambda x: F.softmax(x, -1),
    "log softmax": lambda x: x.log_softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, (4,), COS[0], SIN[0], 1e-3),
    "rms norm": lambda x: F.rms_norm(x, (4,), COS[0], 1e-3),
    "batch norm": lambda x: F.batch_norm(x, COS[0, :3], COS[1, :3].square(), SIN[0, :3], SIN[1, :3]),
    "mean over tokens": lambda x: x.mean(1),
    "sum": lambda x: x.sum(-2, keepdim=True),
    "mean over features": lambda x: x.mean(-1, keepdim=True),
    "average pool": lambda x: F.avg_pool1d(x, 2),
    "adaptive pool": lambda x: F.adaptive_avg_pool1d(x, 2),
    "max pool": lambda x: F.max_pool1d(x, 2),
    "convolution": lambda x: F.conv1d(x, KERNEL, stride=2),
    "unflatten": lambda x: x.unflatten(-1, (2, 2)),
    "heads and back": from_heads,
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "view": lambda x: x.view(-1, 4),
    "reshape across": lambda x: x.reshape(2, 12),
    "flatten": lambda x: x.flatten(1),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "slice tokens": lambda x: x[:, 1:],
    "slice features": lambda x: x[..., 1:3],
    "pick": lambda x: x[torch.arange(2), torch.tensor([0, 2])],
    "chunk": lambda x: x.chunk(2, -1)[1],
    "split": lambda x: x.split([1, 2], 1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "stack": lambda x: torch.stack([x, SIN.expand(2, 3, 4)], 1),
    "cat tokens": lambda x: torch.cat([x, SIN.expand(2, 3, 4)], 1),
    "cat features": lambda x: torch.cat([x, SIN.expand(2, 3, 4)], -1),
    "flip": lambda x: x.flip(-1),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
}  # fmt: skip
DIAGONAL_ONLY = {"batched matmul", "batch norm", "average pool", "adaptive pool", "max pool", "convolution", "rotary",
                 "mean over features", "heads and back", "times a vector", "einsum"}  # fmt: skip


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_a_function_of_one_tensor_has_the_variance_of_its_jacobian(name):
    function, x = FIRST_ORDER[name], gaussian(2, 3, 4, layer_norm="jacobian")
    found = function(x)
    assert torch.allclose(found.m, function(x.m), atol=1e-12)
    assert torch.allclose(found.s, sandwich(function, x), atol=1e-10)


@pytest.mark.parametrize("name", [name for name in FIRST_ORDER if name not in DIAGONAL_ONLY])
def test_and_the_covariance_within_the_last_axis(name):
    function, x = FIRST_ORDER[name], gaussian(2, 3, 4, full=True, layer_norm="jacobian")
    found = function(x)
    assert torch.allclose(found.m, function(x.m), atol=1e-12)
    assert torch.allclose(found.S, sandwich(function, x), atol=1e-10)


def test_heads_are_independent_of_each_other_once_split():
    x = gaussian(2, 3, 4, full=True)
    found = from_heads(x)
    blocks = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).double()
    assert torch.allclose(found.S, x.S * blocks)


@pytest.mark.parametrize("full", [False, True])
def test_simple_layer_norm_takes_the_statistics_as_constants(full):
    x = gaussian(2, 3, 4, full=full)
    gain = COS[0] / (x.m.var(-1, correction=0, keepdim=True) + 1e-3).sqrt()
    found = F.layer_norm(x, (4,), COS[0], SIN[0], 1e-3)
    assert torch.allclose(found.S, x.S * gain.unsqueeze(-1) * gain.unsqueeze(-2))
    assert torch.allclose(found.m, F.layer_norm(x.m, (4,), COS[0], SIN[0], 1e-3))


def test_uncertain_gain_and_shift_of_a_norm():
    x = torch.randn(5, 4, dtype=torch.float64)
    gain, shift = gaussian(4), gaussian(4)
    shift.context = gain.context
    found = F.layer_norm(x, (4,), gain, shift)
    normalised = F.layer_norm(x, (4,))
    assert torch.allclose(found.m, normalised * gain.m + shift.m)
    assert torch.allclose(found.s, normalised**2 * gain.s + shift.s)


@pytest.mark.parametrize("full", [False, True])
def test_product_of_independent_gaussians(full):
    x, y = gaussian(4, full=full), gaussian(4, full=full)
    n = 200_000
    draws = [u.m + torch.randn(n, 4, dtype=torch.float64) @ torch.linalg.cholesky(u.S).mT for u in (x, y)]
    product = draws[0] * draws[1]
    found = x * y
    assert_mean(product, found.m)
    deviation = product - found.m
    assert_mean(deviation.unsqueeze(-1) * deviation.unsqueeze(-2), found.S) if full else assert_mean(
        deviation**2, found.s
    )


@pytest.mark.parametrize("full", [False, True])
def test_gated_product_keeps_what_its_two_branches_share(full):
    """silu(G x) · (U x) of one noisy input: in the limit of small noise, the Jacobian of the whole."""
    G, U = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    x = gaussian(2, 4, full=full)
    small = Uncertain(x.m, x.v * 1e-8, x.context)

    def gated(h):
        return F.silu(F.linear(h, G)) * F.linear(h, U)

    expected = sandwich(gated, small)
    found = gated(small)
    assert torch.allclose(found.S if full else found.s, expected, rtol=1e-5, atol=1e-18)
    if not full:  # branches taken as independent would be far off
        apart = F.silu(F.linear(small, G)) * F.linear(Uncertain(x.m, small.v, x.context), U)
        assert ((apart.s - expected).abs() / expected).max() > 0.05


def test_exact_relu_moments():
    m, s = torch.tensor([[0.3, -0.5, 4.0], [1.0, 2.0, 0.01]], dtype=torch.float64)
    x = Uncertain(m, s, run(activations="exact"))
    found = F.relu(x)
    draws = (x.m + x.s.sqrt() * torch.randn(400_000, 3, dtype=torch.float64)).relu()
    assert_mean(draws, found.m)
    assert_mean((draws - found.m) ** 2, found.s)
    assert found.m[0].item() == pytest.approx(0.567, abs=1e-3)
    assert found.s[0].item() == pytest.approx(0.467, abs=1e-3)


def test_exact_relu_keeps_correlations_positive_definite():
    x = gaussian(6, full=True, activations="exact")
    found = F.relu(x)
    assert torch.linalg.eigvalsh(found.S).min() > -1e-10
    alone = F.relu(Uncertain(x.m, x.s, run(activations="exact")))
    assert torch.allclose(found.s, alone.s)


def attention_inputs(count, heads=2, dim=4, **settings):
    shared = run(**settings)
    x = Uncertain(
        torch.randn(2, count, dim, dtype=torch.float64), torch.rand(2, count, dim, dtype=torch.float64), shared
    )
    names = ["q", "k", "v"]
    weights = {n: torch.randn(dim, dim, dtype=torch.float64) for n in names}
    weights["v"] = Uncertain(weights["v"], torch.rand(dim, dim, dtype=torch.float64), shared)

    def split(h):
        return h.unflatten(-1, (heads, -1)).transpose(1, 2)

    return x, [split(F.linear(x, weights[n])) for n in names], weights


@pytest.mark.parametrize("propagate", ["diag", "full"])
@pytest.mark.parametrize("tokens", ["independent", "shared"])
def test_attention_over_one_token_is_the_value_layer(propagate, tokens):
    x, (q, k, v), weights = attention_inputs(1, propagate=propagate, tokens=tokens)
    found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
    value = F.linear(x, weights["v"])
    assert torch.allclose(found.m, value.m)
    assert torch.allclose(found.s, value.s)


def naive_attention(q, k, v, allowed):
    """(B, H, T, d): loops over everything."""
    mean, variance = torch.zeros_like(v.m), torch.zeros_like(v.m)
    for b, h, t in torch.cartesian_prod(*map(torch.arange, v.shape[:3])).tolist():
        logits = torch.stack([q.m[b, h, t] @ k.m[b, h, u] for u in range(v.shape[2])]) / math.sqrt(q.shape[-1])
        weights = logits.masked_fill(~allowed[b, t], -math.inf).softmax(-1)
        for u in range(v.shape[2]):
            mean[b, h, t] += weights[u] * v.m[b, h, u]
            variance[b, h, t] += weights[u] ** 2 * v.s[b, h, u]
    return mean, variance


@pytest.mark.parametrize("masking", ["none", "causal", "causal mask", "padded", "additive"])
def test_attention_mixes_variances_under_every_mask(masking):
    _, (q, k, v), _ = attention_inputs(3)
    allowed = torch.ones(2, 3, 3, dtype=torch.bool)
    if masking.startswith("causal"):
        allowed = allowed.tril()
    if masking in {"padded", "additive"}:
        allowed[0, :, 2] = False
    options = {
        "none": {},
        "causal": {"is_causal": True},
        "additive": {"attn_mask": torch.zeros(2, 1, 3, 3).double().masked_fill(~allowed[:, None], -math.inf)},
    }.get(masking, {"attn_mask": allowed[:, None]})
    mean, variance = naive_attention(q, k, v, allowed)
    fused = F.scaled_dot_product_attention(q, k, v, **options)
    logits = (q @ k.mT / math.sqrt(2)).masked_fill(~allowed[:, None], torch.finfo(torch.float64).min)
    written = F.softmax(logits, -1) @ v
    for found in (fused, written):
        assert torch.allclose(found.m, mean)
        assert torch.allclose(found.s, variance)


def test_grouped_heads():
    _, (q, k, v), _ = attention_inputs(3, heads=2)
    q = torch.cat([q, q * 0.5], 1)  # four query heads for two of keys and values
    found = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    k, v = (torch.repeat_interleave(x, 2, 1) for x in (k, v))
    mean, variance = naive_attention(q, k, v, torch.ones(2, 3, 3, dtype=torch.bool))
    assert torch.allclose(found.m, mean)
    assert torch.allclose(found.s, variance)


@pytest.mark.parametrize("space", ["batched", "flat"])
@pytest.mark.parametrize("bias", [False, True])
def test_shared_tokens_square_the_weights_noise_after_mixing(space, bias):
    """Against draws of W_v (and its bias) that serve all tokens at once."""
    shared = run(tokens="shared")
    x = torch.randn(2, 3, 4, dtype=torch.float64) + 0.5
    W = Uncertain(torch.randn(4, 4, dtype=torch.float64), torch.rand(4, 4, dtype=torch.float64), shared)
    b = Uncertain(torch.zeros(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64), shared) if bias else None
    mix = torch.randn(2, 2, 3, 3, dtype=torch.float64).softmax(-1)
    value = F.linear(x, W, b) if space == "batched" else F.linear(x.view(-1, 4), W, b).view(2, 3, 4)
    found = mix @ value.view(2, 3, 2, 2).transpose(1, 2)
    n = 40_000
    draws = W.m + W.s.sqrt() * torch.randn(n, 4, 4, dtype=torch.float64)
    values = torch.einsum("bti,noi->nbto", x, draws)
    if bias:
        values = values + (b.s.sqrt() * torch.randn(n, 4, dtype=torch.float64))[:, None, None]
    expected = mix @ values.view(n, 2, 3, 2, 2).transpose(2, 3)
    assert_mean((expected - found.m) ** 2, found.s)
    unshared = mix.square() @ value.s.view(2, 3, 2, 2).transpose(1, 2)
    assert (found.s / unshared - 1).abs().max() > 0.1  # it matters that tokens share a draw


def test_shared_tokens_with_noisy_inputs_and_a_mean_over_tokens():
    """Σ_d V_kd ((mean m_d)² + Σ_u s_ud / T²) + W² s / T²."""
    x = gaussian(2, 3, 4, tokens="shared")
    W = Uncertain(torch.randn(5, 4, dtype=torch.float64), torch.rand(5, 4, dtype=torch.float64), x.context)
    found = F.linear(x, W).mean(1)
    s = x.s.sum(1) / 9
    assert torch.allclose(found.s, x.m.mean(1).square() @ W.s.mT + s @ (W.s + W.m**2).mT)
    b = Uncertain(torch.zeros(5).double(), torch.rand(5).double(), x.context)
    summed = F.linear(x, W, b).sum(1)  # one bias, added three times
    assert torch.allclose(summed.s, 9 * (found.s + b.s))


def test_shared_tokens_fall_back_where_the_tokens_lie_otherwise():
    """Batch and tokens swapped after the layer: then mixing is over other things than its tokens."""
    x = gaussian(3, 2, 4, tokens="shared")
    W = Uncertain(torch.randn(5, 4, dtype=torch.float64), torch.rand(5, 4, dtype=torch.float64), x.context)
    value = F.linear(x, W)
    found = MIX @ value.transpose(0, 1)
    assert torch.allclose(found.s, MIX**2 @ value.s.transpose(0, 1))


def test_einsum_of_two_uncertain_tensors_is_their_product():
    x, y = gaussian(2, 3, 4), gaussian(2, 5, 4)
    found, expected = torch.einsum("btd,bsd->bts", x, y), x @ y.mT
    assert torch.allclose(found.m, expected.m)
    assert torch.allclose(found.s, expected.s)
    assert not isinstance(F.softmax(found, -1), Uncertain)  # attention logits, known by rule


def test_first_order_queries_and_keys():
    """Small noise in the queries alone: the variance of the weights and of the output by the Jacobian."""
    _, (q, k, v), _ = attention_inputs(3, queries_keys="first_order")
    k, v = k.m, v.m
    q = Uncertain(q.m, q.v * 1e-6, q.context)
    logits = q @ k.mT
    weights = F.softmax(logits, -1)
    expected = torch.softmax(q.m @ k.mT, -1)
    assert torch.allclose(weights.m, expected)
    jacobian = torch.diag_embed(expected) - expected.unsqueeze(-1) * expected.unsqueeze(-2)
    assert torch.allclose(weights.s, (jacobian**2 @ logits.s.unsqueeze(-1)).squeeze(-1))
    assert (F.scaled_dot_product_attention(q, k, v).s > 0).all()
    q.context = run()
    assert not isinstance(F.scaled_dot_product_attention(q, k, v), Uncertain)  # deterministic: nothing is left


def test_multi_head_attention_goes_through_plain_functions():
    layer = nn.MultiheadAttention(4, 2, batch_first=True).double().eval()
    x = gaussian(2, 3, 4)
    found, _ = layer(x, x, x, need_weights=False)
    assert RULES[F.multi_head_attention_forward] is multi_head_attention_forward
    value = F.linear(x, layer.in_proj_weight[8:], layer.in_proj_bias[8:])
    q, k = (F.linear(x.m, layer.in_proj_weight[i : i + 4], layer.in_proj_bias[i : i + 4]) for i in (0, 4))
    split = [h.view(2, 3, 2, 2).transpose(1, 2) for h in (q, k)]
    weights = F.softmax(split[0] @ split[1].mT / math.sqrt(2), -1)
    mixed = (weights**2 @ value.s.view(2, 3, 2, 2).transpose(1, 2)).transpose(1, 2).flatten(-2)
    assert torch.allclose(found.s, mixed @ layer.out_proj.weight.square().mT)


def test_in_place_functions_change_the_tensor_itself():
    x, y = gaussian(2, 3), gaussian(2, 3)
    same, m, s = x, x.m.clone(), x.s.clone()
    x += y
    x.mul_(2.0)
    assert x is same
    assert torch.allclose(x.m, 2 * (m + y.m))
    assert torch.allclose(x.s, 4 * (s + y.s))
    x[0] = y[1]
    assert torch.equal(x.s[0], y.s[1])
    x[1] = 7.0
    assert torch.equal(x.s[1], torch.zeros(3).double())
    plain = torch.ones(2, 3, dtype=torch.float64)
    plain += y
    assert torch.allclose(plain.m, 1 + y.m)
    with pytest.raises(TypeError, match="Tensor.add_ would put an uncertain value into a known tensor"):
        torch.ones(2, 3).add_(y)


def test_embeddings_look_up_variances():
    table = gaussian(7, 4)
    ids = torch.tensor([[1, 1, 6]])
    found = F.embedding(ids, table)
    assert torch.equal(found.m, table.m[ids])
    assert torch.equal(found.s, table.s[ids])


@pytest.mark.parametrize("noisy", [False, True])
def test_convolution_against_draws_as_a_linear_layer(noisy):
    """Every output of a convolution is a linear layer's on its patch."""
    x = gaussian(2, 3, 5, 5) if noisy else torch.randn(2, 3, 5, 5, dtype=torch.float64)
    w, b = gaussian(4, 3, 2, 2), gaussian(4)
    w.context = b.context = x.context if noisy else w.context
    found = F.conv2d(x, w, b, stride=2, padding=1)
    unfold = {"kernel_size": 2, "stride": 2, "padding": 1}
    m, s = (x.m, x.s) if noisy else (x, torch.zeros_like(x))
    patches = Uncertain(F.unfold(m, **unfold).mT, F.unfold(s, **unfold).mT, w.context)
    expected = F.linear(patches, Uncertain(w.m.flatten(1), w.s.flatten(1), w.context), b)
    assert torch.allclose(found.m.flatten(2), expected.m.mT)
    assert torch.allclose(found.s.flatten(2), expected.s.mT)


def test_an_activation_of_several_operations_is_one_function():
    class Cubed(nn.Module):
        def forward(self, x):
            return x * x * x

    x, model = gaussian(3), nn.Sequential(Cubed())
    apart = model(x)
    module_rule(Cubed)(activation)
    try:
        with standing_in(model):
            whole = model(x)
        assert "forward" not in model[0].__dict__
    finally:
        MODULE_RULES.pop(Cubed)
    assert torch.allclose(whole.s, (3 * x.m**2) ** 2 * x.s)
    assert not torch.allclose(apart.s, whole.s)


def test_a_function_without_a_rule_is_named_with_the_way_out():
    with pytest.raises(NoRuleError, match=r"torch\.Tensor\.cumsum.*@rule\(<that function>\)"):
        gaussian(3).cumsum(0)
    with pytest.raises(NoRuleError, match=r"logcumsumexp.*predictive='streamlined', which needs no rules"):
        torch.logcumsumexp(gaussian(3), 0)


def test_a_rule_can_be_added():
    @rule(torch.Tensor.cumsum)
    def cumsum(x, dim):
        return x.like(x.m.cumsum(dim), x.s.cumsum(dim))

    try:
        x = gaussian(3)
        assert torch.allclose(x.cumsum(0).s, x.s.cumsum(0))
    finally:
        RULES.pop(torch.Tensor.cumsum)


def test_dropout_that_is_on_is_refused():
    with pytest.raises(ValueError, match="dropout must be off"):
        F.dropout(gaussian(3), 0.5, training=True)
    q = gaussian(1, 1, 2, 2)
    with pytest.raises(ValueError, match="attention dropout must be off"):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
