"""Products of two tensors, softmax, and attention.

By default queries and keys are known: attention weights A come from the means, and the values' spread is mixed by them,

    Cov(o_t) = Σ_u A_tu² Cov(v_u)

with tokens taken as independent (Li et al., 2025). `tokens="shared"` keeps that one draw of W_v serves every token: the
noise of the weights is squared after mixing,  Σ_d V_kd ((Σ_u A_tu m_ud)² + Σ_u A_tu² s_ud).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.model.multihead import multi_head_attention_forward
from bayesformer.predict.one_pass.carrier import Uncertain, first_uncertain, mean_of, rule
from bayesformer.predict.one_pass.linear import Affine, linear
from bayesformer.predict.one_pass.weight_covariance import Independent, with_one

rule(F.multi_head_attention_forward)(multi_head_attention_forward)


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)
def matmul(input: Any, other: Any) -> Uncertain:
    """Mean and variance of input @ other, one or both `Uncertain`; two uncertain ones are taken as independent.

    A 2-d `other` that multiplies rows of `input` is treated as the weight of a linear layer.
    """
    if input.dim() == 1 or other.dim() == 1:
        return _with_vector(input, other)
    if isinstance(input, Uncertain) and isinstance(other, Uncertain):
        if other.structure is not None or _is_weight(input, other):
            return linear(input, other.mT, None)
        m = input.m @ other.m
        found = input.like(m, lambda: _product_variance(input, other))
        found.scores = True
        return found
    if isinstance(input, Uncertain):
        return linear(input, other.mT, None) if other.dim() == 2 else _times_known(input, other)
    return mixed(input, other)


def _is_weight(x: Uncertain, w: Uncertain) -> bool:
    """Whether w is a matrix of weights applied to rows: x @ W."""
    return w.dim() == 2 and x.dim() > 2


def _with_vector(a: Any, b: Any) -> Uncertain:
    """A vector as a matrix of one row or column."""
    left, right = a.unsqueeze(0) if a.dim() == 1 else a, b.unsqueeze(1) if b.dim() == 1 else b
    found = matmul(left, right)
    if b.dim() == 1:
        found = found.squeeze(-1)  # type: ignore[assignment]
    return found.squeeze(-2 if b.dim() > 1 else -1) if a.dim() == 1 else found  # type: ignore[return-value]


@rule(torch.einsum)
def einsum(equation: str, *operands: Any) -> Uncertain:
    """Two operands taken as independent, variances only: Σ of the variances of the products."""
    pair = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if len(pair) != 2:
        raise ValueError(f"einsum of uncertain tensors must have two operands; got {len(pair)} in {equation!r}.")
    a, b = pair
    x = first_uncertain(a, b)

    def variance() -> Tensor:
        m = mean_of(b)
        parts = []
        if isinstance(a, Uncertain):
            parts.append(torch.einsum(equation, a.s, m * m + b.s if isinstance(b, Uncertain) else m * m))
        if isinstance(b, Uncertain):
            parts.append(torch.einsum(equation, mean_of(a) * mean_of(a), b.s))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    found = x.like(torch.einsum(equation, mean_of(a), mean_of(b)), variance)
    found.scores = isinstance(a, Uncertain) and isinstance(b, Uncertain)
    return found


def _product_variance(a: Uncertain, b: Uncertain) -> Tensor:
    """Σ_j Var(a_ij b_jk)."""
    return a.s @ (b.m * b.m + b.s) + (a.m * a.m) @ b.s


def _times_known(x: Uncertain, w: Tensor) -> Uncertain:
    """x W with one W per batch or head."""
    if not x.full:
        return x.like(x.m @ w, x.s @ (w * w))
    return x.like(x.m @ w, w.mT.unsqueeze(-3) @ x.v @ w.unsqueeze(-3))


def mixed(weights: Tensor, x: Uncertain, mean: Tensor | None = None) -> Uncertain:
    """A x: tokens mixed by known weights (..., T, S)."""
    m = weights @ x.m if mean is None else mean
    if x.settings.tokens == "shared" and isinstance(x.origin, Affine) and _token_by_token(x, x.origin):
        return x.like(m, _shared(weights, x, x.origin))
    return x.like(m, _mix(weights * weights, x.v, x.m))


def _mix(squares: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """Σ_u A_tu² of the spreads of S tokens."""
    if v.dim() == m.dim():
        return squares @ v
    v = v.expand(*m.shape, m.shape[-1])
    return (squares @ v.flatten(-2)).unflatten(-1, v.shape[-2:])


def _token_by_token(x: Uncertain, origin: Affine) -> bool:
    """Whether values (B, H, S, d) or (B, S, d) are a noisy layer's outputs, S tokens of B examples in their order."""
    flat, dims = mean_of(origin.x), x.m.dim()
    if origin.structure is None or dims not in {3, 4} or flat.numel() != len(x) * x.shape[-2] * flat.shape[-1]:
        return False
    count = flat.numel() // flat.shape[-1]
    token = torch.arange(count, device=flat.device).view(*flat.shape[:-1], 1)
    layout = token.view(len(x), *[1] * (dims - 3), x.shape[-2], 1)
    moved = origin.replay(token.expand(*flat.shape[:-1], mean_of(origin.w).shape[0]))
    return bool((moved == layout).all())


