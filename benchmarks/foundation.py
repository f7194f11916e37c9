"""The loop, members, prediction and loading, against plain PyTorch on the same models."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from bayesformer.bench.tasks import TASKS, Task
from bayesformer.data import Data
from bayesformer.laws import Samples
from bayesformer.methods import Ensemble, Mle, Problem
from bayesformer.model.space import Space
from bayesformer.posterior import Posterior
from bayesformer.predict.saving import TENSORS
from bayesformer.train.members import Stage, fit_stage
from bayesformer.train.prototype import Prototype
from bayesformer.train.training import Training
from benchmarks import image_epoch
from benchmarks.harness import Comparison

STEPS = {"toy": "toy/m1", "vit": "digits"}


def comparisons() -> Iterator[Comparison]:
    """All comparisons of this file."""
    for label, name in STEPS.items():
        task = TASKS[name]()
        yield loop_overhead(label, task)
        yield fixed_part(label, task)
        yield members_in_one_process(label, task)
        yield predicting(label, task)
    yield from image_epoch.comparisons()
    yield members_in_two_processes("toy", TASKS["toy/m1"]())
    yield loading("toy, 10 members", TASKS["toy/m1"](), 10, budget=30.0)  # 5 ms, most of it the walk of the model
    yield loading("toy, 400 members", TASKS["toy/m1"](), 400, budget=2.0)


def loop_overhead(label: str, task: Task) -> Comparison:
    """Our loop against the loop a person would write, same model, batches, clipping and schedule."""
    training = Training(epochs=8, batch_size=task.training.batch_size, lr=1e-3, warmup=50)
    ours, plain = _both_loops(task, training)
    return Comparison(f"loop overhead, {label}, 8 epochs", ours, plain, 1.05, rounds=15)


def fixed_part(label: str, task: Task) -> Comparison:
    """A fit of seven or eight steps: what a fit does once (walk of the model, probe, trial) weighs most."""
    training = Training(epochs=1, batch_size=task.training.batch_size, lr=1e-3, warmup=50)
    ours, plain = _both_loops(task, training)
    return Comparison(f"loop and what a fit does once, {label}, 1 epoch", ours, plain, 1.4, rounds=15)


def _both_loops(task: Task, training: Training) -> tuple[Callable[[], None], Callable[[], None]]:
    """The same training of 400 examples by this library and by hand."""
    data = _some(task, 400)
    problem = Problem(_model(task), task.likelihood, data, training=training)

    def ours() -> None:
        fit_stage(Stage(Prototype(problem), "mle", training), 1)

    return ours, partial(hand_written_loop, task, data, training)


def hand_written_loop(task: Task, data: Data, training: Training) -> None:
    """Plain PyTorch: Adam, clipping, a schedule, shuffled batches."""
    model = _model(task).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=training.lr)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / training.warmup, math.sqrt(training.warmup / (step + 1)))
    )
    for _ in range(training.epochs):
        order = torch.randperm(len(data))
        for start in range(0, len(data), training.batch_size):
            batch = data.take(order[start : start + training.batch_size])
            optimizer.zero_grad()
            loss = -task.likelihood.log_prob(model(batch.inputs), batch.targets, batch.mask).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
            optimizer.step()
            rate.step()


def members_in_one_process(label: str, task: Task) -> Comparison:
    """Ten members through the engine, in units of one member."""
    problem = _problem(task, _some(task, 400), epochs=1, workers=1)
    return Comparison(
        f"10 members, one process, {label}", partial(Ensemble(10).fit, problem), partial(Mle().fit, problem), 10.5
    )


def members_in_two_processes(label: str, task: Task) -> Comparison:
    """Ten members spread over two workers, their start included, in units of one member; at the task's length."""
    ten = _problem(task, _some(task, 800), epochs=100, workers=2, strategy="processes")
    one = _problem(task, _some(task, 800), epochs=100, workers=1)
    return Comparison(
        f"10 members, two processes, {label}",
        partial(Ensemble(10).fit, ten),
        partial(Mle().fit, one),
        6.0,
        rounds=2,
        wall=True,
    )


def predicting(label: str, task: Task) -> Comparison:
    """A ten-member predictive, in units of one plain forward pass over the same inputs."""
    model = _model(task).eval()
    posterior = Posterior(model, task.likelihood, Samples(torch.randn(10, Space.of(model).size) * 0.1))
    inputs = _some(task, 500).inputs

    def plain() -> None:
        with torch.inference_mode():
            for chunk in torch.as_tensor(inputs).split(64):
                model(chunk)

    return Comparison(
        f"predicting with 10 members, {label}",
        lambda: posterior.outputs(inputs),
        plain,
        10.5,
        rounds=15,
    )


def loading(label: str, task: Task, members: int, budget: float) -> Comparison:
    """Loading a posterior against safetensors bringing the same file into memory.

    Ours verifies every byte and that the file belongs to the model, which it walks: a fixed part of a few milliseconds
    that does not grow with the number of members.
    """
    model = _model(task)
    folder = Path(tempfile.mkdtemp())
    Posterior(model, task.likelihood, Samples(torch.randn(members, Space.of(model).size))).save(folder)
    repeat = max(1, 400 // members)

    def ours() -> None:
        for _ in range(repeat):
            Posterior.load(folder, model)

    def plain() -> None:
        for _ in range(repeat):
            {name: tensor.clone() for name, tensor in load_file(folder / TENSORS).items()}

    return Comparison(f"loading a posterior, {label}", ours, plain, budget, rounds=15)


def _model(task: Task) -> nn.Module:
    torch.manual_seed(0)
    return task.model()


def _some(task: Task, count: int) -> Data:
    return task.load().train.subset(slice(0, count))


def _problem(task: Task, data: Data, epochs: int, **options: object) -> Problem:
    training = Training(epochs=epochs, batch_size=task.training.batch_size, lr=1e-3, warmup=50, patience=0)
    return Problem(task.model, task.likelihood, data, training=training, **options)  # type: ignore[arg-type]
