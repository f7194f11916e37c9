"""The task `mnist`: MNIST by a vision transformer, with ambiguous digits and clothing to be unsure about."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from torch import Tensor, nn

from bayesformer.bench.tasks.judging import classification_evaluation
from bayesformer.bench.tasks.protocol import Ask, Evaluation, Task, TaskData
from bayesformer.datasets import ambiguous_mnist, mnist
from bayesformer.likelihoods import Categorical, Likelihood
from bayesformer.models.vit import VisionTransformer
from bayesformer.train.training import Training


@dataclass(frozen=True)
class MnistVit(Task):
    """MNIST by a small vision transformer; Ambiguous-MNIST and Fashion-MNIST are what it should be unsure about."""

    dim: int = 32
    """width of the transformer"""
    depth: int = 2
    """blocks"""
    heads: int = 1
    """attention heads"""
    patch: int = 4
    """side of a patch, in pixels"""
    validation: int = 12_000
    """of the 60,000 training images, kept for validation"""
    train: int | None = None
    """training images, the first of the others; none takes all 48,000"""

    likelihood: ClassVar[Likelihood] = Categorical()

    @property
    def training(self) -> Training:
        """30 epochs with the learning rate of the other series of images, falling to 0."""
        return Training(epochs=30, batch_size=128, lr=1e-2, schedule="cosine", warmup=100, patience=0)

    def load(self) -> TaskData:
        """Three disjoint sets of digits; 6,000 ambiguous digits and the 10,000 test images of Fashion-MNIST."""
        data = digits(self.validation)
        probes = {
            "ambiguous": ambiguous_mnist.load("test", data.mean, data.std),
            "fashion": mnist.clothing(data.mean, data.std),
        }
        train = data.train if self.train is None else data.train.subset(slice(0, self.train))
        return TaskData(train, data.validation, data.test, probes)

    def model(self) -> nn.Module:
        """A vision transformer of 49 patches with 10 classes."""
        return VisionTransformer(
            mnist.SIDE, self.patch, 1, mnist.CLASSES, dim=self.dim, depth=self.depth, heads=self.heads
        )

    def evaluate(self, ask: Ask, data: TaskData) -> Evaluation:
        """Scores on the test digits, and how well uncertainty tells ambiguous digits and clothing from them."""
        assert isinstance(data.test.inputs, Tensor)
        predictive = ask(data.test.inputs)
        outsiders = {name: ask(inputs) for name, inputs in data.probes.items()}
        return classification_evaluation(predictive, data.test, outsiders)

    def inputs(self, rows: Tensor) -> Tensor:
        """(N, 784), (N, 28, 28) or (N, 1, 28, 28) pixels from 0 to 255."""
        if rows[0].numel() != mnist.SIDE**2:
            raise ValueError(f"an image must have {mnist.SIDE**2} pixels; got rows of shape {tuple(rows.shape[1:])}.")
        data = digits(self.validation)
        return mnist.scaled(rows.reshape(-1, mnist.SIDE, mnist.SIDE).float() / 255, data.mean, data.std)


@lru_cache(maxsize=1)
def digits(validation: int) -> mnist.Standardised:
    """MNIST with this many validation images; kept, since reading it takes a second."""
    return mnist.load(validation)
