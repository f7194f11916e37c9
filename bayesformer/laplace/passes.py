"""A pass over the data: minibatches, each with its sites and the gradients of its columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.core.effort import note
from bayesformer.core.progress import Reporter, Silent
from bayesformer.core.seeds import fold
from bayesformer.core.types import Batch, Inputs
from bayesformer.data.batches import Batches
from bayesformer.jacobians import columns
from bayesformer.jacobians.capture import Capture, irregular_values
from bayesformer.jacobians.sites import Site, backpropagate
from bayesformer.laplace.structures import CurvatureBlock
from bayesformer.likelihoods import Likelihood
from bayesformer.likelihoods.target_rows import check_rows
from bayesformer.model.space import Space

COLUMNS = 9  # at a time: many small steps cost more than what they compute, large ones leave the cache


class CurvaturePiece(NamedTuple):
    """A block of the result: its parameters, its place in the vector θ of all inferred weights, its curvature."""

    names: tuple[str, ...]
    place: slice | Tensor
    structure: CurvatureBlock
    lost: float = 0.0
    """share of the trace of a Kronecker factor that its eigenpairs leave out, the larger of the two"""


@dataclass(frozen=True)
class BatchPass:
    """One minibatch after its forward pass, with the columns that are to be sent back."""

    batch: Batch
    outputs: Tensor  # (B, ..., K), with their graph
    values: Tensor  # the same without it, in the precision of the weights' vector
    sites: list[Site]
    valid: Tensor | None  # (B, T): inputs that are no padding, where that is known
    columns: Iterator[Tensor]
    log_prob: Tensor  # (B,), of the targets
    single_column: bool = False
    """whether there is one column in all, so that its backward pass may free the graph"""

    def gradients(self) -> Iterator[list[Tensor]]:
        """For a few columns after another, g (S, B, ...) of every site."""
        columns = iter(self.columns)
        while some := list(islice(columns, COLUMNS)):
            note(len(some) * len(self.batch.targets))
            together = some[0].unsqueeze(0) if len(some) == 1 else torch.stack(some)
            del some
            yield backpropagate(self.sites, self.outputs, together, keep=not self.single_column)

    def probe_gradients(self) -> list[Tensor]:
        """g (1, B, ...) of a column of irregular numbers: what is 0 or cancels there does so for every column."""
        return backpropagate(self.sites, self.outputs, irregular_values(self.values).unsqueeze(0))


@dataclass
class Sweep:
    """Minibatches of the data, in order, as often as `each` is called.

    After a pass `log_likelihood` is its sum over the data, `num_data` the number of examples that were read, and
    `observed` how many numbers among their targets count.
    """

    capture: Capture
    space: Space
    likelihood: Likelihood
    data: Batches
    kind: str
    batch_size: int
    samples: int = 1
    seed: int = 0
    reporter: Reporter = field(default_factory=Silent)
    log_likelihood: float = 0.0
    num_data: int = 0
    observed: int = 0

    def __post_init__(self) -> None:
        self.device = next(iter(self.capture.parameters.values())).device
        self.starts = {name: place.start for name, place in self.space.slices.items()}

    @property
    def names(self) -> list[str]:
        """The parameters followed, in the order of θ."""
        return list(self.capture.space.names)

    def size(self, name: str) -> int:
        """How many numbers a parameter has."""
        return self.capture.parameters[name].numel()

    def zeros(self, *shape: int) -> Tensor:
        """Zeros in the precision of θ, on the device of the parameters."""
        return torch.zeros(shape, dtype=self.capture.dtype, device=self.device)

    def place(self, names: list[str]) -> slice | Tensor:
        """Where these parameters lie in θ: a slice if they are neighbours."""
        return self.space.places(self.space.select(names), self.device)

    def each(self, work: Callable[[BatchPass], None]) -> None:
        """`work` on one minibatch after another. A callback and no iterator: a graph is freed before the next one."""
        self.log_likelihood, self.num_data, self.observed = 0.0, 0, 0
        total = (self.data.num_data or 0) * self.data.realisations
        with torch.inference_mode(False), torch.no_grad():
            for number, batch in enumerate(self.data.in_order(self.batch_size, self.device)):
                self.log_likelihood += self._one(batch, number, work)
                self.num_data += len(batch.targets)
                self.observed += count_observed(self.likelihood, batch)
                self.reporter.update("curvature", self.num_data, total or self.num_data)

    def _one(self, batch: Batch, number: int, work: Callable[[BatchPass], None]) -> float:
        step = self.run(batch, number)
        work(step)
        return step.log_prob.double().sum().item()

    def run(self, batch: Batch, number: int = 0) -> BatchPass:
        """The forward pass of one minibatch, refused where its outputs are not finite or its targets do not fit."""
        outputs, sites = self.capture(batch.inputs)
        values = outputs.detach().to(self.capture.dtype)
        self._check(values, batch, number)
        _, answered = self.likelihood.align(batch.targets, batch.mask)
        valid = _padding(batch.inputs)
        if valid is None and self.likelihood.per_token(values) and answered is not None and answered.dim() == 2:
            valid = answered
        if self.kind == "fisher":
            column, log_prob = columns.score(self.likelihood, values, batch.targets, batch.mask)
            found = iter([column])
        else:
            log_prob = self.likelihood.log_prob(values, batch.targets, batch.mask)
            found = self._columns(values, batch, answered, number)
        return BatchPass(batch, outputs, values, sites, valid, found, log_prob, self.capture.columns == 1)

    def _check(self, values: Tensor, batch: Batch, number: int) -> None:
        bad = int((~torch.isfinite(values)).reshape(len(values), -1).any(1).sum())
        if bad:
            raise ValueError(
                f"model's outputs must be finite on the data; {bad} of {len(values)} examples in minibatch {number} "
                "have NaN or inf."
            )
        read = self.data.tensors is None  # else all targets were checked before the pass
        if read and bool(self.likelihood.kept(batch.targets, batch.mask).any()):
            check_rows(self.likelihood, values, batch.targets, batch.mask, f" of minibatch {number}")

    def _columns(self, values: Tensor, batch: Batch, answered: Tensor | None, number: int) -> Iterator[Tensor]:
        if self.kind == "ggn":
            return columns.exact(self.likelihood, values, answered)
        # Draws at ignored targets must not count: the mask says so, as ignore_index cannot.
        counted = self.likelihood.counted(batch.targets, batch.mask)
        seed = fold(self.seed, "curvature", number)
        return columns.sampled(self.likelihood, values, counted, self.samples, seed)


def count_observed(likelihood: Likelihood, batch: Batch) -> int:
    """How many numbers among the targets of a minibatch count."""
    counted = likelihood.counted(batch.targets, batch.mask)
    if counted is None:
        return batch.targets.numel()
    return int(counted.sum()) * math.prod(batch.targets.shape[counted.dim() :])


def _padding(inputs: Inputs) -> Tensor | None:
    """(B, T): an attention mask among keyword inputs."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
