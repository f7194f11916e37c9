"""Steps of inference over weights, in units of a plain Adam step of the same model in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from bayesformer.bench.tasks import TASKS, Task
from bayesformer.core.strategy import Strategy
from bayesformer.functional import THETA
from bayesformer.inference import baoab, ivon, sghmc, sgld, vi_diag
from bayesformer.layers import convert
from bayesformer.methods import Problem, Sghmc
from bayesformer.methods.layers import Penalty
from bayesformer.methods.members import build_optimiser
from bayesformer.network import FlatLogJoint, FlatModel, apply
from bayesformer.priors import as_prior
from bayesformer.train import Training
from bayesformer.types import LogJoint, Transform
from benchmarks.harness import Comparison
from benchmarks.peers import peers
from benchmarks.workloads import Workload, minilm, of_task

TRAINING = Training(lr=1e-3, warmup=50)


def comparisons() -> Iterator[Comparison]:
    """All comparisons of this file."""
    workloads = [of_task("toy", "toy/m1"), of_task("vit", "digits"), minilm()]
    for work in [w for w in workloads if w is not None]:
        yield from steps(work)
    for label, name in {"toy": "toy/m1", "vit": "digits"}.items():
        yield chains_in_one_process(label, name)
    yield chains_in_two_processes("toy", "toy/m1")


def steps(work: Workload) -> Iterator[Comparison]:
    """One step of every algorithm and of every peer on one workload."""
    plain = adam_steps(work)
    for algorithm, (build, budget) in ALGORITHMS.items():
        limit = 1.6 if work.label == "MiniLM" and algorithm in {"diagonal vi", "ivon"} else budget
        yield Comparison(f"{algorithm} step, {work.label}", flat_steps(work, build), plain, limit, rounds=work.rounds)
    local = flat_steps(work, build_optimiser, prepare=convert, penalty=Penalty(1.0, work.num_data))
    name = f"mean-field step, local reparameterisation, {work.label}"
    yield Comparison(name, local, plain, 2.5, rounds=work.rounds)
    for name, run in peers(work):
        yield Comparison(f"{name} step, {work.label}", run, plain, None, rounds=max(3, work.rounds // 3))


def chains_in_one_process(label: str, name: str) -> Comparison:
    """Ten SGHMC chains through the engine, in units of as many plain Adam steps as one chain takes."""
    ten = partial(Sghmc(chains=10, draws=1).fit, _problem(TASKS[name](), 2, workers=1))
    return Comparison(f"10 chains, one process, {label}", ten, _steps_of_one(label, name, 2), 10.5)


def chains_in_two_processes(label: str, name: str) -> Comparison:
    """The same in two workers, their start included, at the task's own length."""
    ten = partial(Sghmc(chains=10, draws=1).fit, _problem(TASKS[name](), 100, workers=2, strategy="processes"))
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


def _vi(log_joint: LogJoint, training: Training, num_data: int) -> Transform:
    return vi_diag.build(log_joint, 1 / num_data, training.adam(num_data))


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


def flat_steps(
    work: Workload,
    build: Callable[..., Transform],
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    penalty: Penalty | None = None,
) -> Callable[[], None]:
    """The same model and batch under one of our transforms, in place, with a Gaussian prior."""
    model = work.model() if prepare is None else prepare(work.model())
    flat = FlatModel(model)
    flat.module.train()
    prior = None if penalty is not None else as_prior("normal(0, 1)")
    joint = FlatLogJoint(flat, work.likelihood, prior, work.num_data, penalty)
    transform = build(joint, TRAINING, work.num_data)
    state = [transform.init({THETA: flat.theta})]

    def run() -> None:
        for _ in range(work.steps):
            state[0], _ = transform.update(state[0], work.batch, inplace=True)

    return run
