"""Products of curvature matrices with vectors, over all data and without the matrices: a few passes per product.

With f_n the outputs of example n, J_n = ∂f_n/∂θ, Λ_n the likelihood's Fisher information in the outputs:

    ggn      Σ_n J_nᵀ Λ_n J_n v                generalised Gauss-Newton; the Fisher matrix of the model
    fisher   Σ_n g_n g_nᵀ v                    the empirical Fisher matrix, g_n = ∇ log p(y_n | x_n, θ)
    hessian  -∇² Σ_n log p(y_n | x_n, θ) v     which may be indefinite

All are sums over the data, of minus the log-likelihood, without a prior. J v is found by differentiating twice in
reverse: Jᵀu is linear in u, and its derivative along v is J v (Pearlmutter 1994; Schraudolph 2002 for the products).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bayesformer.core.effort import note
from bayesformer.core.seeds import generator
from bayesformer.core.types import Batch, Inputs
from bayesformer.data.batches import Batches
from bayesformer.data.inputs import inputs_to, parts_of
from bayesformer.likelihoods import Likelihood
from bayesformer.model.modes import check_eval
from bayesformer.model.randomness import Randomness, plain_attention
from bayesformer.model.shell import Shell

BATCH_SIZE = 256  # examples per pass
PRODUCT = 2  # gradients that a product is counted as


class CurvatureProducts:
    """Products of vectors v (P,) with the curvature of a model's log-likelihood at the weights θ of a shell.

    `bayesformer.curvature_products` makes one of a model or a posterior. `at(theta)` moves it to other weights.
    """

    def __init__(
        self,
        shell: Shell,
        likelihood: Likelihood,
        data: Batches,
        batch_size: int = BATCH_SIZE,
        randomness: Randomness | None = None,
        seed: int = 0,
    ) -> None:
        check_eval(shell.module, "dropout and running averages would make curvature random")
        if shell.grad is None:
            raise ValueError("shell must have gradients for products; make it by skeleton.shell(gradients=True).")
        self.shell, self.likelihood, self.data, self.batch_size = shell, likelihood, data, batch_size
        self.randomness, self.seed = randomness or Randomness(), seed

    @property
    def theta(self) -> Tensor:
        """(P,): the weights at which products are taken."""
        return self.shell.theta

    @property
    def size(self) -> int:
        """P, the number of weights and the length of the vectors."""
        return self.shell.space.size

    def at(self, theta: Tensor) -> CurvatureProducts:
        """The same object, from now on at the weights θ (P,), which are copied."""
        self.shell.load(theta)
        return self

    def ggn(self, v: Tensor) -> Tensor:
        """(P,): Σ_n J_nᵀ Λ_n J_n v, positive semidefinite."""
        return self._sum(lambda batch: self._batch_ggn(batch, v), v)

    def batch_ggn(self, batch: Batch, v: Tensor) -> Tensor:
        """(P,): the same sum over the examples of one batch, on the device of the weights."""
        self._checked(v)
        total = torch.zeros_like(self.theta)
        for part in parts_of(batch, self.batch_size):
            with self._pass():
                total += self._batch_ggn(part, v)
        return total

    def _batch_ggn(self, batch: Batch, v: Tensor) -> Tensor:
        note(PRODUCT * len(batch.targets))
        outputs = self._outputs(batch.inputs)
        through = self.likelihood.hessian_times(outputs.detach(), self._forward(outputs, v))
        _, counted = self.likelihood.align(batch.targets, batch.mask)
        if counted is not None:
            through = through * counted.view(*counted.shape, *[1] * (through.dim() - counted.dim()))
        return self._back(outputs, through)

    def fisher(self, v: Tensor) -> Tensor:
        """(P,): Σ_n g_n (g_nᵀ v) with the gradients g_n of the log-likelihood at the targets themselves."""

        def one(batch: Batch) -> Tensor:
            note(PRODUCT * len(batch.targets))
            log_prob = self.likelihood.log_prob(self._outputs(batch.inputs), batch.targets, batch.mask)  # (B,)
            return self._back(log_prob, self._forward(log_prob, v))

        return self._sum(one, v)

    def hessian(self, v: Tensor) -> Tensor:
        """(P,): -∇² Σ_n log p(y_n | x_n, θ) v, the Hessian of the loss times v."""

        def one(batch: Batch) -> Tensor:
            note(PRODUCT * len(batch.targets))
            loss = -self.likelihood.log_prob(self._outputs(batch.inputs), batch.targets, batch.mask).sum()
            slopes = self._gradients(loss, create_graph=True)
            pairs = zip(slopes, self._split(v), strict=True)
            along = torch.stack([(slope * part).sum().to(self.theta) for slope, part in pairs]).sum()
            return self._packed(self._gradients(along))

        return self._sum(one, v)

    def gradient(self) -> Tensor:
        """(P,): ∇ Σ_n log p(y_n | x_n, θ), the gradient of the log-likelihood."""

        def one(batch: Batch) -> Tensor:
            note(len(batch.targets))
            log_prob = self.likelihood.log_prob(self._outputs(batch.inputs), batch.targets, batch.mask)
            return self._packed(self._gradients(log_prob.sum()))

        return self._sum(one, self.theta)

    def linearised(self, inputs: Inputs, v: Tensor) -> Tensor:
        """(B, ..., K): f(x, θ) + J v, the outputs on any inputs to first order at the weights θ + v."""
        with self._pass():
            outputs = self._outputs(inputs_to(inputs, self.theta.device))
            return outputs.detach() + self._forward(outputs, self._checked(v))

    def tangent(self, inputs: Inputs, v: Tensor) -> Tensor:
        """(B, ..., K): J v, how the outputs on any inputs change as θ moves along v."""
        with self._pass():
            return self._forward(self._outputs(inputs_to(inputs, self.theta.device)), self._checked(v))

    def transposed(self, inputs: Inputs, u: Tensor) -> Tensor:
        """(P,): Jᵀ u, the gradient of Σ u · f(x, θ) in the weights, for u (B, ..., K) in the shape of the outputs."""
        with self._pass():
            return self._back(self._outputs(inputs_to(inputs, self.theta.device)), u)

    def _sum(self, one: Callable[[Batch], Tensor], v: Tensor) -> Tensor:
        """(P,): `one` summed over all batches and scaled to N examples, which averages over readings of random data."""
        self._checked(v)
        total = torch.zeros_like(self.theta)
        for batch in self.data.in_order(self.batch_size, self.theta.device):
            with self._pass():
                total += one(batch)
        return total.div_(self.data.readings)

    @contextmanager
    def _pass(self) -> Iterator[None]:
        """Around one pass and what goes back through it; a model that draws in evaluation mode draws the same."""
        source = generator(self.seed, "products", device=self.theta.device)
        # Fused attention kernels cannot be differentiated twice.
        with torch.inference_mode(False), torch.enable_grad(), self.randomness.passing(source), plain_attention():
            yield

    def _outputs(self, inputs: Inputs) -> Tensor:
        outputs = self.shell(inputs)
        if not outputs.requires_grad:
            raise ValueError("outputs must depend on the inferred weights by operations that torch can differentiate.")
        return outputs

    def _forward(self, values: Tensor, v: Tensor) -> Tensor:
        """In the shape of `values`: their derivative along v."""
        cotangent = torch.zeros_like(values, requires_grad=True)
        pulled = self._gradients(values, cotangent, create_graph=True)
        pairs = [(g, part) for g, part in zip(pulled, self._split(v), strict=True) if g.requires_grad]
        if not pairs:
            return torch.zeros_like(values)
        found = torch.autograd.grad([g for g, _ in pairs], cotangent, [part for _, part in pairs], retain_graph=True)
        return found[0]

    def _back(self, values: Tensor, cotangent: Tensor) -> Tensor:
        """(P,): the derivative of Σ cotangent · values in θ."""
        return self._packed(self._gradients(values, cotangent.to(values.dtype)))

    def _gradients(self, values: Tensor, cotangent: Tensor | None = None, create_graph: bool = False) -> list[Tensor]:
        """One gradient per weight, 0 where the values do not depend on it."""
        weights = list(self.shell.weights.values())
        if not values.requires_grad:
            return [torch.zeros_like(weight) for weight in weights]
        found = torch.autograd.grad(
            values, weights, cotangent, retain_graph=create_graph, create_graph=create_graph, materialize_grads=True
        )
        return list(found)

    def _split(self, v: Tensor) -> list[Tensor]:
        """v as one tensor per weight, in the precision and on the device of that weight."""
        return list(self.shell.cast(self.shell.space.views(v)).values())

    def _packed(self, gradients: list[Tensor]) -> Tensor:
        """(P,), in the precision of θ."""
        return torch.cat([g.detach().flatten().to(self.theta) for g in gradients])

    def _checked(self, v: Tensor) -> Tensor:
        if v.shape != self.theta.shape:
            raise ValueError(f"v must be a vector of {self.size} numbers, one per weight; got {tuple(v.shape)}.")
        return v
