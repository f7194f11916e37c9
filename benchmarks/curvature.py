"""Curvature over all weights, in units of a plain epoch of training on the same data: forward, backward, Adam.

The toy transformer reads its series out at the last position; the project's own regressor, with two outputs at each
of 24 positions, stands beside it: exact there means 48 backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from bayesformer.attention import Linear
from bayesformer.bench.tasks import TASKS
from bayesformer.core.types import Batch
from bayesformer.data import Data
from bayesformer.laplace import estimate
from bayesformer.likelihoods import Categorical, Gaussian, Likelihood
from bayesformer.models.transformer import Regressor
from benchmarks.harness import Comparison
from benchmarks.laplace_peers import Problem, fits
from benchmarks.workloads import large_images, large_vit

EXAMPLES, FEW = {"vit": 1000}, 100  # 800 otherwise; few where exact takes 48 passes, and 3 rounds of that
VIT = {
    ("diag", "ggn"): 7.0,
    ("diag", "fisher"): 1.3,
    ("diag", "mc"): 1.3,
    ("kron", "ggn"): 7.0,
    ("kron", "mc"): 1.6,
}
BUDGETS = {
    "toy": {("diag", "ggn"): 1.5, ("diag", "fisher"): 1.3, ("diag", "mc"): 1.3, ("kron", "ggn"): 1.5},
    "toy, 2 outputs": {("diag", "ggn"): 1.5},
    "toy per token": {("diag", "ggn"): 40.0, ("diag", "fisher"): 1.3, ("diag", "mc"): 1.3, ("kron", "mc"): 1.6},
    "vit": VIT,
    # Freed memory goes back to the system, and nine columns of slopes are fetched from it again for every minibatch.
    "vit 28 x 28": {**VIT, ("diag", "ggn"): 8.0},
}


# Examples for peers that take long; all of them otherwise. Their rows stand below ours of the same name.
SHARES = {
    "toy": {
        ("diag", "ggn"): {"laplace-torch CurvlinopsGGN": 50, "posteriors": 50},
        ("diag", "fisher"): {"posteriors": 50},
        ("diag", "mc"): {"laplace-torch CurvlinopsGGN": 50},
        ("kron", "ggn"): {},
    },
    "vit": {
        ("diag", "ggn"): {"laplace-torch CurvlinopsGGN": 16, "posteriors": 16},
        ("diag", "fisher"): {"posteriors": 64},
        ("diag", "mc"): {"laplace-torch CurvlinopsGGN": 16},
        ("kron", "ggn"): {"laplace-torch CurvlinopsGGN": 128, "laplace-torch AsdlGGN": 128},
        ("kron", "mc"): {},
    },
}


class LastPosition(nn.Module):
    """The toy's transformer read out at its last position only."""

    def __init__(self, model: Regressor, outputs: int) -> None:
        super().__init__()
        self.model = model
        model.projection = Linear(model.encoder.dim, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, outputs): a mean, and perhaps a scale."""
        return self.model(inputs)[:, -1]


def comparisons() -> Iterator[Comparison]:
    """All comparisons of this file."""
    for label, budgets in BUDGETS.items():
        build, likelihood, data, batch_size = _problem(label)
        for (structure, kind), budget in budgets.items():
            long = budget > 10
            some = data.subset(slice(0, FEW)) if long else data
            work = _curvature(build(), likelihood, some, batch_size, structure, kind)
            plain, name = epoch(build(), likelihood, some, batch_size), f"curvature {structure} {kind}, {label}, epochs"
            yield Comparison(name, work, plain, budget, rounds=3 if long else 11)
            if (structure, kind) in SHARES.get(label, {}):
                peers = Problem(label, build, likelihood, data, batch_size, plain)
                yield from fits(peers, structure, kind, SHARES[label][structure, kind])


def epoch(model: nn.Module, likelihood: Likelihood, data: Data, batch_size: int) -> Callable[[], None]:
    """Plain PyTorch: torch.optim.Adam as it comes, once through the data."""
    optimizer = torch.optim.Adam(model.train().parameters(), lr=1e-3)
    batches = list(data.chunks(batch_size))

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        (-likelihood.log_prob(model(batch.inputs), batch.targets, batch.mask).mean()).backward()
        optimizer.step()

    return lambda: [step(batch) for batch in batches] and None


def _curvature(
    model: nn.Module, likelihood: Likelihood, data: Data, batch_size: int, structure: str, kind: str
) -> Callable[[], object]:
    model.eval()
    return lambda: estimate(model, likelihood, data, structure, kind=kind, batch_size=batch_size)  # type: ignore[arg-type]


def _problem(label: str) -> tuple[Callable[[], nn.Module], Likelihood, Data, int]:
    if label == "vit 28 x 28":
        return large_vit, Categorical(), large_images(1280), 64
    task = TASKS["digits" if label == "vit" else "toy/m1"]()
    data, likelihood = task.load().train.subset(slice(0, EXAMPLES.get(label, 800))), task.likelihood
    outputs = {"toy": 1, "toy, 2 outputs": 2}.get(label)
    if outputs is not None:
        data, likelihood = Data(data.inputs, data.targets[:, -1]), Gaussian(scale=0.5 if outputs == 1 else None)

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = task.model()
        return LastPosition(model, outputs) if isinstance(model, Regressor) and outputs is not None else model

    return build, likelihood, data, task.training.batch_size
