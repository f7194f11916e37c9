"""A posterior over functions of one variable, as numbers for a figure: its band, and that of the true posterior."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bayesformer.bench.tasks.protocol import TaskData

WIDTH = 2.0
"""Half the width of a band in standard deviations of the function value: 95 % of a Gaussian."""
DOTS = 200
"""Training examples that are shown at most."""


def curve_of(data: TaskData, values: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, list[float]] | None:
    """Mean and band at the inputs of all regions in their order on the line, beside those of the reference.

    Args:
        data: whose probes are the inputs of every region, (B, 1).
        values: of every region the function values of the posterior, (L, B, 1), and of the reference, (M, B, 1).

    Returns None unless inputs and targets are one number each. Noise of the targets is not part of a band.
    """
    inputs, targets = data.train.inputs, data.train.targets
    if not isinstance(inputs, Tensor) or inputs.shape[1:] != (1,) or targets.shape[1:] != (1,):
        return None
    if not targets.is_floating_point():
        return None
    x = torch.cat([data.probes[region] for region in values]).flatten().double()
    order = x.argsort()
    found = {"x": x[order]}
    for i, name in enumerate(("", "reference_")):
        mean = torch.cat([pair[i].mean(0) for pair in values.values()]).flatten()[order]
        spread = torch.cat([pair[i].std(0, correction=0) for pair in values.values()]).flatten()[order]
        found |= {f"{name}mean": mean, f"{name}low": mean - WIDTH * spread, f"{name}high": mean + WIDTH * spread}
    shown = torch.linspace(0, len(inputs) - 1, min(DOTS, len(inputs)), device=inputs.device).round().long()
    found |= {"observed_x": inputs[shown].flatten(), "observed_y": targets[shown].flatten()}
    return {name: [round(value, 4) for value in numbers.tolist()] for name, numbers in found.items()}
