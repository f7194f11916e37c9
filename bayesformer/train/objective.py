"""The one objective: what training ascends, samplers explore and a user's own loop may use.

    value = 1/B Σ_n log p(y_n | x_n, θ)  +  (log p(θ) - κ KL(weights)) / N  -  κ 1/B Σ_n KL_n(attention)  -  terms

N is the number of training examples, κ the weight of the KL terms (a temperature, perhaps annealed). An example's
positions are summed, so that one example is one datum. KL(weights) is that of random layers, one draw for all data;
KL_n(attention) that of the attention weights of example n. Nothing else in the library scales by N, by tokens or by κ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from bayesformer.core.types import Batch, Inputs, Params
from bayesformer.core.vectors import THETA
from bayesformer.layers import has_random_parts, kl_divergence
from bayesformer.likelihoods import Likelihood
from bayesformer.model.calling import apply, select_output, split_inputs
from bayesformer.model.randomness import plain_attention
from bayesformer.model.shell import Shell
from bayesformer.train.vector_prior import FlatPrior, VectorPrior

Forward: TypeAlias = Callable[[Inputs], Tensor]
"""Outputs of the network under the weights at hand, on any inputs."""


class Term(Protocol):
    """Something else to subtract, for example a divergence between functions at other inputs than the batch's."""

    name: str

    def __call__(self, forward: Forward, module: nn.Module, batch: Batch) -> Tensor:
        """(): nats per training example, differentiable; `forward` may be called on inputs of its own."""
        ...


KlWeight: TypeAlias = Callable[[nn.Module], Tensor | float]
"""κ, given the module, whose buffers may count steps."""


@dataclass(frozen=True)
class Constant:
    """κ = value, always."""

    value: float = 1.0

    def __call__(self, module: nn.Module) -> float:  # noqa: ARG002
        """The value, whatever the module."""
        return self.value


