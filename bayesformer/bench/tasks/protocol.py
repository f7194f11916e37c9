"""The interface between the runner and a task."""

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
    """The data of a task: three disjoint sets, and inputs unlike the training data."""

    train: Data
    validation: Data | None  # None: nothing is chosen by them
    test: Data
    probes: Mapping[str, Tensor]  # inputs a model should be unsure about


class Evaluation(NamedTuple):
    """Scores of a posterior on a task, its gap to the true process where that is known, and data for figures."""

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
        """One line about the task, shown by `bayesformer list` and on the report page."""
        return summary(type(self))

    @property
    def training(self) -> Training:
        """The default `Training` of every method on this task."""
        ...

    def load(self) -> TaskData:
        """The data, the same for every method and seed."""
        ...

    def model(self) -> nn.Module:
        """A new model with freshly drawn weights."""
        ...

    def evaluate(self, ask: Ask, data: TaskData) -> Evaluation:
        """Score a posterior on the test data; `ask(inputs)` returns its predictive."""
        ...

    def inputs(self, rows: Tensor) -> Inputs:
        """Inputs of the model from the rows of a data file, (N, ...)."""
        ...

    def answer(self, predictive: Predictive) -> Predictive:
        """The predictive in the units of the data file, for those who asked."""
        return predictive
