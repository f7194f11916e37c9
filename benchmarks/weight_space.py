"""Steps of inference over weights, in units of a plain Adam step of the same model in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from bayesformer.bench.tasks import TASKS, Task
from bayesformer.dataset import Data
from bayesformer.functional import THETA
from bayesformer.inference import baoab, ivon, sghmc, sgld, vi_diag
from bayesformer.layers import convert
from bayesformer.methods.layers import Penalty
from bayesformer.methods.members import build_optimiser
from bayesformer.network import FlatLogJoint, FlatModel
from bayesformer.priors import as_prior
from bayesformer.train import Training
from bayesformer.types import LogJoint, Transform
from benchmarks.harness import Comparison

STEPS = 12  # per round: a round is a fraction of a second
TRAINING = Training(lr=1e-3, warmup=50)


def comparisons() -> Iterator[Comparison]:
    """All comparisons of this file."""
    for label, name in {"toy": "toy/m1", "vit": "digits"}.items():
        task = TASKS[name]()
        plain = adam_steps(task)
        for algorithm, (build, budget) in ALGORITHMS.items():
            yield Comparison(f"{algorithm} step, {label}", flat_steps(task, build), plain, budget, rounds=25)
        yield Comparison(
            f"mean-field step, local reparameterisation, {label}",
            flat_steps(task, build_optimiser, prepare=convert, penalty=Penalty(1.0)),
            plain,
            2.5,
            rounds=25,
        )


def _vi(log_joint: LogJoint, training: Training, num_data: int) -> Transform:
    return vi_diag.build(log_joint, 1 / num_data, training.adam())


def _sghmc(log_joint: LogJoint, training: Training, num_data: int) -> Transform:  # noqa: ARG001
    return sghmc.build(log_joint, 1e-2, 1 / num_data, 10.0)


def _baoab(log_joint: LogJoint, training: Training, num_data: int) -> Transform:  # noqa: ARG001
    return baoab.build(log_joint, 1e-2, 1 / num_data, 10.0)


def _sgld(log_joint: LogJoint, training: Training, num_data: int) -> Transform:  # noqa: ARG001
    return sgld.build(log_joint, 1e-4, 1 / num_data)


def _ivon(log_joint: LogJoint, training: Training, num_data: int) -> Transform:  # noqa: ARG001
    return ivon.build(log_joint, 1e-2, float(num_data))


ALGORITHMS: dict[str, tuple[Callable[..., Transform], float]] = {
    "diagonal vi": (_vi, 1.2),
    "sghmc": (_sghmc, 1.05),
    "baoab": (_baoab, 1.05),
    "sgld": (_sgld, 1.05),
    "ivon": (_ivon, 1.2),
}


def adam_steps(task: Task) -> Callable[[], None]:
    """Plain PyTorch: torch.optim.Adam as it comes, on a batch."""
    torch.manual_seed(0)
    model, batch = task.model().train(), _batch(task)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def run() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            (-task.likelihood.log_prob(model(batch.inputs), batch.targets, batch.mask).mean()).backward()
            optimizer.step()

    return run


def flat_steps(
    task: Task,
    build: Callable[..., Transform],
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    penalty: Penalty | None = None,
) -> Callable[[], None]:
    """The same model and batch under one of our transforms, in place, with a Gaussian prior."""
    torch.manual_seed(0)
    model = task.model() if prepare is None else prepare(task.model())
    flat, batch = FlatModel(model), _batch(task)
    flat.module.train()
    prior = None if penalty is not None else as_prior("normal(0, 1)")
    joint = FlatLogJoint(flat, task.likelihood, prior, 800, penalty)
    transform = build(joint, TRAINING, 800)
    state = [transform.init({THETA: flat.theta})]

    def run() -> None:
        for _ in range(STEPS):
            state[0], _ = transform.update(state[0], batch, inplace=True)

    return run


def _batch(task: Task) -> Data:
    return task.load().train.subset(slice(0, task.training.batch_size))