def _shared(weights: Tensor, x: Uncertain, origin: Affine) -> Tensor:
    """The spread of mixed values (B, H, S, d) or (B, S, d) whose weights are one draw for all tokens."""
    flat = mean_of(origin.x)  # (B, S, in), or (B S, in)
    weights = weights.expand(len(x), *x.shape[1:-2], *weights.shape[-2:])
    noise = origin.replay(_weight_noise(origin, flat))  # what each token has by itself
    rest = _mix(weights * weights, x.v - (torch.diag_embed(noise) if x.full else noise), x.m)
    heads = weights if weights.dim() == 4 else weights.unsqueeze(1)
    inputs = flat.reshape(len(weights), 1, -1, flat.shape[-1])
    rows = origin.replay(_features(origin, flat))[0]  # which output of the layer each value is
    rows = rows[:, 0] if weights.dim() == 4 else rows[:1]  # (H, d)
    after = _rows_noise(origin, heads @ inputs, heads.sum(-1, keepdim=True), rows)
    after = after if weights.dim() == 4 else after.squeeze(1)
    return rest + (torch.diag_embed(after) if x.full else after)


def _features(origin: Affine, inputs: Tensor) -> Tensor:
    return torch.arange(mean_of(origin.w).shape[0], device=inputs.device).expand(*inputs.shape[:-1], -1)


def _weight_noise(origin: Affine, m: Tensor) -> Tensor:
    """Of weights and bias for known inputs m, variances only."""
    structure = origin.structure
    assert structure is not None
    if structure.with_bias:
        return structure.variance(*with_one(m, None))
    found = structure.variance(m, None)
    return found + origin.b.s if isinstance(origin.b, Uncertain) else found


def _rows_noise(origin: Affine, m: Tensor, ones: Tensor, rows: Tensor) -> Tensor:
    """(B, H, T, d): of the outputs `rows` (H, d) of the layer, for one input (B, H, T, in) per head."""
    structure = origin.structure
    assert structure is not None
    bias = origin.b.s[rows].unsqueeze(-2) if isinstance(origin.b, Uncertain) else 0.0
    if isinstance(structure, Independent):
        found = (m * m) @ structure.variances[rows].mT
        return found + bias * ones.square()
    if structure.with_bias:
        m, bias = torch.cat([m, ones], -1), 0.0
    found = structure.variance(m, None)  # (B, H, T, out)
    index = rows[None, :, None].expand(*found.shape[:-1], -1)
    return found.gather(-1, index) + bias * ones.square()


@rule(F.softmax, torch.softmax, Tensor.softmax)
def softmax(input: Uncertain, dim: int, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """Of attention logits: known, unless `queries_keys="first_order"`. Else to first order: J = diag(p) - p pᵀ."""
    dtype = next((a for a in args if isinstance(a, torch.dtype)), dtype)
    p = torch.softmax(input.m if dtype is None else input.m.to(dtype), dim)
    if input.scores and input.settings.queries_keys == "deterministic":
        return p
    if not input.full:
        squares = p * p
        total = (squares * input.v).sum(dim, keepdim=True)
        return input.like(p, (squares * (input.v * (1 - 2 * p) + total)).clamp_min(0))
    if dim % p.dim() != p.dim() - 1:
        raise ValueError(f"softmax with propagate='full' must act on the last axis; got dim={dim}.")
    jacobian = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    return input.like(p, jacobian @ input.v @ jacobian.mT)


@rule(F.log_softmax, torch.log_softmax, Tensor.log_softmax)
def log_softmax(input: Uncertain, dim: int, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Uncertain:
    """The logarithm of softmax to first order: J = I - 1 pᵀ."""
    dtype = next((a for a in args if isinstance(a, torch.dtype)), dtype)
    value = torch.log_softmax(input.m if dtype is None else input.m.to(dtype), dim)
    p = value.exp()
    if not input.full:
        total = (p * p * input.v).sum(dim, keepdim=True)
        return input.like(value, (input.v * (1 - 2 * p) + total).clamp_min(0))
    jacobian = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device) - p.unsqueeze(-2)
    return input.like(value, jacobian @ input.v @ jacobian.mT)


@rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The fused kernel, written out: weights are needed to mix the spread."""
    if dropout_p > 0:
        raise ValueError(f"attention dropout must be off in the one-pass rule: call model.eval(); got {dropout_p}.")
    q, k, v = query, key, value
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    x = first_uncertain(q, k, v)
    rate = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    uncertain = isinstance(q, Uncertain) or isinstance(k, Uncertain)
    if x.settings.queries_keys == "first_order" and uncertain:
        logits = _masked(torch.matmul(q * rate, k.transpose(-2, -1)), attn_mask, is_causal)
        nothing = (logits.m == -math.inf).all(-1, keepdim=True)
        a = torch.softmax(logits.masked_fill(nothing, 0.0), -1)
        return torch.matmul(a.masked_fill(nothing, 0.0), v)
    a = _weights(_masked(mean_of(q) * rate @ mean_of(k).transpose(-2, -1), attn_mask, is_causal))
    return mixed(a, v) if isinstance(v, Uncertain) else a @ v


def _weights(logits: Tensor) -> Tensor:
    """Softmax over keys, and 0 for a query that may attend to none (padding outside a window), as in torch's kernel."""
    return torch.softmax(logits, -1).masked_fill((logits == -math.inf).all(-1, keepdim=True), 0.0)


def _masked(logits: Any, mask: Tensor | None, causal: bool) -> Any:
    """Logits with -inf where attending is not allowed."""
    if causal:
        length, keys = logits.shape[-2:]
        allowed = torch.ones(length, keys, dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~allowed, -math.inf)
    if mask is None:
        return logits
    return logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
