"""Tasks: data, a model and a likelihood, and how a posterior is judged on them.

A task is a frozen dataclass of its settings; `TASKS` lists them by name. The runner knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from bayesformer import evaluate
from bayesformer.data import digits, imdb, toy
from bayesformer.dataset import Data
from bayesformer.errors import unknown_name
from bayesformer.evaluate.process import Gap
from bayesformer.likelihoods import Categorical, Gaussian, Likelihood
from bayesformer.models.transformer import Encoder, Regressor, SequenceClassifier
from bayesformer.models.vit import VisionTransformer
from bayesformer.predictive import CategoricalPredictive, GaussianPredictive, Predictive
from bayesformer.seeds import generator
from bayesformer.train import Training
from bayesformer.types import Inputs


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
    """What the runner needs of a task."""

    primary: ClassVar[str]
    likelihood: ClassVar[Likelihood]

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

    def evaluate(self, ask: Callable[[Inputs], Predictive], data: TaskData) -> Evaluation:
        """Judge a posterior, asked through `ask(inputs)`."""
        ...

    def inputs(self, rows: Tensor) -> Inputs:
        """Model inputs from raw rows of a data file."""
        ...


@dataclass(frozen=True)
class ToySeries:
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

    primary: ClassVar[str] = "log_likelihood"
    likelihood: ClassVar[Likelihood] = Gaussian()

    def __post_init__(self) -> None:
        if self.series not in toy.SERIES:
            raise unknown_name("series", self.series, toy.SERIES)

    @property
    def process(self) -> toy.Series:
        """The true process."""
        return toy.SERIES[self.series]

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

    def evaluate(self, ask: Callable[[Inputs], Predictive], data: TaskData) -> Evaluation:
        """Scores, and the gap to the oracle on the same sequences."""
        test = data.test
        assert isinstance(test.inputs, Tensor)
        assert test.mask is not None
        predictive = ask(test.inputs)
        assert isinstance(predictive, GaussianPredictive)
        truth = self.process.conditional(test.inputs)
        counted, true_counted = predictive.select(test.mask), truth.select(test.mask)
        metrics = evaluate.regression(predictive, test.targets, test.mask)
        metrics["process_mse"] = evaluate.process_mse(counted, true_counted.mean, true_counted.variance)
        metrics["variance_mse"] = evaluate.variance_mse(counted, true_counted.variance)
        ours = evaluate.log_likelihood(predictive, test.targets, test.mask)
        oracle = self.process.log_likelihood(test)
        gap = evaluate.oracle_gap(ours, oracle)
        metrics["oracle_gap"] = gap.mean
        figures = {
            "coverage": evaluate.coverage_curve(counted, test.targets[test.mask]),
            "bands": [_band(predictive, truth, test, i) for i in range(2)],
        }
        return Evaluation(metrics, gap, oracle.double().mean().item(), figures)

    def inputs(self, rows: Tensor) -> Tensor:
        """(N, T) or (N, T, 1) values of a series."""
        if rows.dim() == 2:
            rows = rows.unsqueeze(-1)
        if rows.dim() != 3 or rows.shape[-1] != 1:
            raise ValueError(f"a series must be rows of values, (N, T) or (N, T, 1); got {tuple(rows.shape)}.")
        return rows


@dataclass(frozen=True)
class DigitsVit:
    """Handwritten digits, 8x8, by a small vision transformer; shuffled patches and noise as outsiders."""

    dim: int = 32
    """width of the transformer"""
    depth: int = 2
    """blocks"""
    heads: int = 2
    """attention heads"""
    patch: int = 2
    """side of a patch, in pixels"""
    data_seed: int = 0
    """seed of the outsiders"""

    primary: ClassVar[str] = "log_likelihood"
    likelihood: ClassVar[Likelihood] = Categorical()

    @property
    def training(self) -> Training:
        """80 epochs; the rate as for the series, where one seed hardly tells rates apart here."""
        return Training(epochs=80, batch_size=64, lr=1e-2, schedule="cosine", warmup=100, patience=0)

    def load(self) -> TaskData:
        """A fixed stratified split and two sets of outsiders."""
        data = digits.load()
        assert isinstance(data.test.inputs, Tensor)
        probes = digits.probes(data.test.inputs, generator(self.data_seed, "digits", "probes"), self.patch)
        return TaskData(data.train, data.validation, data.test, probes)

    def model(self) -> nn.Module:
        """A vision transformer with 10 classes."""
        return VisionTransformer(8, self.patch, 1, 10, dim=self.dim, depth=self.depth, heads=self.heads)

    def evaluate(self, ask: Callable[[Inputs], Predictive], data: TaskData) -> Evaluation:
        """Scores on the test digits, and how well entropy tells outsiders from them."""
        assert isinstance(data.test.inputs, Tensor)
        predictive = ask(data.test.inputs)
        outsiders = {name: ask(inputs) for name, inputs in data.probes.items()}
        return classification_evaluation(predictive, data.test, outsiders)

    def inputs(self, rows: Tensor) -> Tensor:
        """(N, 64), (N, 8, 8) or (N, 1, 8, 8) raw pixels from 0 to 16."""
        if rows[0].numel() != 64:
            raise ValueError(f"a digit must have 64 pixels; got rows of shape {tuple(rows.shape[1:])}.")
        data = digits.load()
        return (rows.reshape(-1, 1, 8, 8) - data.mean) / data.std


@dataclass(frozen=True)
class ImdbReviews:
    """Movie reviews, positive or negative, by a transformer trained from scratch; needs BAYESFORMER_DATA."""

    train: int = 4000
    """training reviews"""
    validation: int = 1000
    """validation reviews"""
    test: int = 4000
    """test reviews"""
    words: int = 10000
    """size of the vocabulary"""
    length: int = 128
    """words kept of a review, from its end"""
    data_seed: int = 0
    """which reviews"""
    dim: int = 64
    """width of the transformer"""
    depth: int = 1
    """blocks"""
    heads: int = 2
    """attention heads"""

    primary: ClassVar[str] = "log_likelihood"
    likelihood: ClassVar[Likelihood] = Categorical()

    @property
    def training(self) -> Training:
        """A few epochs: without pretraining, the words are learned by heart soon."""
        return Training(epochs=10, batch_size=50, lr=1e-3, schedule="cosine", warmup=100, patience=0)

    def load(self) -> TaskData:
        """Three disjoint sets of reviews."""
        reviews = imdb.load(self.train, self.validation, self.test, self.words, self.length, self.data_seed)
        return TaskData(reviews.train, reviews.validation, reviews.test, probes={})

    def model(self) -> nn.Module:
        """An encoder whose mean over the words is classified."""
        encoder = Encoder(dim=self.dim, depth=self.depth, heads=self.heads, max_length=self.length, mlp_ratio=4)
        return SequenceClassifier(encoder, self.words, 2)

    def evaluate(self, ask: Callable[[Inputs], Predictive], data: TaskData) -> Evaluation:
        """Scores on the test reviews."""
        return classification_evaluation(ask(data.test.inputs), data.test, {})

    def inputs(self, rows: Tensor) -> Inputs:
        """(N, T) token numbers, 0 where a review has ended."""
        if rows.dim() != 2 or rows.shape[1] > self.length:
            raise ValueError(f"reviews must be rows of at most {self.length} token numbers; got {tuple(rows.shape)}.")
        ids = rows.long()
        return {"input_ids": ids, "attention_mask": imdb.mask_of(ids)}


TASKS: dict[str, Callable[[], Task]] = {
    **{f"toy/{name}": partial(ToySeries, name) for name in toy.SERIES},
    "digits": DigitsVit,
    "imdb": ImdbReviews,
}


def describe(name: str) -> str:
    """One line about a task."""
    task = TASKS[name]()
    if isinstance(task, ToySeries):
        return f"Series {task.series.upper()}: {task.process.description}; the true law is known."
    return (type(task).__doc__ or "").split("\n", 1)[0]


def classification_evaluation(predictive: Predictive, test: Data, outsiders: Mapping[str, Predictive]) -> Evaluation:
    """Everything a classifier is judged by, with outsiders detected by total and by epistemic uncertainty."""
    assert isinstance(predictive, CategoricalPredictive)
    metrics = evaluate.classification(predictive, test.targets, test.mask)
    for name, outsider in outsiders.items():
        found = evaluate.detection(predictive.total.flatten(), outsider.total.flatten())
        metrics |= {f"{metric}/{name}": value for metric, value in found.items()}
        if len(predictive.log_probs) > 1:
            by_spread = evaluate.auroc(predictive.epistemic.flatten(), outsider.epistemic.flatten())
            metrics[f"auroc_epistemic/{name}"] = by_spread
    figures = {
        "reliability": evaluate.reliability(predictive, test.targets),
        "entropy": _entropies({"test": predictive, **outsiders}),
    }
    if isinstance(test.inputs, Tensor):  # images, which can be shown
        figures["examples"] = _examples(predictive, test)
    return Evaluation(metrics, None, None, figures)


def _entropies(sets: Mapping[str, Predictive], bins: int = 30) -> dict[str, Any]:
    classes = next(iter(sets.values())).probs.shape[-1]  # type: ignore[attr-defined]
    edges = torch.linspace(0, float(torch.tensor(float(classes)).log()), bins + 1)
    counts = {
        name: torch.histogram(p.total.flatten().cpu().float().clamp(0, float(edges[-1])), edges)[0].int().tolist()
        for name, p in sets.items()
    }
    return {"edges": _rounded(edges), "sets": counts}


def _examples(predictive: CategoricalPredictive, test: Data, count: int = 8) -> dict[str, Any]:
    images = test.inputs
    assert isinstance(images, Tensor)
    order = predictive.total.argsort()

    def show(index: Tensor) -> list[dict[str, Any]]:
        return [
            {
                "image": _rounded(images[i, 0]),
                "label": int(test.targets[i]),
                "predicted": int(predictive.labels[i]),
                "entropy": round(float(predictive.total[i]), 4),
            }
            for i in index.tolist()
        ]

    return {"highest": show(order.flip(0)[:count]), "lowest": show(order[:count])}


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
    return {"time": time, **{name: _rounded(value.flatten()) for name, value in columns.items()}}


def _rounded(values: Tensor) -> Any:
    return torch.round(values.detach().double().cpu(), decimals=4).tolist()
