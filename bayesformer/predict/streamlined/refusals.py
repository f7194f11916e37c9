"""Models whose attention a streamlined pass would get wrong are refused before any number is computed."""

from __future__ import annotations

from torch import nn


def refuse_attention(module: nn.Module) -> None:
    """Raise ValueError where a Hugging Face config says that attention logits are capped by a tanh."""
    config = getattr(module, "config", None)
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None:
        raise ValueError(
            f"a streamlined pass has no rule for attention whose logits are capped; this model's config has "
            f"attn_logit_softcapping={cap}. Use predictive='linearised' or 'sampled'."
        )
