"""Finding and setting dropout in any model, functional dropout included."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

# Float attributes that modules hand to F.dropout or to fused attention. Hugging Face attention modules use
# the first two; nn.MultiheadAttention the first.
RATE_ATTRIBUTES = (
    "dropout",
    "attention_dropout",
    "attn_dropout",
    "dropout_p",
    "dropout_prob",
    "activation_dropout",
)


def dropout_sites(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every (module, attribute) that holds a dropout rate: nn.Dropout modules and float attributes."""
    sites: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            sites.append((module, "p"))
            continue
        sites += [(module, name) for name in RATE_ATTRIBUTES if isinstance(getattr(module, name, None), float)]
    return sites


def set_dropout(model: nn.Module, rate: float | None) -> list[tuple[nn.Module, str]]:
    """Set all sites to `rate` (None leaves them) and return them."""
    sites = dropout_sites(model)
    if rate is not None:
        for module, name in sites:
            setattr(module, name, rate)
    return sites
