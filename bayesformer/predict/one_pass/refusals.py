"""Models whose attention the one-pass rule has no rule for are refused before any number is computed."""

from __future__ import annotations

from torch import nn

CAP = "attn_logit_softcapping"


def refuse_attention(module: nn.Module) -> None:
    """Raise ValueError where attention logits are capped by a tanh, as a Hugging Face model or its config says."""
    for path, part in module.named_modules():
        cap = getattr(part, CAP, None) or getattr(getattr(part, "config", None), CAP, None)
        if cap is not None:
            raise ValueError(
                f"the one-pass rule has no rule for attention whose logits are capped; {path or 'the model'} has "
                f"{CAP}={cap}. Use predictive='linearised' or 'sampled'."
            )
