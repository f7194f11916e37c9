"""Any `nn.Module` as a function of its trainable weights.

Two ways to call it: `call` with a dict of parameters (pure, for torch.func), and `FlatModel`, a private copy
whose weights are views of one vector and whose gradients are views of another. The second is why a step of
an optimiser or sampler here costs a few passes over one vector instead of many over small tensors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from bayesformer.core.types import Batch, Inputs, LogJoint, Params
from bayesformer.core.vectors import THETA, pieces
from bayesformer.data.inputs import map_inputs
from bayesformer.likelihoods import Likelihood
from bayesformer.priors.distributions import Distribution, write_score
from bayesformer.priors.prior import Prior


@dataclass(frozen=True)
class Layout:
    """Where each trainable parameter lies in the flat vector. Tied weights appear once, frozen ones never."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """The layout of a model's parameters that require a gradient."""
        return cls.among(dict(model.named_parameters()))

    @classmethod
    def among(cls, parameters: Mapping[str, nn.Parameter]) -> Layout:
        """The same from the named parameters."""
        named = _trainable(parameters)
        first = next(iter(named.values()))
        if any(p.dtype != first.dtype or p.device != first.device for p in named.values()):
            kinds = sorted({f"{p.dtype} on {p.device}" for p in named.values()})
            raise ValueError(f"trainable parameters must share one dtype and device; got {', '.join(kinds)}.")
        return cls(tuple(named), tuple(tuple(p.shape) for p in named.values()))

    @property
    def sizes(self) -> list[int]:
        """Numbers per parameter."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        """P, numbers in all."""
        return sum(self.sizes)

    def views(self, flat: Tensor) -> Params:
        """Parameters as views of a vector (P,), or of a matrix (L, P) with the member axis kept in front."""
        parts = flat.split(self.sizes, -1)
        shapes = zip(self.names, parts, self.shapes, strict=True)
        return {name: part.view((*flat.shape[:-1], *shape)) for name, part, shape in shapes}

    def pack(self, params: Mapping[str, Tensor]) -> Tensor:
        """(P,): the parameters as one new vector."""
        return torch.cat([params[name].detach().reshape(-1) for name in self.names])


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require a gradient, by name."""
    return _trainable(dict(model.named_parameters()))


