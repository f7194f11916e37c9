"""What a method is given, and what it must be able to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from bayesformer.dataset import Data
from bayesformer.engine import Strategy
from bayesformer.likelihoods import Likelihood
from bayesformer.network import apply, device_of
from bayesformer.posterior import Posterior
from bayesformer.progress import Reporter, Silent
from bayesformer.train import Training
from bayesformer.types import ModelFactory


@dataclass(frozen=True)
class Problem:
    """Everything a method needs to know."""

    model: nn.Module | ModelFactory
    likelihood: Likelihood
    data: Data
    validation: Data | None = None
    training: Training = field(default_factory=Training)
    seed: int = 0
    strategy: Strategy = "auto"
    workers: int | None = None
    checkpoint: Path | None = None
    checkpoint_seconds: float = 10.0
    reporter: Reporter = field(default_factory=Silent)


class Method(Protocol):
    """Anything with `fit(problem) -> Posterior`.

    A tuple `AFTER_TRAINING` on its class may name the settings that come into play after training: the runner then
    trains once for all variants that differ in these alone.
    """

    def fit(self, problem: Problem) -> Posterior:
        """The posterior of this method."""
        ...


def check_problem(model: nn.Module, problem: Problem) -> None:
    """Run the model on two examples and see that its outputs, the likelihood and all targets fit together."""
    model.eval()
    for label, given in [("train", problem.data), ("validation", problem.validation)]:
        if given is None:
            continue
        data = given.to(device_of(model))
        few = data.take(slice(0, 2))
        with torch.no_grad():
            outputs = apply(model, few.inputs)
        if len(outputs) != len(few.targets):
            raise ValueError(f"model must return one output per example; got {len(outputs)} for {len(few.targets)}.")
        # The labels of all examples, against outputs of the first: only the number of classes matters.
        full = outputs[:1].expand(len(data), *outputs.shape[1:])
        try:
            problem.likelihood.check(full, data.targets, data.mask)
        except ValueError as error:
            raise ValueError(f"{label} data: {error}") from error
