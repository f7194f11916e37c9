"""Mean and covariance of a network's outputs in one pass of its own forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesformer.core.types import GaussianOutputs, Inputs, Params
from bayesformer.data.inputs import map_inputs
from bayesformer.laws import Law
from bayesformer.model.calling import select_output, split_inputs
from bayesformer.model.modes import check_eval
from bayesformer.model.space import Space
from bayesformer.predict.joining import join_outputs
from bayesformer.predict.one_pass.carrier import PassContext, Uncertain
from bayesformer.predict.one_pass.modules import standing_in
from bayesformer.predict.one_pass.options import Settings
from bayesformer.predict.one_pass.parameters import uncertain_parameters
from bayesformer.predict.one_pass.refusals import refuse_attention


class OnePass:
    """A module with a Gaussian over its weights, prepared once: squares of weights are kept between batches.

    The module is run as it is, by one thread at a time. Its parameters are swapped for uncertain ones during a call and
    put back after it. Everything is computed in the precision of the weights' vector: frozen weights and buffers in
    half precision are used as float32 copies.
    """

    def __init__(self, module: nn.Module, space: Space, law: Law, settings: Settings | None = None) -> None:
        if law.size != space.size:
            raise ValueError(f"law must have {space.size} numbers for this model; got {law.size}.")
        self.module, self.space = module, space
        self.context = PassContext(settings or Settings())
        refuse_attention(module)
        self.parameters = uncertain_parameters(space, law, self.context)
        self.state, self.buffers = _widened(module, space), {name: value[0] for name, value in law.buffers.items()}
        plain = [p for p in self.parameters.values() if not isinstance(p, Uncertain)]
        self.context.fixed = {id(p): p for p in [*plain, *self.state.values(), *module.parameters()]}

    def __call__(self, inputs: Inputs) -> GaussianOutputs:
        """The outputs on one batch, differentiable where gradients are enabled. Inputs may be `Uncertain`."""
        return as_outputs(self.carry(inputs, self.parameters))

    def carry(self, inputs: Inputs, parameters: Mapping[str, Tensor]) -> Any:
        """The model's output on one batch with these parameters: uncertain where anything is."""
        check_eval(self.module, "the one-pass rule knows no random dropout")
        args, kwargs = split_inputs(map_inputs(inputs, self._wide))
        own = {name: value.clone() for name, value in self.buffers.items()}  # a pass may change them
        with standing_in(self.module), _explaining_precision_errors(bool(self.state)):
            return select_output(functional_call(self.module, {**self.state, **own, **parameters}, args, kwargs))

    def _wide(self, x: Tensor) -> Tensor:
        half = not isinstance(x, Uncertain) and x.dtype in (torch.bfloat16, torch.float16)
        return x.to(self.space.dtype) if half else x


def one_pass_outputs(
    module: nn.Module,
    space: Space,
    law: Law,
    batches: Iterable[Inputs],
    settings: Settings | None = None,
    num_data: int | None = None,
) -> GaussianOutputs:
    """Mean and variance (or covariance) of the outputs under a Gaussian over the weights, batch by batch.

    Li, Klasson, Solin & Trapp (2025), "Streamlining prediction in Bayesian deep learning": exact moments of
    Gaussian weights times Gaussian activations, first order at every other function. See `Settings` for what is kept.
    `module` holds the mean of the weights, in eval mode, and is used by this thread alone.
    """
    check_eval(module, "the one-pass rule knows no random dropout")
    predictor = OnePass(module, space, law, settings)
    with torch.no_grad():
        return join_outputs((predictor(inputs) for inputs in batches), num_data)


def as_outputs(output: Any) -> GaussianOutputs:
    """A model's output as a Gaussian: with variance 0 where nothing was uncertain."""
    if not isinstance(output, Uncertain):
        return GaussianOutputs(output, torch.zeros_like(output))
    v = output.v
    if v.dim() == output.m.dim():
        return GaussianOutputs(output.m, v.expand(output.m.shape))
    symmetric = (v + v.mT) / 2
    return GaussianOutputs.of(output.m, symmetric.expand(*output.m.shape, v.shape[-1]))


@contextmanager
def _explaining_precision_errors(widened: bool) -> Iterator[None]:
    """A context in which an error about unequal dtypes says that frozen weights were cast to float32, if they were."""
    try:
        yield
    except RuntimeError as error:
        if not widened or "dtype" not in str(error):
            raise
        raise ValueError(
            "the one-pass rule computes in float32, frozen weights of half precision included, and the model casts to "
            f"half precision by itself ({error}). Use predictive='linearised' or 'sampled'."
        ) from error


def _widened(module: nn.Module, space: Space) -> Params:
    """Frozen weights and buffers of half precision in that of the weights' vector, by name."""
    named = [*module.named_parameters(), *module.named_buffers()]
    halves = (torch.bfloat16, torch.float16)
    return {name: t.detach().to(space.dtype) for name, t in named if t.dtype in halves and name not in space.names}