def _trainable(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    named = {name: p for name, p in parameters.items() if p.requires_grad}
    if not named:
        raise ValueError("model must have at least one parameter with requires_grad=True; it has none.")
    return named


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are."""
    return next(model.parameters()).device


def apply(model: nn.Module, inputs: Inputs) -> Tensor:
    """Call a model on positional or keyword inputs and return its output tensor."""
    args, kwargs = split_inputs(inputs)
    return select_output(model(*args, **kwargs))


def call(model: nn.Module, params: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
    """The same with other weights, purely: the model is not changed."""
    args, kwargs = split_inputs(inputs)
    return select_output(functional_call(model, dict(params), args, kwargs))


def split_inputs(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Positional and keyword arguments."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs), {}


def select_output(output: Any) -> Tensor:
    """The tensor that speaks of targets: itself, `.logits` of a Hugging Face output, or a tuple's first."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    keys = f" with keys {list(output)}" if isinstance(output, Mapping) else ""
    raise ValueError(
        f"model must return a tensor, an output with logits, or a tuple whose first entry is a tensor; "
        f"got {type(output).__name__}{keys}. Wrap it in a module that returns the tensor."
    )


def log_joint(model: nn.Module, likelihood: Likelihood, prior: Prior | None, num_data: int) -> LogJoint:
    """The mean log-likelihood of a batch plus the log prior over N, as a pure function of parameters.

    `params` may hold any subset of the model's parameters; the others stay as they are.
    """
    if num_data < 1:
        raise ValueError(f"num_data must be the number of training examples, at least 1; got {num_data}.")

    def value(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = call(model, params, batch.inputs)
        mean = likelihood.log_prob(outputs, batch.targets, batch.mask).mean()
        if prior is not None:
            mean = mean + prior.log_prob(params) / num_data
        return mean, outputs.detach()

    return value


class FlatModel:
    """A private copy of a model whose trainable weights are views of `theta` and gradients views of `grad`."""

    def __init__(self, model: nn.Module, gradients: bool = True) -> None:
        self.layout = Layout.of(model)
        self.module = copy.deepcopy(model)
        self.gradients = gradients
        self.answers: dict[Any, Any] = {}  # what was found out about passes of this model, by question
        self._bind()

    def _bind(self) -> None:
        own = {name: p for name, p in self.module.named_parameters() if name in set(self.layout.names)}
        self.theta = self.layout.pack(own)
        self.grad = torch.zeros_like(self.theta) if self.gradients else self.theta.new_empty(0)
        weights = self.layout.views(self.theta)
        for name, parameter in own.items():
            parameter.data = weights[name]
        if self.gradients:
            for name, gradient in self.layout.views(self.grad).items():
                own[name].grad = gradient
        else:
            self.module.requires_grad_(False).zero_grad(set_to_none=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout, "module": self.module, "gradients": self.gradients}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, answers={})
        self._bind()  # views of one vector do not survive a copy: make them anew

    def load(self, theta: Tensor) -> None:
        """Use these weights; free when they already are the model's own vector."""
        if theta.data_ptr() != self.theta.data_ptr():
            self.theta.copy_(theta)

    @property
    def buffers(self) -> Params:
        """The state a forward pass may change (running averages), by name; live tensors, not copies."""
        return dict(self.module.named_buffers())

    def load_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Set buffers that were saved."""
        own = self.buffers if buffers else {}  # to list them takes a walk through all modules
        for name, value in buffers.items():
            own[name].copy_(value)

    def __call__(self, inputs: Inputs) -> Tensor:
        """Outputs under the weights loaded."""
        return apply(self.module, inputs)


class FlatPrior:
    """A prior on the flat vector: value and gradient in a few passes, neighbours of one law as one stretch."""

    def __init__(self, prior: Prior | None, layout: Layout) -> None:
        laws = dict.fromkeys(layout.names) if prior is None else prior.assign(layout.names)
        self.runs = list[tuple[slice, Distribution | None]]()
        start = 0
        sized = zip(layout.names, layout.sizes, strict=True)
        for law, group in groupby(sized, key=lambda item: laws[item[0]]):
            stop = start + sum(size for _, size in group)
            self.runs.append((slice(start, stop), law))
            start = stop

    def write(self, theta: Tensor, grad: Tensor, scale: float) -> Tensor:
        """Put scale · gradient into `grad`; returns scale · log prior, () or (L,)."""
        value = theta.new_zeros(theta.shape[:-1])
        for run, law in self.runs:
            if law is None:
                grad[..., run].zero_()
                continue
            for weights, slope in pieces(theta[..., run], grad[..., run]):
                value = value + write_score(law, weights, slope, scale)
        return scale * value


class FlatLogJoint:
    """The log joint as a function of {"theta": vector}, with a fast gradient.

    Called, it is pure like any log joint. `value_and_grad` runs the module itself: one ordinary backward into
    the flat gradient. With theta (L, P) and batches with a leading L, all members go through one vmapped
    forward and one backward, which beats vmap of a gradient.
    """

    def __init__(
        self,
        model: FlatModel,
        likelihood: Likelihood,
        prior: Prior | None,
        num_data: int,
        penalty: Callable[[nn.Module], Tensor] | None = None,
    ) -> None:
        self.model, self.likelihood, self.prior, self.num_data = model, likelihood, prior, num_data
        self.penalty = penalty  # e.g. the KL of random weights, read off the module after its forward pass
        self.flat_prior = FlatPrior(prior, model.layout)
        self.pure = log_joint(model.module, likelihood, prior, num_data)
        self.likelihood_part = log_joint(model.module, likelihood, None, num_data)

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Value and outputs, purely."""
        return self.pure(self.model.layout.views(params[THETA]), batch)

    def value_and_grad(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor, Params]:
        """Value, outputs and gradient; the gradient's memory is reused by the next call."""
        theta = params[THETA]
        if theta.dim() > 1:
            return self._batched(theta, batch)
        model = self.model
        model.load(theta)
        # The prior's gradient in the place of zeros, on which the likelihood's is added: a pass over the weights less.
        total = self.flat_prior.write(model.theta, model.grad, 1 / self.num_data)
        outputs = model(batch.inputs)
        value = self.likelihood.log_prob(outputs, batch.targets, batch.mask).mean()
        if self.penalty is not None:
            value = value - self.penalty(model.module) / self.num_data
        value.backward()
        return total + value.detach(), outputs.detach(), {THETA: model.grad}

    def _batched(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Params]:
        leaves = {k: v.detach().requires_grad_() for k, v in self.model.layout.views(theta).items()}
        axes = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, batch)
        with batching():
            values, outputs = torch.vmap(self.likelihood_part, in_dims=(0, axes))(leaves, batch)
        gradients = torch.autograd.grad(values.sum(), list(leaves.values()))
        grad = torch.empty_like(theta)
        total = values.detach() + self.flat_prior.write(theta, grad, 1 / self.num_data)
        return total, outputs, {THETA: grad.add_(torch.cat([g.flatten(1) for g in gradients], 1))}


def batched_outputs(model: nn.Module, params: Params, inputs: Inputs) -> Tensor:
    """(L, B, ...): outputs on one input under L sets of weights with a leading axis, by one vmap."""
    with batching():
        return torch.vmap(lambda weights: call(model, weights, inputs))(params)


@contextmanager
def batching() -> Iterator[None]:
    """Attention in plain operations: the fused CPU kernel has no batching rule and would run one by one."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def stochastic_mode(model: nn.Module) -> None:
    """Dropout on, everything else as in prediction.

    Functional dropout (`F.dropout(x, p, self.training)` in Hugging Face attention, the float `dropout` of
    nn.MultiheadAttention) looks at the flag of the module that calls it, so switching nn.Dropout modules alone
    leaves it silently off. All modules train, except those that would update or ignore running averages.
    """
    model.train()
    for module in model.modules():
        if getattr(module, "track_running_stats", False) or hasattr(module, "running_mean"):
            module.eval()


def is_stochastic(model: nn.Module, inputs: Inputs) -> bool:
    """Whether two passes on the same input differ, in the mode the model is in."""
    few = map_inputs(inputs, lambda x: x[:2])
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        first = apply(model, few)
        torch.manual_seed(2)
        return not torch.equal(first, apply(model, few))


def reinitialise(model: nn.Module) -> None:
    """Give every trainable parameter a fresh random value, by each module's own `reset_parameters`."""
    for path, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if not own:
            continue
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"model cannot be re-initialised: {path or 'the model'} ({type(module).__name__}) has parameters "
                "but no reset_parameters(). Pass a function that builds a fresh model instead of the model, "
                "or keep the given weights with init='given'."
            )
        reset()
