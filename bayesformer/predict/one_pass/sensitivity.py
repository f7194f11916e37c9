"""Where the variance of an output comes from: which inputs, which layers. By derivatives of one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesformer.core.types import Inputs
from bayesformer.predict.one_pass.carrier import Uncertain
from bayesformer.predict.one_pass.predictor import OnePass, as_outputs
from bayesformer.predict.one_pass.weight_covariance import ScaledCovariance


def input_sensitivity(predictor: OnePass, inputs: Tensor, outputs: Tensor | int | None = None) -> Tensor:
    """d Var[f_k] / d r at r = 0 for inputs x ~ N(x, diag(r)), in the shape of the inputs.

    How much noise in each input would add to the variance of an output: without noise in the weights, and with full
    propagation, (df_k/dx)². `outputs` picks k (one number, or one per example); by default variances are summed.
    """
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise ValueError("inputs must be one tensor of real numbers to have a sensitivity.")
    with torch.enable_grad():
        r = torch.zeros_like(inputs, requires_grad=True)
        noisy = Uncertain(inputs.detach(), r, predictor.context)
        variance = variance_of(predictor.carry(noisy, predictor.parameters))
        (found,) = torch.autograd.grad(_picked(variance, outputs).sum(), r)
    return found


def layer_shares(predictor: OnePass, inputs: Inputs) -> dict[str, float]:
    """Share of the outputs' variance due to each uncertain parameter, by name, largest first.

    d Var / d log c where c scales the parameter's variance, over Var, both summed over outputs and examples. To first
    order in the variances the shares add up to 1. A bias that is correlated with its matrix counts with the matrix.
    """
    with torch.enable_grad():
        scales, scaled = {}, dict(predictor.parameters)
        for name, value in predictor.parameters.items():
            if isinstance(value, Uncertain):
                scales[name] = torch.ones((), dtype=value.dtype, device=value.device, requires_grad=True)
                scaled[name] = _scaled(value, scales[name])
        total = variance_of(predictor.carry(inputs, scaled)).sum()
        slopes = torch.autograd.grad(total, list(scales.values()), allow_unused=True)
    shares = {n: 0.0 if g is None else float(g.detach() / total.detach()) for n, g in zip(scales, slopes, strict=True)}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _scaled(value: Uncertain, c: Tensor) -> Uncertain:
    found = value.like(value.m, value.v * c)
    if value.structure is not None:
        found.structure, found.turned = ScaledCovariance(value.structure, c), value.turned
    return found


def variance_of(output: object) -> Tensor:
    """Variances of a model's output, kept differentiable."""
    if isinstance(output, Uncertain):
        return output.s.expand(output.m.shape)
    assert isinstance(output, Tensor)
    return as_outputs(output).diagonal


def _picked(variance: Tensor, outputs: Tensor | int | None) -> Tensor:
    if outputs is None:
        return variance
    index = torch.as_tensor(outputs, device=variance.device).expand(variance.shape[:-1])
    return variance.gather(-1, index.unsqueeze(-1))
