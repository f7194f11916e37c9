"""Regression on small tables: one that scikit-learn carries along, and Friedman's three problems, whose law is known.

Inputs and targets are in standard deviations of the training rows, so that log-likelihoods of different problems can
be compared; the oracle is in the same units. In the target's own units a log-likelihood is lower by the log of that
standard deviation, and a gap to the oracle is the same.

scikit-learn also carries `linnerud`, which is left out: 20 rows make a test set of two or three, on which no two
methods can be told apart.

Letters: N rows, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesformer.core.seeds import generator
from bayesformer.data import Data
from bayesformer.datasets.toy import GaussianMixture

PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Friedman:
    """y = f(x) + s ε with x uniform in a box: Friedman (1991), "Multivariate adaptive regression splines"."""

    name: str
    description: str
    low: tuple[float, ...]  # corners of the box, one number per feature
    high: tuple[float, ...]
    noise: float  # s
    mean: Callable[[Tensor], Tensor]  # f: (N, F) -> (N,)

    def rows(self, count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """`count` fresh inputs (N, F) and targets (N, 1), in double precision."""
        low, high = torch.tensor(self.low, dtype=torch.float64), torch.tensor(self.high, dtype=torch.float64)
        x = low + (high - low) * torch.rand(count, len(low), generator=source, dtype=torch.float64)
        noise = torch.randn(count, generator=source, dtype=torch.float64)
        return x, (self.mean(x) + self.noise * noise).unsqueeze(-1)


@dataclass(frozen=True)
class Diabetes:
    """442 patients, ten measurements each, and the progress of their disease a year later."""

    name: str = "diabetes"
    description: str = "442 patients, ten measurements, and the progress of their disease a year later"

    @staticmethod
    def rows() -> tuple[Tensor, Tensor]:
        """All inputs (442, 10) and targets (442, 1), in their own units."""
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True, scaled=False)
        return torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64).unsqueeze(-1)


Problem = Friedman | Diabetes


@dataclass(frozen=True)
class Units:
    """Where a column's 0 and 1 lie, by the training rows alone."""

    mean: Tensor  # (columns,)
    sd: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> Units:
        """Mean and standard deviation of every column."""
        sd, mean = torch.std_mean(rows, 0)
        if bool((sd == 0).any()):
            raise ValueError(f"rows must vary in every column; column {int((sd == 0).nonzero()[0])} does not.")
        return cls(mean, sd)

    def standardised(self, rows: Tensor) -> Tensor:
        """In float32, as models take it."""
        return ((rows.double() - self.mean) / self.sd).float()

    def restored(self, rows: Tensor) -> Tensor:
        """In the columns' own units and double precision."""
        return rows.double() * self.sd + self.mean


@dataclass(frozen=True)
class Table:
    """Inputs (N, F) and targets (N, 1) in three parts, in units of the training rows."""

    problem: Problem
    train: Data
    validation: Data
    test: Data
    features: Units
    target: Units

    def conditional(self, inputs: Tensor) -> GaussianMixture | None:
        """The exact law of the target given inputs (N, F), in the table's units; None for data of the world."""
        if not isinstance(self.problem, Friedman):
            return None
        mean = self.problem.mean(self.features.restored(inputs)).unsqueeze(-1)  # (N, 1)
        variance = (self.problem.noise / self.target.sd).square()
        means = ((mean - self.target.mean) / self.target.sd)[None]
        return GaussianMixture(torch.ones(1), means.float(), variance.expand_as(means).float())

    def outside(self, inputs: Tensor) -> Tensor:
        """The inputs moved out of the box that holds the training rows: straight away from its centre, until the
        feature that is furthest out is twice as far from the centre as the box reaches."""
        assert isinstance(self.train.inputs, Tensor)
        low, high = self.train.inputs.amin(0), self.train.inputs.amax(0)
        centre, reach = (low + high) / 2, (high - low) / 2
        way = (inputs - centre) / reach
        return centre + 2 * reach * way / way.abs().amax(-1, keepdim=True)


def load(problem: Problem, sizes: Mapping[str, int], seed: int) -> Table:
    """The parts "train", "validation" and "test" in these sizes; a seed always gives the same rows.

    Rows of Friedman's problems are drawn fresh for every part, so that more test rows change no training row. Those
    of a table are dealt out after one shuffle.
    """
    if any(sizes[part] < 2 for part in PARTS):
        raise ValueError(f"every part must have at least 2 rows; got {dict(sizes)}.")
    drawn = _drawn(problem, sizes, seed) if isinstance(problem, Friedman) else _dealt(problem, sizes, seed)
    x, y = drawn["train"]
    features, target = Units.of(x), Units.of(y)
    parts = {name: Data(features.standardised(x), target.standardised(y)) for name, (x, y) in drawn.items()}
    return Table(problem, parts["train"], parts["validation"], parts["test"], features, target)


def _drawn(problem: Friedman, sizes: Mapping[str, int], seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {part: problem.rows(sizes[part], generator(seed, problem.name, part)) for part in PARTS}


def _dealt(problem: Diabetes, sizes: Mapping[str, int], seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    x, y = problem.rows()
    if sum(sizes.values()) > len(x):
        raise ValueError(f"the parts of {problem.name} must have at most {len(x)} rows together; got {dict(sizes)}.")
    order = torch.randperm(len(x), generator=generator(seed, problem.name, "order"))
    found, start = {}, 0
    for part in PARTS:
        index = order[start : start + sizes[part]]
        found[part], start = (x[index], y[index]), start + sizes[part]
    return found


def _friedman1(x: Tensor) -> Tensor:
    bend = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5).square()
    return bend + 10 * x[:, 3] + 5 * x[:, 4]


def _reactance(x: Tensor) -> Tensor:
    """Of an alternating-current circuit: frequency ω = x₁, inductance L = x₂, capacitance C = x₃; ω L - 1 / (ω C)."""
    return x[:, 1] * x[:, 2] - 1 / (x[:, 1] * x[:, 3])


def _friedman2(x: Tensor) -> Tensor:
    return torch.hypot(x[:, 0], _reactance(x))


def _friedman3(x: Tensor) -> Tensor:
    return torch.atan(_reactance(x) / x[:, 0])


_CIRCUIT = (0.0, 40 * math.pi, 0.0, 1.0), (100.0, 560 * math.pi, 1.0, 11.0)

PROBLEMS: dict[str, Problem] = {
    "diabetes": Diabetes(),
    "friedman1": Friedman("friedman1", "five of ten features matter", (0.0,) * 10, (1.0,) * 10, 1.0, _friedman1),
    "friedman2": Friedman("friedman2", "the impedance of a circuit", *_CIRCUIT, 125.0, _friedman2),
    "friedman3": Friedman("friedman3", "the phase angle of a circuit", *_CIRCUIT, 0.1, _friedman3),
}
"""Noise as in that paper: 1 for the first, about a third of the signal's standard deviation for the circuit."""
