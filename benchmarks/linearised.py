"""The linearised predictive, in units of one plain forward pass over the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from bayesformer.bench.tasks import TASKS, Task
from bayesformer.core.types import Inputs
from bayesformer.data import Data
from bayesformer.laplace.method import laplace
from bayesformer.laws import GaussianLaw, gaussian
from bayesformer.likelihoods import Categorical, Likelihood
from bayesformer.model.calling import apply
from bayesformer.model.space import Space
from bayesformer.posterior import Posterior
from benchmarks.harness import Comparison
from benchmarks.laplace_peers import Problem, predictions
from benchmarks.workloads import large_images, large_vit


def comparisons() -> Iterator[Comparison]:
    """All comparisons of this file."""
    digits, toy = TASKS["digits"](), TASKS["toy/m1"]()
    large = Work(large_vit(), Categorical(), large_images(64))
    for label, vit in {"vit": work_of(digits, 64), "vit 28 x 28": large}.items():
        yield compare(f"linearised, all weights, diagonal, {label}", vit, "*", 25.0)
        # Slopes are turned into the basis of the factors, three tenths of all products, which are 30 times those of a
        # forward pass.
        yield compare(f"linearised, all weights, kron, {label}", vit, "kron", 25.0)
        yield compare(f"linearised, last layer, diagonal, {label}", vit, "projection.*", 1.4)
        yield compare(f"linearised, last layer, kron, {label}", vit, "last_layer", 1.4)
    yield compare("linearised, 24 steps of 2 outputs, toy", work_of(toy, 50), "*", 160.0)
    yield compare("linearised, last layer, toy", work_of(toy, 50), "projection.*", 1.4)
    yield from by_peers("vit", digits, 64, 8)


class Work(NamedTuple):
    """A model and one batch."""

    model: nn.Module
    likelihood: Likelihood
    data: Data


def work_of(task: Task, batch: int) -> Work:
    """A task's model on its first examples."""
    torch.manual_seed(0)
    return Work(task.model(), task.likelihood, task.load().train.subset(slice(0, batch)))


def by_peers(label: str, task: Task, batch: int, share: int) -> Iterator[Comparison]:
    """The same by other libraries; all weights on a share of the inputs."""
    torch.manual_seed(0)
    model = task.model().eval()
    data = task.load().train.subset(slice(0, batch))
    problem = Problem(label, task.model, task.likelihood, data, batch, forward(model, data.inputs))
    yield from predictions(problem, share)


def forward(model: nn.Module, inputs: Inputs) -> Callable[[], None]:
    """Plain PyTorch: the unit."""

    def run() -> None:
        with torch.inference_mode():
            apply(model, inputs)

    return run


def compare(name: str, work: Work, law: str, budget: float) -> Comparison:
    """Outputs of a posterior on one batch against the model's own forward pass."""
    model, inputs = work.model.eval(), work.data.inputs
    posterior = Posterior(model, work.likelihood, law_of(work, law), predictive="linearised")
    plain, repeat = forward(model, inputs), 8 if budget < 2 else 1
    return Comparison(name, _times(lambda: posterior.outputs(inputs), repeat), _times(plain, repeat), budget, rounds=25)


def law_of(work: Work, law: str) -> gaussian | GaussianLaw:
    """A Gaussian over the weights whose names match, or a Laplace posterior of Kronecker factors."""
    model, likelihood, data = work
    space = Space.of(model)
    if law in {"kron", "last_layer"}:
        subset = "*" if law == "kron" else "projection.*"
        settings = {"structure": "kron", "subset": subset, "prior_precision": 1.0, "progress": False}
        found = laplace(model, data, likelihood=likelihood, **settings)
        assert isinstance(found.law, GaussianLaw)
        return found.law
    mean = space.pack(dict(model.named_parameters()))
    sd = torch.zeros_like(mean)
    for name, part in space.views(sd).items():
        if law == "*" or name.startswith(law.rstrip("*")):
            part.fill_(0.01)
    return gaussian(mean, sd)


def _times(work: Callable[[], object], repeat: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(repeat):
            work()

    return run
