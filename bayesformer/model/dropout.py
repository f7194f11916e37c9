"""Dropout of any model: where its rates are kept, and which rates reach dropout in a training pass.

To use another rate, or none, give `dropout_rate` to `bayesformer.model.randomness.pass_noise` or to
`Randomness.passing`: it reaches every dropout whatever the name of its rate, and changes nothing in the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bayesformer.core.draws import drawing_from
from bayesformer.model.pass_mode import PassMode
from bayesformer.model.randomness import restored

DROPOUT_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def dropout_sites(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every (module, attribute) that holds a dropout rate by its name: nn.Dropout modules, and numbers called so.

    Complete for models that keep their rates on their modules; rates that are read from a configuration, or kept
    under a name without "drop", are seen by `observed_rates` only.
    """
    sites: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        if isinstance(module, DROPOUT_MODULES):
            sites.append((module, "p"))
        else:
            sites += [(module, name) for name, value in vars(module).items() if _is_rate(name, value)]
    return sites


def observed_rates(module: nn.Module, call: Callable[[], Any]) -> list[float]:
    """The rate of every dropout that one training pass computes, in the order of the pass; 0.0 for those that are off.

    Fused attention counts as one, whether or not the model knows a rate for it.

    Args:
        module: put in training mode for the pass; its modes and buffers are restored.
        call: runs the forward pass.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    rates: list[float] = []
    modes = [(part, part.training) for part in module.modules()]
    source = torch.Generator(device).manual_seed(0)
    try:
        module.train()
        with restored(module), torch.no_grad(), drawing_from(source, rates=rates), PassMode():
            call()
    finally:
        for part, training in modes:
            part.training = training
    return rates


def _is_rate(name: str, value: Any) -> bool:
    """`dropout`, `attn_dropout`, `hidden_dropout_prob`, `proj_drop`, but not the rate of leaving out whole layers."""
    named = "dropout" in name or name.endswith("_drop") or name.startswith("drop_prob")
    return named and "layer" not in name and isinstance(value, float) and 0 <= value <= 1
