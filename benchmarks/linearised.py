"""The linearised predictive, in units of one plain forward pass over the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from bayesformer.bench.tasks import TASKS, Task
from bayesformer.network import Layout, apply
from bayesformer.posterior import Posterior
from bayesformer.types import Inputs
from bayesformer.weights import BlockGaussian, GaussianWeights
from benchmarks.harness import Comparison
from benchmarks.laplace_peers import Problem, predictions


def comparisons() -> Iterator[Comparison]:
    """All comparisons of this file."""
    digits, toy = TASKS["digits"](), TASKS["toy/m1"]()
    yield compare("linearised, all weights, diagonal, vit", digits, 64, "*", 25.0)
    yield compare("linearised, all weights, kron, vit", digits, 64, "kron", 25.0)
    yield compare("linearised, last layer, diagonal, vit", digits, 64, "projection.*", 1.4)
    yield compare("linearised, last layer, kron, vit", digits, 64, "last_layer", 1.4)
    yield compare("linearised, 24 steps of 2 outputs, toy", toy, 50, "*", 160.0)
    yield compare("linearised, last layer, toy", toy, 50, "projection.*", 1.4)
    yield from by_peers("vit", digits, 64, 8)


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


def compare(name: str, task: Task, batch: int, law: str, budget: float) -> Comparison:
    """Outputs of a posterior on one batch against the model's own forward pass."""
    torch.manual_seed(0)
    model = task.model().eval()
    inputs = task.load().train.take(slice(0, batch)).inputs
    assert isinstance(inputs, Tensor)
    posterior = Posterior(model, task.likelihood, law_of(model, task, law), predictive="linearised")
    plain, repeat = forward(model, inputs), 8 if budget < 2 else 1
    return Comparison(name, _times(lambda: posterior.outputs(inputs), repeat), _times(plain, repeat), budget, rounds=25)


def law_of(model: nn.Module, task: Task, law: str) -> GaussianWeights | BlockGaussian:
    """A Gaussian over the weights whose names match, or a Laplace posterior of Kronecker factors."""
    layout = Layout.of(model)
    if law in {"kron", "last_layer"}:
        from bayesformer.methods.laplace import laplace

        data, subset = task.load().train.subset(slice(0, 64)), "*" if law == "kron" else "projection.*"
        found = laplace(
            model,
            data,
            likelihood=task.likelihood,
            structure="kron",
            subset=subset,
            prior_precision=1.0,
            progress=False,
        )
        assert isinstance(found.weights, BlockGaussian)
        return found.weights
    mean = layout.pack(dict(model.named_parameters()))
    sd = torch.zeros_like(mean)
    for name, part in layout.views(sd).items():
        if law == "*" or name.startswith(law.rstrip("*")):
            part.fill_(0.01)
    return GaussianWeights(mean, sd)


def _times(work: Callable[[], object], repeat: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(repeat):
            work()

    return run