def bound(
    outputs: Tensor,
    module: nn.Module,
    batch: Batch,
    likelihood: Likelihood,
    num_data: int,
    kappa: Tensor | float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """1/B Σ_n log p(y_n | x_n) - κ (KL(weights) / N + 1/B Σ_n KL_n(attention)), (), and its two parts by name.

    Args:
        outputs: of the module on the batch; its KL is that of this pass.
        module: has random weights or stochastic attention, unless `kappa` is None.
        batch: inputs, targets and which targets count.
        likelihood: of the targets given the outputs.
        num_data: N.
        kappa: the weight κ of the KL terms; None for a module that has none.
    """
    value = likelihood.log_prob(outputs, batch.targets, batch.mask).mean()
    named = {"log_likelihood": value.detach()}
    if kappa is not None:
        kl = kappa * kl_divergence(module, num_data=num_data).mean()
        value, named["kl"] = value - kl, kl.detach()
    return value, named


class Objective:
    """The objective as a function of {"theta": vector}, on one shell.

    Called, it is pure, as torch.func needs it. `value_and_grad` runs the shell itself: one ordinary backward pass into
    its gradient. With theta (L, P) and batches with a leading L, all members go through one vmapped forward and one
    backward pass.
    """

    def __init__(
        self,
        shell: Shell,
        likelihood: Likelihood,
        num_data: int,
        prior: VectorPrior | None = None,
        *,
        kl_weight: KlWeight | None = None,
        terms: tuple[Term, ...] = (),
        samples: int = 1,
        autocast: bool = False,
    ) -> None:
        if num_data < 1:
            raise ValueError(f"num_data must be the number of training examples, at least 1; got {num_data}.")
        if samples < 1:
            raise ValueError(f"samples must be at least 1; got {samples}.")
        self.shell, self.likelihood, self.num_data = shell, likelihood, num_data
        self.prior = prior or FlatPrior()
        self.kl_weight = kl_weight or Constant()
        self.terms, self.samples, self.autocast = terms, samples, autocast
        self.has_kl = has_random_parts(shell.module)
        self.named: dict[str, Tensor] = {}
        """the parts of the latest value, () each: "log_likelihood", "kl" and the names of further terms"""

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Value and outputs, purely: a function of `params` alone."""
        theta = params[THETA]
        value, outputs = self._likelihood_part(self.shell.space.views(theta), batch)
        return value + self.prior.log_prob(theta) / self.num_data, outputs.detach()

    def value_and_grad(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor, Params]:
        """Value, outputs and gradient; the gradient's memory is reused by the next call."""
        theta = params[THETA]
        if theta.dim() > 1:
            return self._batched(theta, batch)
        self.shell.load(theta)
        # The prior's gradient in the place of zeros, on which the likelihood's is added: a pass over the weights less.
        total = self.prior.write(self.shell.theta, self.shell.grad, 1 / self.num_data)
        value, outputs = self._accumulate(batch, 1.0, self._kappa())
        return total + value, outputs, {THETA: self.shell.grad}

    def over(self, params: Params, batches: Iterable[Batch]) -> tuple[Tensor, Params]:
        """Value and gradient over many batches as one evaluation: batches are weighed by their examples over N."""
        self.shell.load(params[THETA])
        total = self.prior.write(self.shell.theta, self.shell.grad, 1 / self.num_data)
        kappa = self._kappa()
        for batch in batches:
            value, _ = self._accumulate(batch, len(batch.targets) / self.num_data, kappa)
            total = total + value
        return total, {THETA: self.shell.grad}

    def _kappa(self) -> Tensor | float:
        """κ of this step: asked once, since it may count steps."""
        return self.kl_weight(self.shell.module) if self.has_kl else 0.0

    def _accumulate(self, batch: Batch, share: float, kappa: Tensor | float) -> tuple[Tensor, Tensor]:
        """share · (the value without the prior), averaged over samples; its gradient is added to the shell's."""
        total: Tensor | None = None
        for _ in range(self.samples):
            value, outputs = self.evaluate(self.shell.module, batch, kappa)
            (value * (share / self.samples)).backward()
            part = value.detach() * (share / self.samples)
            total = part if total is None else total + part
        assert total is not None
        return total, outputs.detach()

    def evaluate(self, module: nn.Module, batch: Batch, kappa: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """The value without the prior, and outputs, of one forward pass of a module under the weights it holds."""

        def forward(inputs: Inputs) -> Tensor:
            with self._precision(batch):
                return apply(module, inputs)

        outputs = forward(batch.inputs)
        value, self.named = bound(
            outputs, module, batch, self.likelihood, self.num_data, kappa if self.has_kl else None
        )
        for term in self.terms:
            extra = term(forward, module, batch)
            value, self.named[term.name] = value - extra, extra.detach()
        return value, outputs

    def _precision(self, batch: Batch) -> AbstractContextManager[object]:
        return torch.autocast(batch.targets.device.type, torch.bfloat16) if self.autocast else nullcontext()

    def _likelihood_part(self, weights: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """The value without prior, KL and terms, as a pure function of parameters by name."""
        args, kwargs = split_inputs(batch.inputs)
        with self._precision(batch):
            outputs = select_output(functional_call(self.shell.module, self.shell.cast(weights), args, kwargs))
        return self.likelihood.log_prob(outputs, batch.targets, batch.mask).mean(), outputs

    def _batched(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Params]:
        leaves = {k: v.detach().requires_grad_() for k, v in self.shell.space.views(theta).items()}
        axes = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, batch)
        with plain_attention():
            values, outputs = torch.vmap(self._likelihood_part, in_dims=(0, axes))(leaves, batch)
        gradients = torch.autograd.grad(values.sum(), list(leaves.values()))
        grad = torch.empty_like(theta)
        total = values.detach() + self.prior.write(theta, grad, 1 / self.num_data)
        return total, outputs.detach(), {THETA: grad.add_(torch.cat([g.flatten(1) for g in gradients], 1))}
