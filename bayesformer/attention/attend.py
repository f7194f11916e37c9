"""Attention with a family, for models that bring their own projections and masks."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesformer.attention.family import AttentionFamily
from bayesformer.attention.multi_head import masked_softmax
from bayesformer.core import draws


def attend(
    family: AttentionFamily | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    bias: Tensor | None = None,
    valid: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """From queries (B, H, T, d), keys and values (B, G, S, d) to what is attended to, (B, H, T, d), and the weights.

    Args:
        family: the law of the weights; None is softmax attention.
        q: queries.
        k: keys; G divides H, and each of them serves H / G heads in a row.
        v: values.
        mask: True where attending is allowed, or numbers to add to the logits, the lowest of which hide.
        scale: of the products.
        bias: added to the logits.
        valid: which queries are no padding, broadcasts to (B, H, T, 1). Only while weights are drawn: the others cost
            nothing then, and attend to nothing. In mean mode they are whatever the model makes of them.
        dropout: rate of dropping weights, after they are drawn; 0 outside training.
    """
    groups = q.shape[-3] // k.shape[-3]
    if groups > 1:
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    logits = q @ k.mT * scale  # (B, H, T, S)
    if bias is not None:
        logits = logits + bias
    allowed, added = split(mask, logits)
    if added is not None:
        logits = logits + added.to(logits.dtype)
    if family is None:
        weights = masked_softmax(logits, allowed)
    else:
        if valid is not None and family.draws_now:
            allowed = allowed & valid
        weights = family(logits, allowed, k).weights
    weights = draws.dropout(weights.to(v.dtype), draws.dropout_rate(dropout))
    return weights @ v, weights


def split(mask: Tensor | None, logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """Where attending is allowed, and what is added to the logits there, if anything."""
    keys = logits.shape[-1]
    if mask is None:
        return torch.ones(1, 1, 1, keys, dtype=torch.bool, device=logits.device), None
    mask = mask[..., :keys]
    if mask.dtype == torch.bool:
        return mask, None
    hidden = hides(mask)
    return ~hidden, mask.masked_fill(hidden, 0.0)


def hides(mask: Tensor) -> Tensor:
    """Where an additive mask hides: minus infinity and the lowest finite number both stand for that."""
    return mask <= torch.finfo(mask.dtype).min / 2
