"""Mean and covariance of a network's outputs in one pass of its own forward."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesformer.core.types import GaussianOutputs, Inputs
from bayesformer.data.inputs import check_inputs, first_tensor, map_inputs
from bayesformer.laws import Law
from bayesformer.network import Layout, select_output, split_inputs
from bayesformer.predict.linearised import linearised_outputs
from bayesformer.predict.streamlined.carrier import Run, Uncertain
from bayesformer.predict.streamlined.modules import standing_in
from bayesformer.predict.streamlined.options import Settings
from bayesformer.predict.streamlined.parameters import uncertain_parameters

BATCH = 256


class Streamlined:
    """A model with a Gaussian over its weights, prepared once: squares of weights are kept between batches.

    The model is run as it is. Its parameters are swapped for uncertain ones during a call and put back after it.
    """

    def __init__(self, model: nn.Module, layout: Layout, weights: Law, settings: Settings | None = None) -> None:
        if weights.size != layout.size:
            raise ValueError(f"weights must have {layout.size} numbers for this model; got {weights.size}.")
        self.model, self.layout = model, layout
        self.run = Run(settings or Settings())
        if self.run.settings.mode != "streamlined":
            raise ValueError(
                f"mode={self.run.settings.mode!r} has no uncertain tensors; call streamlined_outputs for its results."
            )
        self.parameters = uncertain_parameters(layout, weights, self.run)
        plain = [p for p in self.parameters.values() if not isinstance(p, Uncertain)]
        self.run.fixed = {id(p): p for p in [*plain, *model.parameters()]}
        self.buffers = {name: value[0] for name, value in weights.buffers.items()}

    def __call__(self, inputs: Inputs) -> GaussianOutputs:
        """The outputs on one batch, differentiable where gradients are enabled. Inputs may be `Uncertain`."""
        return as_outputs(self.carry(inputs, self.parameters))

    def carry(self, inputs: Inputs, parameters: Mapping[str, Tensor]) -> Any:
        """The model's output on one batch with these parameters: uncertain where anything is."""
        _check_eval(self.model)
        args, kwargs = split_inputs(inputs)
        with standing_in(self.model):
            return select_output(functional_call(self.model, {**parameters, **self.buffers}, args, kwargs))


def streamlined_outputs(
    model: nn.Module,
    layout: Layout,
    weights: Law,
    inputs: Inputs,
    settings: Settings | None = None,
    batch_size: int = BATCH,
) -> GaussianOutputs:
    """Mean and variance (or covariance) of the outputs under a Gaussian over the weights.

    Li, Klasson, Solin & Trapp (2025), "Streamlining prediction in Bayesian deep learning": exact moments of
    Gaussian weights times Gaussian activations, first order at every other function. See `Settings` for what is kept.
    """
    check_inputs(inputs, "inputs")
    settings = settings or Settings()
    if settings.mode == "correlated":
        return _correlated(model, layout, weights, inputs, batch_size)
    predictor = Streamlined(model, layout, weights, settings)
    with torch.no_grad():
        count = len(first_tensor(inputs))
        parts = [
            predictor(map_inputs(inputs, lambda x, a=start: x[a : a + batch_size]))
            for start in range(0, count, batch_size)
        ]
    return join(parts)


def as_outputs(output: Any) -> GaussianOutputs:
    """A model's output as a Gaussian: with variance 0 where nothing was uncertain."""
    if not isinstance(output, Uncertain):
        return GaussianOutputs(output, torch.zeros_like(output))
    v = output.v
    if v.dim() == output.m.dim():
        return GaussianOutputs(output.m, v.expand(output.m.shape))
    symmetric = (v + v.mT) / 2
    return GaussianOutputs.of(output.m, symmetric.expand(*output.m.shape, v.shape[-1]))


def join(parts: list[GaussianOutputs]) -> GaussianOutputs:
    """Batches end to end."""
    factors = [part.factor for part in parts if part.factor is not None]
    return GaussianOutputs(
        torch.cat([part.mean for part in parts]),
        torch.cat([part.diagonal for part in parts]),
        torch.cat(factors) if factors else None,
    )


def _correlated(model: nn.Module, layout: Layout, weights: Law, inputs: Inputs, batch_size: int) -> GaussianOutputs:
    """Every correlation to first order: the Jacobian of the whole network instead of one rule after another."""
    _check_eval(model)
    means = layout.views(weights.mean)
    own = dict(model.named_parameters())
    if weights.buffers or not all(torch.equal(own[name], mean) for name, mean in means.items()):
        model = copy.deepcopy(model)
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, value in {**means, **{name: rows[0] for name, rows in weights.buffers.items()}}.items():
            state[name].data.copy_(value)
    return linearised_outputs(model, layout, weights, inputs, batch_size)


def _check_eval(model: nn.Module) -> None:
    if model.training:
        raise ValueError("model must be in evaluation mode for a streamlined pass: call model.eval().")
