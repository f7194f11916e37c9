"""`torch.nn.functional.multi_head_attention_forward` in plain torch functions.

Torch's version is one opaque function to a `TorchFunctionMode` or a tensor subclass, so that the weights inside
`nn.MultiheadAttention` and `nn.TransformerEncoderLayer` cannot be seen at work. This one gives the same numbers
by `F.linear`, products and a softmax, each of which can be intercepted. Inside, tensors are batch-first whatever
the layout outside; a packed weight is used whole where query, key and value are one tensor, else by row slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    attend: Attend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of (T, B, D) queries, or (T, D) unbatched, to (S, B, ...) keys and values; arguments as torch's.

    `attend(q, k, v, mask)`, from heads (B, H, T, d) and an additive mask to (B, H, T, d) and the weights, may stand in
    for softmax attention.

    Returns the output in the layout of the query, and the weights (B, T, S), (B, H, T, S), or None.
    """
    _check_supported(bias_k, bias_v, add_zero_attn, static_k, static_v)
    _check_sizes(query, embed_dim_to_check, num_heads)
    if is_causal and attn_mask is None:
        raise ValueError("attn_mask must be given with is_causal=True, which is only a hint; got None.")
    batched = query.dim() == 3
    # One transposed tensor for one input: what is self-attention outside stays so inside.
    turned: dict[int, Tensor] = {}
    for x in (query, key, value):
        if id(x) not in turned:
            turned[id(x)] = x.transpose(0, 1) if batched else x.unsqueeze(0)
    query, key, value = turned[id(query)], turned[id(key)], turned[id(value)]  # (B, T, D), (B, S, ...)
    if use_separate_proj_weight:
        weights = [_given("q", q_proj_weight), _given("k", k_proj_weight), _given("v", v_proj_weight)]
        q, k, v = _separate(query, key, value, weights, in_proj_bias)
    else:
        q, k, v = _packed(query, key, value, _given("in", in_proj_weight), in_proj_bias)
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))  # (B, H, T, d)
    # Torch trusts the hint where it can, and so skips the mask.
    hinted = is_causal and key_padding_mask is None and not need_weights and attend is None
    mask = None if hinted else _merged_mask(attn_mask, key_padding_mask, q, k, batched)
    rate = dropout_p if training else 0.0
    if attend is None:
        attended, attention = _attend(q, k, v, mask, rate, need_weights, hinted)
    else:
        attended, drawn = attend(q, k, v, mask)
        attention = drawn if need_weights else None
    out = F.linear(attended.transpose(1, 2).flatten(-2), out_proj_weight, out_proj_bias)  # (B, T, D)
    if attention is not None and average_attn_weights:
        attention = attention.mean(1)
    if batched:
        return out.transpose(0, 1), attention
    return out.squeeze(0), None if attention is None else attention.squeeze(0)


def _packed(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One weight (3 D, D), in as few products as the inputs allow."""
    dim = query.shape[-1]
    if query is key and key is value:
        q, k, v = F.linear(query, weight, bias).split(dim, -1)
        return q, k, v
    b = [None] * 3 if bias is None else [bias[i * dim : (i + 1) * dim] for i in range(3)]
    q = F.linear(query, weight[:dim], b[0])
    if key is value:
        k, v = F.linear(key, weight[dim:], None if bias is None else bias[dim:]).split(dim, -1)
        return q, k, v
    return q, F.linear(key, weight[dim : 2 * dim], b[1]), F.linear(value, weight[2 * dim :], b[2])


def _separate(
    query: Tensor, key: Tensor, value: Tensor, weights: list[Tensor], bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Three weights (D, ·), for keys and values of their own widths; the bias is still one."""
    dim = query.shape[-1]
    b = [None] * 3 if bias is None else [bias[i * dim : (i + 1) * dim] for i in range(3)]
    return F.linear(query, weights[0], b[0]), F.linear(key, weights[1], b[1]), F.linear(value, weights[2], b[2])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float, need_weights: bool, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """(B, H, T, d), and the weights (B, H, T, S) if they are wanted."""
    if not need_weights:
        return F.scaled_dot_product_attention(q, k, v, mask, rate, causal), None
    logits = torch.matmul(q * math.sqrt(1 / q.shape[-1]), k.transpose(-2, -1))
    weights = F.softmax(logits if mask is None else logits + mask, -1)
    if rate > 0:
        weights = F.dropout(weights, rate)
    return torch.matmul(weights, v), weights


def _merged_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor, batched: bool
) -> Tensor | None:
    """What is added to the logits, broadcasting to (B, H, T, S); None for nothing."""
    batch, heads, length, keys = *q.shape[:3], k.shape[2]
    mask = None
    if attn_mask is not None:
        shapes = {2: (length, keys), 3: (batch * heads, length, keys)}
        if tuple(attn_mask.shape) != shapes.get(attn_mask.dim()):
            raise ValueError(f"attn_mask must have shape {shapes[2]} or {shapes[3]}; got {tuple(attn_mask.shape)}.")
        mask = _additive("attn_mask", attn_mask, q.dtype)
        if mask.dim() == 3:
            mask = mask.unflatten(0, (batch, heads))
    if key_padding_mask is None:
        return mask
    if not batched:
        key_padding_mask = key_padding_mask.unsqueeze(0)
    if tuple(key_padding_mask.shape) != (batch, keys):
        raise ValueError(f"key_padding_mask must have shape {(batch, keys)}; got {tuple(key_padding_mask.shape)}.")
    padding = _additive("key_padding_mask", key_padding_mask, q.dtype)[:, None, None, :]
    # Written out over queries, which the fused attention wants.
    return padding.expand(batch, 1, length, keys) if mask is None else mask + padding


def _additive(name: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Boolean masks hide where they are True; others are added as they are."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
    if not mask.is_floating_point():
        raise ValueError(f"{name} must be boolean or floating point; got {mask.dtype}.")
    return mask.to(dtype)


def _given(name: str, weight: Tensor | None) -> Tensor:
    if weight is None:
        raise ValueError(f"{name}_proj_weight must be given in this form of projection; got None.")
    return weight


def _check_sizes(query: Tensor, embed_dim: int, num_heads: int) -> None:
    if query.dim() not in {2, 3} or query.shape[-1] != embed_dim or embed_dim % num_heads:
        raise ValueError(
            f"query must be (T, B, {embed_dim}) or (T, {embed_dim}) with a width that is a multiple of "
            f"num_heads={num_heads}; got {tuple(query.shape)}."
        )


def _check_supported(
    bias_k: Tensor | None, bias_v: Tensor | None, add_zero_attn: bool, static_k: Tensor | None, static_v: Tensor | None
) -> None:
    asked = {
        "bias_k": bias_k is not None,
        "bias_v": bias_v is not None,
        "add_zero_attn": add_zero_attn,
        "static_k": static_k is not None,
        "static_v": static_v is not None,
    }
    used = [name for name, value in asked.items() if value]
    if used:
        raise ValueError(f"multi-head attention is not supported here with {', '.join(used)}; leave it out.")
