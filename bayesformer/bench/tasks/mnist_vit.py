"""The task `mnist`: MNIST by a vision transformer, with ambiguous digits and clothing to be unsure about."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn

from bayesformer.bench.tasks.judging import classification_evaluation, first_of, noise_scores
from bayesformer.bench.tasks.protocol import Ask, Evaluation, Task, TaskData
from bayesformer.core.seeds import generator
from bayesformer.core.settings import LATER
from bayesformer.data import Data
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
    test: int | None = field(default=None, metadata=LATER)
    """test images, and outsiders of each kind, at most; none takes all"""
    validated: int | None = field(default=None, metadata=LATER)
    """validation images that are looked at, the first of them; none looks at all"""
    noisy: int = field(default=2000, metadata=LATER)
    """test images that are also shown with noise; 0 leaves these scores out"""
    noise: float = field(default=1.0, metadata=LATER)
    """standard deviation of that noise, in standard deviations of all pixels"""
    token_keep: float = field(default=1.0, metadata=LATER)
    """share of the patches that a training step sees of an image, at random; evaluation sees all"""

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
        probes = {name: images[: self.test] for name, images in probes.items()}
        validation = first_of(data.validation, self.validated)
        return TaskData(first_of(data.train, self.train), validation, first_of(data.test, self.test), probes)

    def model(self) -> nn.Module:
        """A vision transformer of 49 patches with 10 classes."""
        return VisionTransformer(
            mnist.SIDE,
            self.patch,
            1,
            mnist.CLASSES,
            dim=self.dim,
            depth=self.depth,
            heads=self.heads,
            token_keep=self.token_keep,
        )

    def evaluate(self, ask: Ask, data: TaskData) -> Evaluation:
        """Scores on the test digits, and how well uncertainty tells ambiguous digits and clothing from them."""
        assert isinstance(data.test.inputs, Tensor)
        predictive = ask(data.test.inputs)
        outsiders = {name: ask(inputs) for name, inputs in data.probes.items()}
        evaluation = classification_evaluation(predictive, data.test, outsiders)
        if self.noisy:
            shown = data.test.subset(slice(0, self.noisy))
            evaluation.metrics.update(noise_scores(ask(self.with_noise(shown)), shown))
        return evaluation

    def with_noise(self, test: Data) -> Tensor:
        """The images of a set with Gaussian noise on every pixel, the same for every method and seed."""
        assert isinstance(test.inputs, Tensor)
        noise = torch.randn(test.inputs.shape, generator=generator(0, "mnist", "noise"))
        return test.inputs + self.noise * noise

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
