"""A pass over the data: minibatches, each with its sites and the gradients of its columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.core.progress import Reporter, Silent
from bayesformer.core.seeds import fold
from bayesformer.core.types import Batch, Inputs
from bayesformer.data import Data
from bayesformer.data.inputs import map_inputs
from bayesformer.jacobians import columns
from bayesformer.jacobians.capture import Capture, patternless
from bayesformer.jacobians.sites import Site, backpropagate
from bayesformer.laplace.structures import CurvatureBlock
from bayesformer.likelihoods import Likelihood
from bayesformer.network import Layout, device_of

COLUMNS = 9  # at a time: many small steps cost more than what they compute, large ones leave the cache


class Piece(NamedTuple):
    """A block of the result: its parameters, its place in the flat vector of all trainable weights, its curvature."""

    names: tuple[str, ...]
    place: slice | Tensor
    structure: CurvatureBlock


@dataclass(frozen=True)
class Look:
    """One minibatch after its forward pass."""

    batch: Batch
    outputs: Tensor  # (B, ..., K), with their graph
    sites: list[Site]
    valid: Tensor | None  # (B, T): inputs that are no padding, where that is known
    columns: Iterator[Tensor]
    log_prob: Tensor  # (B,), of the targets
    only: bool = False
    """whether there is one column, and nothing is asked of the graph after it"""

    def gradients(self) -> Iterator[list[Tensor]]:
        """For a few columns after another, g (S, B, ...) of every site."""
        columns = iter(self.columns)
        while some := list(islice(columns, COLUMNS)):
            yield backpropagate(self.sites, self.outputs, torch.stack(some), keep=not self.only)

    def trial(self) -> list[Tensor]:
        """g of a column without a pattern: what is 0 or cancels there does so by the nature of the model."""
        return backpropagate(self.sites, self.outputs, patternless(self.outputs).unsqueeze(0))


@dataclass
class Sweep:
    """Minibatches of the data, in order, as often as `each` is called.

    After a pass `log_likelihood` is its sum over the data.
    """

    capture: Capture
    likelihood: Likelihood
    data: Data
    kind: str
    batch_size: int
    samples: int = 1
    seed: int = 0
    reporter: Reporter = field(default_factory=Silent)
    log_likelihood: float = 0.0

    def __post_init__(self) -> None:
        self.layout = Layout.of(self.capture.model)
        starts = torch.tensor([0, *self.layout.sizes]).cumsum(0).tolist()
        self.starts = dict(zip(self.layout.names, starts, strict=False))

    @property
    def names(self) -> list[str]:
        """The parameters followed, in the order of the flat vector."""
        return [name for name in self.layout.names if name in self.capture.parameters]

    def size(self, name: str) -> int:
        """Numbers of a parameter."""
        return self.capture.parameters[name].numel()

    def zeros(self, *shape: int) -> Tensor:
        """In the type and on the device of the parameters."""
        return next(iter(self.capture.parameters.values())).new_zeros(shape)

    def place(self, names: list[str]) -> slice | Tensor:
        """Where these parameters lie: a slice if they are neighbours."""
        slices = [slice(self.starts[name], self.starts[name] + self.size(name)) for name in names]
        if all(a.stop == b.start for a, b in pairwise(slices)):
            return slice(slices[0].start, slices[-1].stop)
        return torch.cat([torch.arange(s.start, s.stop) for s in slices])

    def each(self, work: Callable[[Look], None]) -> None:
        """`work` on one minibatch after another. A callback and no iterator: a graph is gone before the next one."""
        self.log_likelihood, done = 0.0, 0
        for number, batch in enumerate(self.data.chunks(self.batch_size)):
            self.log_likelihood += self._one(batch, number, work)
            done += len(batch.targets)
            self.reporter.update("curvature", done, len(self.data))

    def _one(self, batch: Batch, number: int, work: Callable[[Look], None]) -> float:
        look = self.look(batch, number)
        work(look)
        return look.log_prob.double().sum().item()

    def look(self, batch: Batch, number: int = 0) -> Look:
        """One minibatch."""
        device = device_of(self.capture.model)
        mask = None if batch.mask is None else batch.mask.to(device)
        batch = Batch(map_inputs(batch.inputs, lambda x: x.to(device)), batch.targets.to(device), mask)
        outputs, sites = self.capture(batch.inputs)
        _, answered = self.likelihood.align(batch.targets, batch.mask)
        valid = _padding(batch.inputs)
        if valid is None and self.likelihood.per_token(outputs) and answered is not None and answered.dim() == 2:
            valid = answered
        only = self.capture.columns == 1
        if self.kind == "fisher":
            column, log_prob = columns.score(self.likelihood, outputs, batch.targets, batch.mask)
            return Look(batch, outputs, sites, valid, iter([column]), log_prob, only)
        log_prob = self.likelihood.log_prob(outputs.detach(), batch.targets, batch.mask)
        found = self._columns(outputs, batch, answered, number)
        return Look(batch, outputs, sites, valid, found, log_prob, only)

    def _columns(self, outputs: Tensor, batch: Batch, answered: Tensor | None, number: int) -> Iterator[Tensor]:
        if self.kind == "ggn":
            return columns.exact(self.likelihood, outputs, answered)
        # Draws at ignored targets must not count: the mask says so, as ignore_index cannot.
        counted = self.likelihood.counted(batch.targets, batch.mask)
        seed = fold(self.seed, "curvature", number)
        return columns.sampled(self.likelihood, outputs, counted, self.samples, seed)


def _padding(inputs: Inputs) -> Tensor | None:
    """(B, T): an attention mask among keyword inputs."""
    if isinstance(inputs, Mapping) and "attention_mask" in inputs and inputs["attention_mask"].dim() == 2:
        return inputs["attention_mask"].bool()
    return None
