"""The objective together with all training data, for algorithms that need more than a batch's gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bayesformer.core.draws import uniform_like
from bayesformer.core.seeds import generator
from bayesformer.core.types import Batch, Params
from bayesformer.core.vectors import THETA
from bayesformer.data.batches import Batches
from bayesformer.data.in_memory import batch_to
from bayesformer.data.inputs import map_inputs, parts_of
from bayesformer.jacobians import columns
from bayesformer.jacobians.capture import Capture
from bayesformer.jacobians.products import CurvatureProducts
from bayesformer.jacobians.site_groups import site_groups
from bayesformer.jacobians.sites import Site, backpropagate
from bayesformer.train.objective import Objective

CHUNK = 1024  # examples per pass over all data


class WholeDataObjective:
    """An `Objective` that also gives gradients over all data, curvature products and scores (a `WholeLogJoint`).

    The shell's modules are in evaluation mode: everything is one function of θ.
    """

    def __init__(self, objective: Objective, data: Batches, batch_size: int = CHUNK) -> None:
        self.objective, self.data, self.batch_size = objective, data, batch_size  # examples per pass, at most
        self.num_data, self.shell = objective.num_data, objective.shell
        self._products = CurvatureProducts(self.shell, objective.likelihood, data, batch_size)
        self._capture = Capture(self.shell.module, self.shell.space)
        self._whole: list[Batch] | None = None

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Value and outputs, purely."""
        return self.objective(params, batch)

    def value_and_grad(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor, Params]:
        """Value, outputs and gradient on a batch; the gradient's memory is reused by the next call."""
        return self.objective.value_and_grad(params, batch)

    def over_all(self, params: Params) -> tuple[Tensor, Params]:
        """Value and gradient over all data, chunk by chunk: a mean over their rows, and the prior over N."""
        return self.objective.over(params, self._batches(), self.data.rows)

    def _batches(self) -> Iterable[Batch]:
        device = self.shell.theta.device
        if self.data.tensors is None:
            return self.data.in_order(self.batch_size, device)
        if self._whole is None:  # views of the data, or one copy of them on the device of the weights
            self._whole = list(self.data.in_order(self.batch_size, device))
        return self._whole

    def curvature_times(self, params: Params, batch: Batch, vector: Tensor) -> Tensor:
        """(P,): the Gauss-Newton matrix of a batch plus the prior's curvature over N, times a vector."""
        found = self._products.at(params[THETA]).batch_ggn(batch, vector).div_(len(batch.targets))
        return found.add_(self.objective.prior.precision_times(params[THETA], vector), alpha=1 / self.num_data)

    def scores(self, params: Params, batch: Batch, count: int) -> Tensor:
        """(S, P): gradients of log p(y | x, θ) of single examples, y drawn from the model."""
        self.shell.load(params[THETA])
        parts = parts_of(self._random(batch, count), self.batch_size)
        return torch.cat([self._part_scores(part) for part in parts])

    def _part_scores(self, batch: Batch) -> Tensor:
        likelihood = self.objective.likelihood
        with torch.no_grad():
            outputs, sites = self._capture(batch.inputs)
            values = outputs.detach()
            source = generator(int(uniform_like(torch.empty((), dtype=torch.float64, device=values.device)) * 2**52))
            targets = likelihood.sample(values, source)
            column, _ = columns.score(likelihood, values, targets, likelihood.counted(batch.targets, batch.mask))
            return self._rows(sites, backpropagate(sites, outputs, column.unsqueeze(0), keep=False))

    def _rows(self, sites: list[Site], gradients: list[Tensor]) -> Tensor:
        """(B, P): the gradients of all weights, example by example."""
        theta, slices = self.shell.theta, self.shell.space.slices
        rows = theta.new_zeros(gradients[0].shape[1], len(theta))
        for group in site_groups(sites):
            start = slices[group.name].start
            place = slice(start + group.stretch.start, start + group.stretch.stop)
            rows[:, place] = group.per_example(group.pick(gradients))[0]
        return rows

    def _random(self, batch: Batch, count: int) -> Batch:
        """`count` examples at random where data are in memory, else the first of the batch."""
        data, device = self.data.tensors, self.shell.theta.device
        if data is None:
            mask = None if batch.mask is None else batch.mask[:count]
            return Batch(map_inputs(batch.inputs, lambda x: x[:count]), batch.targets[:count], mask)
        drawn = uniform_like(torch.empty(min(count, len(data)), dtype=torch.float64, device=device))
        index = (drawn * len(data)).long().to(data.targets.device)
        return batch_to(data.take(index), device)
