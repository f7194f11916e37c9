"""The one objective: what training ascends, samplers explore and a user's own loop may use.

    value = 1/B Σ_n log p(y_n | x_n, θ)  +  (log p(θ) - κ KL(weights)) / N  -  κ 1/B Σ_n KL_n(attention)  -  terms

N is the number of training examples, κ the weight of the KL terms (a temperature, perhaps annealed). An example's
positions are summed, so that one example is one datum. KL(weights) is that of random layers, one draw for all data;
KL_n(attention) that of the attention weights of example n. `fit`, `loss` and `log_joint` all evaluate it by `bound`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesformer.core.compat import transformed, tree_map
from bayesformer.core.effort import note
from bayesformer.core.rules import check_num_data
from bayesformer.core.types import Batch, Inputs, Params
from bayesformer.core.vectors import THETA
from bayesformer.data.all_data import WholeData
from bayesformer.layers import has_random_parts, kl_divergence
from bayesformer.likelihoods import Likelihood
from bayesformer.likelihoods.target_rows import check_rows
from bayesformer.model.calling import apply
from bayesformer.model.randomness import plain_attention
from bayesformer.model.shell import Shell
from bayesformer.train.vector_prior import FlatPrior, VectorPrior

Forward: TypeAlias = Callable[[Inputs], Tensor]
"""Outputs of the network under the weights at hand, on any inputs."""


class Term(Protocol):
    """Something else to subtract, for example a divergence between functions at other inputs than the batch's."""

    @property
    def name(self) -> str:
        """What it is called among the parts of a value."""
        ...

    def __call__(self, forward: Forward, module: nn.Module, batch: Batch) -> Tensor:
        """(): nats per training example, differentiable; `forward` may be called on inputs of its own."""
        ...


KlWeight: TypeAlias = Callable[[nn.Module], Tensor | float]
"""κ, given the module, whose buffers may count steps."""


@dataclass(frozen=True)
class Constant:
    """A weight κ that is the same in every step."""

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
    log_prior: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """1/B Σ_n log p(y_n | x_n) - κ (KL(weights) / N + 1/B Σ_n KL_n(attention)) + log p(θ) / N, (), and parts by name.

    Args:
        outputs: of the module on the batch; its KL is that of this pass.
        module: has random weights or stochastic attention, unless `kappa` is None.
        batch: inputs, targets and which targets count.
        likelihood: of the targets given the outputs.
        num_data: N.
        kappa: the weight κ of the KL terms; None for a module that has none.
        log_prior: log p(θ), (); None leaves it out, as `Objective` does, which writes its gradient in place.
    """
    value = likelihood.log_prob(outputs, batch.targets, batch.mask).mean()
    named = {"log_likelihood": value.detach()}
    if kappa is not None:
        kl = kappa * kl_divergence(module, num_data=num_data).mean()
        value, named["kl"] = value - kl, kl.detach()
    if log_prior is not None:
        share = log_prior / num_data
        value, named["log_prior"] = value + share, share.detach()
    return value, named


def check_batch(likelihood: Likelihood, outputs: Tensor, batch: Batch) -> None:
    """Raise ValueError where a batch has a target that the likelihood cannot have; a batch may have none that counts.

    Inside a transformation of torch.func values cannot be looked at: nothing is checked there.
    """
    if not transformed() and bool(likelihood.kept(batch.targets, batch.mask).any()):
        check_rows(likelihood, outputs, batch.targets, batch.mask, " of a batch")


