"""Scaled dot-product attention in plain operations: it can be vmapped, and dropout of its weights can be given."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def plain_scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    drop: Callable[[Tensor], Tensor] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """What `torch.nn.functional.scaled_dot_product_attention` documents, and the weights that it used.

    Args:
        query: (..., H, T, d).
        key: (..., G, S, d); G is H, or divides it with `enable_gqa`.
        value: (..., G, S, e).
        attn_mask: broadcasts to (..., H, T, S); True where attending is allowed, or numbers added to the logits.
        drop: applied to the weights, e.g. dropout.
        is_causal: whether query t sees the keys up to t only; not together with a mask.
        scale: of the products; 1 / √d by default.
        enable_gqa: whether each key serves H / G heads in a row.

    Returns:
        (..., H, T, e), and weights (..., H, T, S). A query without any key gets zeros.
    """
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask must be None with is_causal=True; got both.")
    dtype = query.dtype
    if dtype in (torch.float16, torch.bfloat16):  # as torch does: products and softmax in single precision
        query, key, value = query.float(), key.float(), value.float()
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    logits = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.mT
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    weights = _softmax(logits, attn_mask)
    if drop is not None:
        weights = drop(weights)
    return (weights @ value).to(dtype), weights.to(dtype)


def _softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Over the keys; rows of zeros where all keys are hidden, which would be 0 / 0."""
    if mask is None:
        return logits.softmax(-1)
    if mask.dtype == torch.bool:
        empty = ~mask.any(-1, keepdim=True)
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    else:
        empty = mask.detach().amax(-1, keepdim=True) == -torch.inf
        logits = (logits + mask.to(logits.dtype)).masked_fill(empty, 0.0)
    return logits.softmax(-1).masked_fill(empty, 0.0)
