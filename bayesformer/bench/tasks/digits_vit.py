"""The task `digits`: handwritten digits by a vision transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from bayesformer.bench.tasks.judging import classification_evaluation
from bayesformer.bench.tasks.protocol import Ask, Evaluation, Task, TaskData
from bayesformer.core.seeds import generator
from bayesformer.datasets import digits
from bayesformer.likelihoods import Categorical, Likelihood
from bayesformer.models.vit import VisionTransformer
from bayesformer.train.training import Training


@dataclass(frozen=True)
class DigitsVit(Task):
    """Handwritten digits, 8x8, by a small vision transformer; shuffled patches and noise are out of distribution."""

    dim: int = 32
    """width of the transformer"""
    depth: int = 2
    """blocks"""
    heads: int = 2
    """attention heads"""
    patch: int = 2
    """side of a patch, in pixels"""
    data_seed: int = 0
    """seed of the out-of-distribution inputs"""

    likelihood: ClassVar[Likelihood] = Categorical()

    @property
    def training(self) -> Training:
        """80 epochs with the learning rate of the toy series; rates hardly differ here."""
        return Training(epochs=80, batch_size=64, lr=1e-2, schedule="cosine", warmup=100, patience=0)

    def load(self) -> TaskData:
        """A fixed stratified split and two sets of out-of-distribution inputs."""
        data = digits.load()
        assert isinstance(data.test.inputs, Tensor)
        probes = digits.probes(data.test.inputs, generator(self.data_seed, "digits", "probes"), self.patch)
        return TaskData(data.train, data.validation, data.test, probes)

    def model(self) -> nn.Module:
        """A vision transformer with 10 classes."""
        return VisionTransformer(8, self.patch, 1, 10, dim=self.dim, depth=self.depth, heads=self.heads)

    def evaluate(self, ask: Ask, data: TaskData) -> Evaluation:
        """Scores on the test digits, and how well entropy tells out-of-distribution inputs from them."""
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