class Objective:
    """The objective as a function of {"theta": vector}, on one shell.

    Called, it is pure, as torch.func needs it: weights and buffers of the shell stay as they are. `value_and_grad` runs
    the shell itself: one ordinary backward pass into its gradient. With theta (L, P) and batches with a leading L, all
    members go through one vmapped forward and one backward pass.
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
        check_targets: bool = False,
    ) -> None:
        check_num_data(num_data)
        if samples < 1:
            raise ValueError(f"samples must be at least 1; got {samples}.")
        self.shell, self.likelihood, self.num_data = shell, likelihood, num_data
        self.prior = prior or FlatPrior()
        self.kl_weight = kl_weight or Constant()
        self.terms, self.samples, self.autocast = terms, samples, autocast
        self.check_targets = check_targets  # of every batch, for data whose targets could not be seen before training
        self.has_kl = has_random_parts(shell.module)
        self.named: dict[str, Tensor] = {}
        """the parts of the latest value of `value_and_grad` or `over`, () each: "log_likelihood", "log_prior", "kl" and
        the names of further terms, as they enter the sum"""
        self._pass = _Pass(shell.module)

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Value and outputs, purely: a function of `params` alone, apart from the noise of the pass."""
        theta = params[THETA]
        buffers = {name: value.clone() for name, value in self.shell.buffers.items()}
        value, outputs = self._pure(self.shell.space.views(theta), batch, None, buffers)
        return value + self.prior.log_prob(theta) / self.num_data, outputs.detach()

    def value_and_grad(self, params: Params, batch: Batch | WholeData) -> tuple[Tensor, Tensor, Params]:
        """Value, outputs and gradient; the gradient's memory is reused by the next call.

        For `WholeData` they are those of all examples, evaluated chunk by chunk; outputs are then left out: empty.
        """
        theta = params[THETA]
        if isinstance(batch, WholeData):
            value, gradient = self.over(params, batch, batch.data.rows)
            return value, value.new_empty(0), gradient
        if theta.dim() > 1:
            return self._batched(theta, batch)
        total = self._begin(theta)
        value, outputs = self._accumulate(batch, 1.0, self._kappa(self.shell.module))
        return total + value, outputs, {THETA: self._grad}

    def over(self, params: Params, batches: Iterable[Batch], examples: int | None = None) -> tuple[Tensor, Params]:
        """Value and gradient over many batches as one evaluation, as of one batch with all their examples.

        Args:
            params: {"theta": (P,)}.
            batches: of any sizes.
            examples: how many they hold together; N by default, that is all training data.
        """
        total, count = self._begin(params[THETA]), self.num_data if examples is None else examples
        kappa, seen = self._kappa(self.shell.module), 0
        for batch in batches:
            seen += len(batch.targets)
            total = total + self._accumulate(batch, len(batch.targets) / count, kappa)[0]
        if seen != count:
            raise ValueError(
                f"examples must be what the batches hold together; got {count}, they hold {seen}. Data must give "
                "as many examples in every pass, and num_data says how many these stand for."
            )
        return total, {THETA: self._grad}

    @property
    def _grad(self) -> Tensor:
        if self.shell.grad is None:
            raise ValueError("shell must have gradients for value_and_grad; make it by skeleton.shell(gradients=True).")
        return self.shell.grad

    def _begin(self, theta: Tensor) -> Tensor:
        """Load θ and write the prior's gradient, on which those of the passes are added; returns log p(θ) / N."""
        self.shell.load(theta)
        total = self.prior.write(self.shell.theta, self._grad, 1 / self.num_data)
        self.named = {"log_prior": total.detach()}
        return total

    def _kappa(self, module: nn.Module) -> Tensor | float:
        """κ of this step: asked once, since it may count steps."""
        return self.kl_weight(module) if self.has_kl else 0.0

    def _accumulate(self, batch: Batch, share: float, kappa: Tensor | float) -> tuple[Tensor, Tensor]:
        """share · (the value without the prior), averaged over samples; its gradient is added to the shell's."""
        note(self.samples * len(batch.targets))
        scale, total = share / self.samples, torch.zeros((), dtype=torch.float32, device=batch.targets.device)
        for _ in range(self.samples):
            value, outputs, named = self.evaluate(self.shell.module, batch, kappa)
            (value * scale).backward()
            total = total + value.detach() * scale
            for name, part in named.items():
                self.named[name] = part * scale + self.named.get(name, 0)
        return total, outputs.detach()

    def evaluate(
        self, module: nn.Module, batch: Batch, kappa: Tensor | float
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The value without the prior, outputs and named parts of one pass of a module under the weights it holds."""

        def forward(inputs: Inputs) -> Tensor:
            with self._precision(batch):
                return apply(module, inputs)

        outputs = forward(batch.inputs)
        if self.check_targets:
            check_batch(self.likelihood, outputs.detach(), batch)
        weight = kappa if self.has_kl else None
        value, named = bound(outputs, module, batch, self.likelihood, self.num_data, weight)
        for term in self.terms:
            extra = term(forward, module, batch)
            value, named[term.name] = value - extra, extra.detach()
        return value, outputs, named

    def _precision(self, batch: Batch) -> AbstractContextManager[object]:
        return torch.autocast(batch.targets.device.type, torch.bfloat16) if self.autocast else nullcontext()

    def _pure(
        self, weights: Params, batch: Batch, kappa: Tensor | float | None, buffers: Params | None = None
    ) -> tuple[Tensor, Tensor]:
        """The value without the prior, and outputs, as a function of weights by name; κ is asked for if it is None."""
        own = {f"module.{name}": value for name, value in (self.shell.cast(weights) | (buffers or {})).items()}
        with plain_attention() if transformed() else nullcontext():
            return functional_call(self._pass, own, (self, batch, kappa))

    def _batched(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Params]:
        leaves = {k: v.detach().requires_grad_() for k, v in self.shell.space.views(theta).items()}
        axes = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, batch)
        kappa = self._kappa(self.shell.module)
        note(self.samples * batch.targets.shape[0] * batch.targets.shape[1])  # members · examples of each
        run = torch.vmap(partial(self._pure, kappa=kappa), in_dims=(0, axes), randomness="different")
        values, outputs = run(leaves, batch)
        gradients = torch.autograd.grad(values.sum(), list(leaves.values()), materialize_grads=True)
        grad = torch.empty_like(theta)
        total = values.detach() + self.prior.write(theta, grad, 1 / self.num_data)
        return total, outputs.detach(), {THETA: grad.add_(torch.cat([g.flatten(1) for g in gradients], 1))}


class _Pass(nn.Module):
    """A module whose forward is the value of a batch, so that functional_call can give it other weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, objective: Objective, batch: Batch, kappa: Tensor | float | None) -> tuple[Tensor, Tensor]:
        """The value without the prior, averaged over samples, and the outputs of the last one."""
        weight = objective._kappa(self.module) if kappa is None else kappa
        values = []
        for _ in range(objective.samples):
            value, outputs, _ = objective.evaluate(self.module, batch, weight)
            values.append(value)
        return values[0] if len(values) == 1 else torch.stack(values).mean(0), outputs
