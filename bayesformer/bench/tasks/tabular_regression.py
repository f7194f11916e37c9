"""The tasks `regression/*`: regression on small tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from torch import Tensor, nn

from bayesformer.bench.tasks.judging import regression_evaluation
from bayesformer.bench.tasks.protocol import Ask, Evaluation, Task, TaskData
from bayesformer.core.errors import unknown_name
from bayesformer.datasets import regression
from bayesformer.likelihoods import Gaussian, Likelihood
from bayesformer.likelihoods.predictive import GaussianPredictive, Predictive
from bayesformer.models.tabular import FeatureTransformer, MlpRegressor
from bayesformer.models.transformer import Encoder
from bayesformer.train.training import Training


@dataclass(frozen=True)
class TabularRegression(Task):
    """A number from a row of features, in units of the training rows; out of distribution is outside their box."""

    problem: str
    """which table: diabetes, friedman1, friedman2 or friedman3"""
    train: int = 240
    """training rows"""
    validation: int = 80
    """validation rows"""
    test: int = 122
    """test rows; of Friedman's problems drawn fresh, so many cost nothing"""
    network: Literal["transformer", "mlp"] = "transformer"
    """a transformer whose tokens are the features, or one hidden layer as in the UCI comparisons"""
    dim: int = 16
    """width of the transformer"""
    depth: int = 1
    """blocks"""
    heads: int = 2
    """attention heads"""
    hidden: int = 50
    """hidden units of the MLP"""
    data_seed: int = 0
    """which rows; training seeds do not change them"""

    likelihood: ClassVar[Likelihood] = Gaussian()

    def __post_init__(self) -> None:
        if self.problem not in regression.PROBLEMS:
            raise unknown_name("problem", self.problem, regression.PROBLEMS)

    @property
    def description(self) -> str:
        """One line about the table: its rows, and whether the true law is known."""
        problem = regression.PROBLEMS[self.problem]
        known = "; the true law is known" if isinstance(problem, regression.Friedman) else ""
        return f"Regression, {self.train} rows: {problem.description}{known}."

    @property
    def training(self) -> Training:
        """50 epochs, the rate falling to 0; one rate for all tables, by validation data (results/README.md)."""
        return Training(epochs=50, batch_size=32, lr=1e-2, schedule="cosine", warmup=100, patience=0)

    @cached_property
    def table(self) -> regression.Table:
        """The rows of the table with their units and, where it is known, the law of the target."""
        sizes = {part: getattr(self, part) for part in regression.PARTS}
        return regression.load(regression.PROBLEMS[self.problem], sizes, self.data_seed)

    def load(self) -> TaskData:
        """Three disjoint sets of rows, and the test rows moved outside the training box."""
        table = self.table
        assert isinstance(table.test.inputs, Tensor)
        return TaskData(table.train, table.validation, table.test, {"outside": table.outside(table.test.inputs)})

    def model(self) -> nn.Module:
        """A network that predicts the mean and scale of the target."""
        features = len(self.table.features.mean)
        if self.network == "mlp":
            return MlpRegressor(features, self.hidden)
        return FeatureTransformer(Encoder(self.dim, self.depth, self.heads, max_length=1 + features), features)

    def evaluate(self, ask: Ask, data: TaskData) -> Evaluation:
        """Regression scores, the gap to the oracle where it is known, and how well the variance detects far inputs."""
        assert isinstance(data.test.inputs, Tensor)
        predictive = ask(data.test.inputs)
        outsiders = {name: ask(inputs) for name, inputs in data.probes.items()}
        return regression_evaluation(predictive, data.test, self.table.conditional(data.test.inputs), outsiders)

    def inputs(self, rows: Tensor) -> Tensor:
        """(N, F) features in their own units."""
        features = len(self.table.features.mean)
        if rows.dim() != 2 or rows.shape[1] != features:
            raise ValueError(f"rows of {self.problem} must have {features} features; got shape {tuple(rows.shape)}.")
        return self.table.features.standardised(rows)

    def answer(self, predictive: Predictive) -> Predictive:
        """The prediction in the target's own units."""
        assert isinstance(predictive, GaussianPredictive)
        target = self.table.target
        return GaussianPredictive(target.restored(predictive.means), predictive.variances * target.sd.square())
