"""The tasks `toy/m1` to `toy/m5`: series whose true law is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesformer.bench.tasks.judging import regression_evaluation, rounded
from bayesformer.bench.tasks.protocol import Ask, Evaluation, Task, TaskData
from bayesformer.core.errors import unknown_name
from bayesformer.core.seeds import generator
from bayesformer.data import Data
from bayesformer.datasets import toy
from bayesformer.likelihoods import Gaussian, Likelihood
from bayesformer.likelihoods.predictive import GaussianPredictive
from bayesformer.models.transformer import Encoder, Regressor
from bayesformer.train.training import Training


@dataclass(frozen=True)
class ToySeries(Task):
    """Next-value prediction on a series whose true law is known."""

    series: str
    """which process: m1 to m5"""
    train: int = 800
    """training sequences"""
    validation: int = 80
    """validation sequences"""
    test: int = 4000
    """test sequences; drawn fresh, so many cost nothing"""
    length: int = 24
    """predicted steps per sequence"""
    data_seed: int = 0
    """seed of the data; training seeds do not change it"""
    dim: int = 64
    """width of the transformer"""
    depth: int = 1
    """blocks"""
    heads: int = 1
    """attention heads"""

    likelihood: ClassVar[Likelihood] = Gaussian()

    def __post_init__(self) -> None:
        if self.series not in toy.SERIES:
            raise unknown_name("series", self.series, toy.SERIES)

    @property
    def process(self) -> toy.Series:
        """The process that generates the series, with its exact conditional law."""
        return toy.SERIES[self.series]

    @property
    def description(self) -> str:
        """One line about the series: its name and its process."""
        return f"Series {self.series.upper()}: {self.process.description}; the true law is known."

    @property
    def training(self) -> Training:
        """100 epochs, the rate falling to 0; one rate for all series, by validation data (results/README.md)."""
        return Training(epochs=100, batch_size=50, lr=1e-2, schedule="cosine", warmup=100, patience=0)

    def load(self) -> TaskData:
        """Three independent sets of sequences."""

        def part(name: str, count: int) -> Data:
            return toy.generate(self.process, count, generator(self.data_seed, self.series, name), self.length)

        return TaskData(
            part("train", self.train), part("validation", self.validation), part("test", self.test), probes={}
        )

    def model(self) -> nn.Module:
        """A causal transformer that predicts the mean and scale of the next value."""
        return Regressor(Encoder(dim=self.dim, depth=self.depth, heads=self.heads, causal=True))

    def evaluate(self, ask: Ask, data: TaskData) -> Evaluation:
        """Scores, and the gap to the oracle on the same sequences."""
        test = data.test
        assert isinstance(test.inputs, Tensor)
        predictive, truth = ask(test.inputs), self.process.conditional(test.inputs)
        assert isinstance(predictive, GaussianPredictive)
        evaluation = regression_evaluation(predictive, test, truth, {})
        evaluation.figures["bands"] = [_band(predictive, truth, test, i) for i in range(2)]
        return evaluation

    def inputs(self, rows: Tensor) -> Tensor:
        """(N, T) or (N, T, 1) values of a series."""
        if rows.dim() == 2:
            rows = rows.unsqueeze(-1)
        if rows.dim() != 3 or rows.shape[-1] != 1:
            raise ValueError(f"a series must be rows of values, (N, T) or (N, T, 1); got {tuple(rows.shape)}.")
        return rows


def _band(predictive: GaussianPredictive, truth: toy.GaussianMixture, test: Data, index: int) -> dict[str, Any]:
    """The 90 % bands of one series: of the prediction, of its noise alone, and of the truth."""
    assert test.mask is not None
    kept = torch.zeros_like(test.mask)
    kept[index] = test.mask[index]
    ours, true = predictive.select(kept), truth.select(kept)
    noise = 1.6449 * ours.aleatoric.unsqueeze(-1).sqrt()
    columns = {
        "observed": test.targets[kept],
        "mean": ours.mean,
        "low": ours.quantile(0.05),
        "high": ours.quantile(0.95),
        "aleatoric_low": ours.mean - noise,
        "aleatoric_high": ours.mean + noise,
        "oracle_mean": true.mean,
        "oracle_low": true.quantile(0.05),
        "oracle_high": true.quantile(0.95),
    }
    time = [t + 1 for t in kept[index].nonzero().flatten().tolist()]
    return {"time": time, **{name: rounded(value.flatten()) for name, value in columns.items()}}
