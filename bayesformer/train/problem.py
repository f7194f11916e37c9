"""What a method is given, and what it must be able to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from bayesformer.core.progress import Reporter, Silent
from bayesformer.core.strategy import Strategy
from bayesformer.core.types import ModelFactory
from bayesformer.data import as_batches
from bayesformer.data.batches import Batches
from bayesformer.layers.preparation import Preparation
from bayesformer.likelihoods import Likelihood
from bayesformer.model.space import Choice
from bayesformer.posterior import Posterior
from bayesformer.train.training import Training

INITS = ("given", "fresh", "head")


@dataclass(frozen=True)
class Models:
    """Models that are there already, for members to start from: member i from the i-th, in turn."""

    models: tuple[nn.Module, ...]

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models must hold at least one model; got none.")

    def __call__(self) -> nn.Module:
        """The model of the first member."""
        return self.models[0]

    def of(self, member: int) -> nn.Module:
        """The model that a member starts from."""
        return self.models[member % len(self.models)]


@dataclass(frozen=True)
class Problem:
    """Everything a method needs to know."""

    model: nn.Module | ModelFactory
    likelihood: Likelihood
    data: Batches
    validation: Batches | None = None
    training: Training = field(default_factory=Training)
    seed: int = 0
    infer: Choice = None
    """which weights are learned at all; None: those that require a gradient"""
    init: Literal["given", "fresh", "head"] = "given"
    """where members start: at the weights given, at new random ones, or with only `head` new"""
    head: Choice = None
    """which weights init="head" draws anew"""
    preparation: Preparation = field(default_factory=Preparation)
    """changes of the model that come before those of the method"""
    prior: Posterior | None = None
    """an earlier Gaussian posterior that takes the place of the method's prior"""
    strategy: Strategy = "auto"
    workers: int | None = None
    checkpoint: Path | None = None
    checkpoint_seconds: float = 10.0
    networks: Path | None = None
    """a folder of trained networks: those that are there are not trained again, the others are added"""
    reporter: Reporter = field(default_factory=Silent)

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", as_batches(self.data, "data"))
        if self.validation is not None:
            object.__setattr__(self, "validation", as_batches(self.validation, "validation"))
        if not isinstance(self.training, Training):
            raise ValueError(f"training must be a Training, such as Training(epochs=3); got {self.training!r}.")
        if self.init not in INITS:
            raise ValueError(f"init must be 'given', 'fresh' or 'head'; got {self.init!r}.")
        if (self.init == "head") != (self.head is not None):
            raise ValueError(
                "head must name the weights to draw anew, with init='head' and only then; "
                f"got init={self.init!r}, head={self.head!r}."
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be a whole number; got {self.seed!r}.")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "reporter": Silent()}  # a terminal stays with its process

    @property
    def num_data(self) -> int:
        """N, the number of training examples."""
        return self.data.require_num_data()


class Method(Protocol):
    """Anything with `fit(problem) -> Posterior`.

    A tuple `AFTER_TRAINING` on its class may name the settings that come into play after training: the runner then
    trains once for all variants that differ in these alone. A method `fit_trained(problem)` takes the place of `fit`
    where the model is trained already and needs no more training.
    """

    def fit(self, problem: Problem) -> Posterior:
        """The posterior that this method finds."""
        ...


def settings_of(method: object) -> Mapping[str, Any]:
    """The settings of a method by name."""
    return {name: getattr(method, name) for name in method.__dataclass_fields__}  # type: ignore[attr-defined]
