"""Where the variance of outputs comes from: which layers, which inputs. For any model that can be differentiated."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from bayesformer.core.types import Inputs
from bayesformer.jacobians.capture import backpropagate
from bayesformer.jacobians.columns import one_hot
from bayesformer.model.calling import apply
from bayesformer.model.shell import Shell
from bayesformer.predict.linearised import COLUMNS, Linearised

JOINED = "all layers together"  # the share of deviations that join the weights of all layers


def layer_shares(linearised: Linearised, inputs: Inputs) -> dict[str, float]:
    """Share of the outputs' linearised variance due to each random parameter, by name, largest first.

    Σ diag(J_l Σ_l J_lᵀ) over the outputs of all examples, for every block l of the covariance, over the sum of all;
    the shares add up to 1. A block over several parameters (a matrix and its bias) counts once, under both names.
    """
    if linearised.capture is None:
        return {}
    linearised.capture.columns = None
    outputs, sites = linearised.capture.adapting(inputs)
    parts = {", ".join(placed.names): copy(linearised.roots) for placed in linearised.roots.blocks}
    for placed in linearised.roots.blocks:
        own = parts[", ".join(placed.names)]
        own.blocks, own.factor = [placed], {}
    if linearised.roots.factor:
        parts[JOINED] = copy(linearised.roots)
        parts[JOINED].blocks = []
    found = dict.fromkeys(parts, 0.0)
    count = outputs[0].numel()
    for start in range(0, count, COLUMNS):
        slopes = backpropagate(sites, outputs, one_hot(outputs, start, min(start + COLUMNS, count)))
        with torch.no_grad():
            for name, roots in parts.items():
                found[name] += sum(float(root.square().sum()) for _, root in roots(sites, slopes))
    total = sum(found.values())
    return {name: value / total if total else 0.0 for name, value in sorted(found.items(), key=lambda x: -x[1])}


def squared_slopes(shell: Shell, inputs: Tensor, output: Tensor | int | None = None) -> Tensor:
    """(df_k/dx)² in the shape of the inputs, under the weights that the shell holds; summed over outputs by default.

    `output` picks k: one number, or one per example.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = inputs.detach().clone().requires_grad_()
        outputs = apply(shell.module, x)
        flat = outputs.reshape(len(outputs), -1)
        if output is not None:
            index = torch.as_tensor(output, device=flat.device).expand(len(flat)).unsqueeze(1)
            if bool((index < 0).any() or (index >= flat.shape[1]).any()):
                raise ValueError(
                    f"output must be numbers from 0 to {flat.shape[1] - 1}, the outputs of an example; got {output}."
                )
            flat = flat.gather(1, index)
        found = torch.zeros_like(inputs)
        for column in flat.sum(0).unbind():
            (slope,) = torch.autograd.grad(column, x, retain_graph=True)
            found += slope.square()
    return found
