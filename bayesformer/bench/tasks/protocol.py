"""What the runner needs of a task, and what a task gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from torch import Tensor, nn

from bayesformer.core.settings import summary
from bayesformer.core.types import Inputs
from bayesformer.data import Data
from bayesformer.evaluate.process import Gap
from bayesformer.likelihoods import Likelihood
from bayesformer.likelihoods.predictive import Predictive
from bayesformer.train.training import Training

Ask: TypeAlias = Callable[[Inputs], Predictive]
"""A posterior as a task sees it: inputs in, a predictive out."""


class TaskData(NamedTuple):
    """What a task trains and is judged on."""

    train: Data
    validation: Data
    test: Data
    probes: Mapping[str, Tensor]  # inputs a model should be unsure about


class Evaluation(NamedTuple):
    """A posterior judged: numbers, the distance to the truth where it is known, and data for figures."""

    metrics: dict[str, float]
    gap: Gap | None
    oracle: float | None  # the truth's own log-likelihood
    figures: dict[str, Any]


class Task(Protocol):
    """Data, a model and a likelihood. A task is a frozen dataclass of its settings and a subclass of this."""

    primary: ClassVar[str] = "log_likelihood"
    likelihood: ClassVar[Likelihood]

    @property
    def description(self) -> str:
        """One line."""
        return summary(type(self))

    @property
    def training(self) -> Training:
        """Default training of every method on this task."""
        ...

    def load(self) -> TaskData:
        """The data, the same for every method and seed."""
        ...

    def model(self) -> nn.Module:
        """A fresh model."""
        ...

    def evaluate(self, ask: Ask, data: TaskData) -> Evaluation:
        """Judge a posterior, asked through `ask(inputs)`."""
        ...

    def inputs(self, rows: Tensor) -> Inputs:
        """Model inputs from raw rows of a data file."""
        ...

    def answer(self, predictive: Predictive) -> Predictive:
        """A prediction in the units of the data file."""
        return predictive
