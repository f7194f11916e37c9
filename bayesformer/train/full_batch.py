"""The log joint of all training data as a function of the inferred weights, in evaluation mode.

    U(θ) = -Σ_n log p(y_n | x_n, θ) - log p(θ)

with its gradient, its Gauss-Newton matrix and products with that. Sums are over N examples, not means; where a pass
over the data gives another number of them (`Batches.readings`), they are scaled to N. Random data
(augmentation) have another log-likelihood in every reading: U is its average over several, which are always the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from bayesformer.core.effort import note
from bayesformer.core.seeds import fold, generator
from bayesformer.core.types import Batch, Inputs
from bayesformer.data import Batches, as_batches
from bayesformer.data.in_memory import Data
from bayesformer.data.inputs import parts_of
from bayesformer.inference.linear_algebra import Product
from bayesformer.jacobians import columns
from bayesformer.jacobians.products import CurvatureProducts
from bayesformer.laplace.estimate import Curvature, estimate
from bayesformer.laplace.structures import DenseCurvature
from bayesformer.model.skeleton import Skeleton
from bayesformer.train.prototype import Prototype, Start
from bayesformer.train.vector_prior import VectorPrior

FORWARD, PRODUCT = 1 / 3, 2.0  # what a pass without its backward pass and a product with H cost, in epochs of gradients
CHEAP = 2**22  # numbers that a forward pass of all data makes in about 10 ms
COLUMNS = 512  # per example, beyond which the curvature is taken from targets drawn from the model
STRAIGHT = 1e-3  # second difference of outputs, over the first, below which they count as linear in the weights


class FullBatch:
    """U of a skeleton's weights around a start, over all data of a prototype. `epochs` counts what was computed."""

    def __init__(self, prototype: Prototype, skeleton: Skeleton, start: Start, prior: VectorPrior) -> None:
        self.prototype, self.prior, self.space = prototype, prior, skeleton.space
        self.data = prototype.whole
        self.shell = skeleton.shell()
        self.shell.load(start.theta)
        self.shell.load_buffers(start.buffers)
        self.shell.module.eval()
        self.epochs = 0.0

    @property
    def size(self) -> int:
        """P, the number of inferred weights."""
        return self.space.size

    @property
    def chunk(self) -> int:
        """Examples per pass of a product with H: fewer of a large model."""
        return self.prototype.product_examples

    @property
    def targets(self) -> int:
        """How many targets the data have in all: examples times their positions."""
        first = self.prototype.trial_batch.targets
        return self.prototype.problem.num_data * (first.numel() // len(first))

    @property
    def is_objective(self) -> bool:
        """Whether training and sampling see this very function: no noise in training passes, no moving averages.

        Neither do segments with re-entrant checkpointing, which have no curvature.
        """
        made = self.prototype
        return made.randomness.kind == "none" and not made.moves_buffers and not made.is_reentrant

    @property
    def is_cheap(self) -> bool:
        """Whether a forward pass of all data takes about 10 ms, so that tens of them are nothing beside a fit."""
        return self.prototype.example_numbers * self.prototype.problem.num_data <= CHEAP

    def potential(self, theta: Tensor, examples: int | None = None) -> float:
        """U(θ) over all data, summed in float64; or over some examples, always the same, and scaled up to N."""
        self.shell.load(theta)
        data, share = self._some(examples)
        total = 0.0
        with torch.no_grad():
            for batch in data.in_order(self.prototype.gradient_examples, self.shell.theta.device):
                with self._pass():
                    total -= float(self._log_prob(batch).double().sum())
        self.epochs += FORWARD * share * data.readings
        return total / (share * data.readings) - float(self.prior.log_prob(theta).double())

    def _some(self, examples: int | None) -> tuple[Batches, float]:
        """Some examples drawn at random, the same in every call, and their share of the data; all of them for None."""
        data, count = self.data, self.prototype.problem.num_data
        if examples is None or examples >= count:
            return data, 1.0
        seed = fold(self.prototype.problem.seed, "curvature")
        batch = next(iter(data.epoch(examples, seed=seed, member=0, epoch=0)))
        return as_batches(Data(*batch), "data"), len(batch.targets) / count

    def slope(self, theta: Tensor) -> tuple[float, Tensor]:
        """U(θ) over all data and its gradient ∇U(θ) (P,)."""
        shell, total = self.shell, -float(self.prior.log_prob(theta).double())
        shell.load(theta)
        assert shell.grad is not None
        self.prior.write(shell.theta, shell.grad, -1.0)
        total += self._add_slopes(self._batches(), self.data.readings)
        return total, shell.grad.clone()

    def slopes(self, theta: Tensor) -> Tensor:
        """(R, P): the gradient of the negative log-likelihood in each of R readings of random data."""
        shell, rows = self.shell, []
        shell.load(theta)
        assert shell.grad is not None
        for number in range(self.data.realisations):
            shell.grad.zero_()
            reading = self.data.realisation(number)
            self._add_slopes(reading.in_order(self.prototype.gradient_examples, theta.device), reading.readings)
            rows.append(shell.grad.clone())
        return torch.stack(rows)

    def _add_slopes(self, batches: Iterable[Batch], readings: float) -> float:
        """The negative log-likelihood of the batches over `readings`; its gradient is added to the shell's."""
        total, seen = 0.0, 0
        for batch in batches:
            note(len(batch.targets))
            with self._pass(), torch.enable_grad():
                loss = -self._log_prob(batch).sum() / readings
                loss.backward()
            total, seen = total + float(loss.detach().double()), seen + len(batch.targets)
        self.epochs += seen / self.prototype.problem.num_data
        return total

    def curvature(self, theta: Tensor, structure: Literal["full", "kron", "diag"]) -> Curvature:
        """The Gauss-Newton matrix of the data alone at θ, without the prior; Kronecker factors are weighted."""
        self.shell.load(theta)
        likelihood = self.prototype.likelihood
        outputs = self.prototype.trial(self.shell, self.prototype.trial_batch)
        exact = columns.count("ggn", likelihood, outputs) <= COLUMNS
        self.epochs += self.data.readings
        with self._pass():
            return estimate(
                self.shell.module,
                likelihood,
                self.data,
                structure,
                kind="ggn" if exact else "mc",
                seed=self.prototype.problem.seed,
                space=self.space,
                weighted=True,
            )

    def score_scatter(self, theta: Tensor) -> Tensor:
        """(P, P), float64: Σ_n (g_n - ḡ)(g_n - ḡ)ᵀ over the gradients g_n of all examples, the noise of batches."""
        total = self.slopes(theta).mean(0).double()
        self.shell.load(theta)
        self.epochs += self.data.readings
        likelihood = self.prototype.likelihood
        with self._pass():
            found = estimate(self.shell.module, likelihood, self.data, "full", kind="fisher", space=self.space)
        block = found.structures[0]
        assert isinstance(block, DenseCurvature)
        return block.matrix.double() - torch.outer(total, total) / self.prototype.problem.num_data

    def hessian(self, theta: Tensor, examples: int | None = None) -> Product:
        """v -> H v at θ, prior included: over all data, or over some examples drawn at random and scaled up to N."""
        data, share = self._some(examples)
        products = self._products(theta, data)

        def times(v: Tensor) -> Tensor:
            self.epochs += PRODUCT * share * data.readings
            return products.ggn(v) / share + self.prior.precision_times(theta, v)

        return times

    def output_slopes(self, theta: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """(R, P), (R,): gradients of `count` outputs of random examples, and the curvature that the targets have there.

        Outputs are those that the likelihood identifies, of classes centred logits f_k - mean f: u · f with a direction
        u, along which the target's curvature is uᵀ Λ u / |u|⁴. One of each example, if there are as many; of fewer
        examples several each. Outputs without a target that counts are left out.
        """
        made, device = self.prototype, self.shell.theta.device
        batch = next(iter(self.data.epoch(count, seed=made.problem.seed, member=0, epoch=0, device=device)))
        products, each = self._products(theta, self.data), -(-count // len(batch.targets))
        source, found, curved = generator(made.problem.seed, "outputs"), [], []
        for one in parts_of(batch, 1):
            outputs = made.trial(self.shell, one)
            _, counted = made.likelihood.align(one.targets, one.mask)
            there = torch.ones_like(outputs, dtype=torch.bool)
            if counted is not None:
                there &= counted.view(*counted.shape, *[1] * (outputs.dim() - counted.dim()))
            places = there.flatten().nonzero().flatten().cpu()
            for place in places[torch.randperm(len(places), generator=source, device="cpu")[:each]].tolist():
                column = torch.zeros_like(outputs)
                column.view(-1)[place] = 1
                column = made.likelihood.identified(column)  # u
                found.append(products.transposed(one.inputs, column))
                curvature = made.likelihood.hessian_times(outputs, column).double() * column
                curved.append(float(curvature.sum() / column.double().square().sum().square()))
                self.epochs += 1 / made.problem.num_data
        rows = torch.stack(found) if found else theta.new_zeros(0, len(theta))
        return rows, torch.tensor(curved, dtype=torch.float64, device=theta.device)

    def tangent(self, theta: Tensor, inputs: Inputs, v: Tensor) -> Tensor:
        """(B, ..., K): J v, how the outputs on some inputs change as θ moves along v."""
        return self._products(theta, self.data).tangent(inputs, v)

    def _products(self, theta: Tensor, data: Batches) -> CurvatureProducts:
        self.shell.load(theta)
        made, seed = self.prototype, self.prototype.problem.seed
        return CurvatureProducts(self.shell, made.likelihood, data, self.chunk, made.evaluation_randomness, seed)

    def is_linear(self) -> bool:
        """Whether the outputs are linear in the weights: second differences of a few examples in a random direction.

        The direction is as long as the weights of each tensor are, so that a hidden layer shows.
        """
        theta = self.shell.theta.clone()
        source = generator(self.prototype.problem.seed, "linear", device=theta.device)
        step = torch.randn(len(theta), generator=source, dtype=theta.dtype, device=theta.device)
        for place in self.space.slices.values():
            step[place] *= 0.5 * theta[place].square().mean().sqrt().clamp_min(0.1)
        outputs = []
        for point in (theta + step, theta, theta - step):
            self.shell.load(point)
            outputs.append(self.prototype.trial(self.shell, self.prototype.trial_batch).double())
        self.shell.load(theta)
        above, middle, below = outputs
        return bool((above - 2 * middle + below).norm() <= STRAIGHT * (above - below).norm())

    def _log_prob(self, batch: Batch) -> Tensor:
        outputs = self.shell(batch.inputs)
        return self.prototype.likelihood.log_prob(outputs, batch.targets, batch.mask)

    def _batches(self) -> Iterator[Batch]:
        return self.data.in_order(self.prototype.gradient_examples, self.shell.theta.device)

    @contextmanager
    def _pass(self) -> Iterator[None]:
        source = generator(self.prototype.problem.seed, "full batch", device=self.shell.theta.device)
        with self.prototype.evaluation_randomness.passing(source):
            yield
