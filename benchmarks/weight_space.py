"""Steps of inference over weights, in units of a plain Adam step of the same model in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from bayesformer.bench.tasks import TASKS, Task
from bayesformer.core.strategy import Strategy
from bayesformer.core.types import LogJoint, Transform
from bayesformer.core.vectors import THETA
from bayesformer.inference import baoab, ivon, sghmc, sgld, vi_diag
from bayesformer.layers.preparation import Preparation
from bayesformer.methods import MeanField, Problem, Sghmc
from bayesformer.model.calling import apply
from bayesformer.model.skeleton import Skeleton, shadow
from bayesformer.model.space import Space
from bayesformer.priors.prior import as_prior
from bayesformer.train.members import build_optimiser
from bayesformer.train.objective import Objective
from bayesformer.train.training import Training
from bayesformer.train.vector_prior import FlatPrior, NamedPrior
from benchmarks.harness import Comparison
from benchmarks.peers import peers
from benchmarks.workloads import Workload, minilm, of_task

TRAINING = Training(lr=1e-3, warmup=50)
TEN = Sghmc(chains=10, draws=1, lr=1e-2, friction=10.0, warm_up=0.5)


def comparisons() -> Iterator[Comparison]:
    """All comparisons of this file."""
    for work in (of_task("toy", "toy/m1"), of_task("vit", "digits"), minilm()):
        yield from steps(work)
    for label, name in {"toy": "toy/m1", "vit": "digits"}.items():
        yield chains_in_one_process(label, name)
    yield chains_in_two_processes("toy", "toy/m1")


def steps(work: Workload) -> Iterator[Comparison]:
    """One step of every algorithm and of every peer on one workload."""
    plain = adam_steps(work)
    for algorithm, (build, budget) in ALGORITHMS.items():
        limit = 1.6 if work.label == "MiniLM" and algorithm in {"diagonal vi", "ivon"} else budget
        steps = transform_steps(work, build)
        yield Comparison(f"{algorithm} step, {work.label}", steps, plain, limit, rounds=work.rounds)
    local = transform_steps(work, build_optimiser, MeanField().preparation)
    name = f"mean-field step, local reparameterisation, {work.label}"
    yield Comparison(name, local, plain, 3.5, rounds=work.rounds)
    for name, run in peers(work):
        yield Comparison(f"{name} step, {work.label}", run, plain, None, rounds=max(3, work.rounds // 3))


def chains_in_one_process(label: str, name: str) -> Comparison:
    """Ten SGHMC chains through the engine, in units of as many plain Adam steps as one chain takes."""
    ten = partial(TEN.fit, _problem(TASKS[name](), 2, workers=1))
    return Comparison(f"10 chains, one process, {label}", ten, _steps_of_one(label, name, 2), 10.5)


def chains_in_two_processes(label: str, name: str) -> Comparison:
    """The same in two workers, their start included, at the task's own length."""
    ten = partial(
        TEN.fit,
        _problem(TASKS[name](), 100, workers=2, strategy="processes"),
    )
    one = _steps_of_one(label, name, 100)
    return Comparison(f"10 chains, two processes, {label}", ten, one, 6.0, rounds=2, wall=True)


def _steps_of_one(label: str, name: str, epochs: int) -> Callable[[], None]:
    task = TASKS[name]()
    steps = epochs * math.ceil(len(task.load().train) / task.training.batch_size)
    return adam_steps(replace(of_task(label, name), steps=steps))


def _problem(task: Task, epochs: int, workers: int, strategy: Strategy = "auto") -> Problem:
    training = replace(task.training, epochs=epochs)
    data = task.load().train
    return Problem(task.model, task.likelihood, data, training=training, workers=workers, strategy=strategy)


def _vi(log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:
    return vi_diag.build(log_joint, 1 / num_data, training.adam(steps))


def _sghmc(log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:  # noqa: ARG001
    return sghmc.build(log_joint, 1e-2, 1 / num_data, 10.0)


def _diagonal_sghmc(log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:  # noqa: ARG001
    """In units of one standard deviation per weight."""
    scale = {THETA: torch.full_like(log_joint.shell.theta, 0.1)}  # type: ignore[attr-defined]
    return sghmc.build(log_joint, 1e-1, 1 / num_data, 10.0, scale=scale)


def _baoab(log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:  # noqa: ARG001
    return baoab.build(log_joint, 1e-2, 1 / num_data, 10.0)


def _sgld(log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:  # noqa: ARG001
    return sgld.build(log_joint, 1e-4, 1 / num_data)


def _ivon(log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:  # noqa: ARG001
    return ivon.build(log_joint, 1e-2, float(num_data))


ALGORITHMS: dict[str, tuple[Callable[..., Transform], float]] = {
    "diagonal vi": (_vi, 1.2),
    "sghmc": (_sghmc, 1.05),
    "sghmc, diagonal metric": (_diagonal_sghmc, 1.15),
    "baoab": (_baoab, 1.05),
    "sgld": (_sgld, 1.05),
    "ivon": (_ivon, 1.2),
}


def adam_steps(work: Workload) -> Callable[[], None]:
    """Plain PyTorch: torch.optim.Adam as it comes."""
    model, batch = work.model(), work.batch
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def run() -> None:
        for _ in range(work.steps):
            optimizer.zero_grad()
            (-work.likelihood.log_prob(apply(model, batch.inputs), batch.targets, batch.mask).mean()).backward()
            optimizer.step()

    return run


def transform_steps(
    work: Workload, build: Callable[..., Transform], preparation: Preparation | None = None
) -> Callable[[], None]:
    """The same model and batch under one of our transforms, in place, with a Gaussian prior or random weights."""
    model = work.model()
    prepared = model if preparation is None else preparation(shadow(model))
    space = Space.of(prepared)
    shell = Skeleton(prepared, space).shell()
    shell.module.train()
    prior = NamedPrior(as_prior("normal(0, 1)"), space) if preparation is None else FlatPrior()
    objective = Objective(shell, work.likelihood, work.num_data, prior)
    transform = build(objective, TRAINING, work.num_data, work.num_data)
    state = [transform.init({THETA: shell.theta})]

    def run() -> None:
        for _ in range(work.steps):
            state[0], _ = transform.update(state[0], work.batch, inplace=True)

    return run
