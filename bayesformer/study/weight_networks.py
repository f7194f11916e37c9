"""The networks of the weight study: trained independently, kept, and those that the comparison uses too.

Network i of a task is member i mod 10 of the ensemble of seed i div 10. So sixty networks are six ensembles of ten and
six MLEs, and `bayesformer run` with the same folder of networks trains none of them again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesformer.bench.tasks import TASKS, Task, TaskData
from bayesformer.core.errors import unknown_name
from bayesformer.core.progress import Reporter, Silent
from bayesformer.core.settings import override
from bayesformer.core.storage import write_tensors
from bayesformer.data import as_batches
from bayesformer.methods import Ensemble, Problem
from bayesformer.model.space import Space
from bayesformer.posterior import Posterior

MEMBERS = 10  # networks of a seed, as an ensemble has by default


@dataclass(frozen=True)
class TrainedTask:
    """A task with networks that were trained on it."""

    name: str
    task: Task
    data: TaskData
    posteriors: tuple[Posterior, ...]  # one ensemble per seed

    @property
    def theta(self) -> Tensor:
        """(N, P): the weights of every network."""
        return torch.cat([posterior.theta for posterior in self.posteriors])

    @property
    def space(self) -> Space:
        """Names and shapes of the weights."""
        return self.posteriors[0].space

    def layers(self) -> dict[str, Tensor]:
        """By parameter name the weights of every network, each (N, ...)."""
        theta = self.theta
        return {
            name: theta[:, self.space.slices[name]].reshape(len(theta), *shape)
            for name, shape in zip(self.space.names, self.space.shapes, strict=True)
        }

    def facts(self) -> dict[str, Any]:
        """How the networks were trained: settings, time, epochs and convergence."""
        found = [posterior.facts for posterior in self.posteriors]
        converged = [value for facts in found for value in facts["converged"]]
        return {
            "task": self.name,
            "settings": asdict(self.task),  # type: ignore[call-overload]
            "training": found[0]["training"],
            "networks": len(self.theta),
            "weights": self.space.size,
            "seconds": sum(facts["seconds"] for facts in found),
            "epochs": [epochs for facts in found for epochs in facts["epochs"]],
            "converged": converged.count(True),
        }


def export(trained: TrainedTask, path: Path) -> Path:
    """Write the weights of all networks to one file, by parameter (N, ...), with how they were trained."""
    write_tensors(path, {name: value.clone() for name, value in trained.layers().items()}, trained.facts())
    return path


def train_networks(
    name: str,
    count: int,
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    reporter: Reporter | None = None,
) -> TrainedTask:
    """The first `count` networks of a task; those that the folder lacks are trained and added to it.

    Args:
        name: of the task, as `bayesformer list` has it.
        count: networks, at least 2.
        folder: of trained networks; checkpoints of those that are being trained are kept in it, too.
        settings: of the task, where they differ from its defaults.
        training: settings of the training that differ from the task's.
        reporter: told of progress.
    """
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    if isinstance(count, bool) or not isinstance(count, int) or count < 2:
        raise ValueError(f"networks must be a whole number of at least 2; got {count!r}.")
    task = override(TASKS[name](), settings or {}, name)
    data, found = task.load(), []
    for seed in range(math.ceil(count / MEMBERS)):
        problem = Problem(
            model=task.model,
            likelihood=task.likelihood,
            data=as_batches(data.train, "train"),
            validation=None if data.validation is None else as_batches(data.validation, "validation"),
            training=override(task.training, training or {}, "training"),
            seed=seed,
            strategy="looped",  # on one core no slower than a vmapped pass here, and equal to a network trained alone
            checkpoint=folder / "checkpoints" / f"{name.replace('/', '-')}-{seed}",
            networks=folder,
            reporter=reporter or Silent(),
        )
        found.append(Ensemble(min(MEMBERS, count - seed * MEMBERS)).fit(problem))
    return TrainedTask(name, task, data, tuple(found))
