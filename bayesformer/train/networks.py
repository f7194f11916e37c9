"""Trained networks that are kept and found again: one file per network, by what decides its weights.

A comparison trains the same network many times: the MLE of a seed is the first member of the ensemble of that seed, and
where other methods start from. With a folder of networks each is trained once. A network is found by a hash of
everything that decides it, its start, data and training included, and not by the method that asks for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bayesformer.core.errors import DamagedFileError
from bayesformer.core.storage import checksum, read_checked, write_tensors
from bayesformer.train.checkpoint import job_facts
from bayesformer.train.loop import Job, Trained
from bayesformer.version import __version__

if TYPE_CHECKING:
    from bayesformer.train.members import Stage

NOT_DECIDING = ("version", "method", "members")  # of a job: who asked, and beside whom it was trained


def network_key(job: Job) -> str:
    """Sixteen hexadecimal digits from a hash of what decides the weights of a job of one network."""
    start = checksum({"theta": job.theta, **{f"buffer.{k}": v for k, v in job.shell.buffers.items()}})
    facts = {name: value for name, value in job_facts(job).items() if name not in NOT_DECIDING}
    facts |= {"member": job.members[0], "start": start}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def network_path(stage: Stage, member: int) -> Path | None:
    """The file of a member; None where networks are not kept, or the stage is more than plain training."""
    folder = stage.problem.networks
    return (
        None
        if folder is None or not stage.is_plain
        else Path(folder) / f"{network_key(stage.job([member]))}.safetensors"
    )


def read_network(path: Path) -> Trained:
    """The network in a file, as if it had just been trained, but for the last state of the optimiser."""
    try:
        tensors, facts = read_checked(path, "network")
    except DamagedFileError as error:
        raise DamagedFileError(f"{error} Delete it to train this network again.") from error
    buffers = {k.removeprefix("buffer."): v for k, v in tensors.items() if k.startswith("buffer.")}
    return Trained(
        theta=tensors["theta"],
        buffers=buffers,
        history=facts["history"],
        best_epoch=tensors["best_epoch"],
        best_score=tensors["best_score"],
        epochs=facts["epochs"],
        steps=facts["steps"],
        seconds=facts["seconds"],
        converged=facts["converged"],
        draws=None,
        draw_buffers={},
        state=None,
    )


def keep_networks(paths: Sequence[Path], trained: Trained, seed: int, members: Sequence[int]) -> None:
    """Write every network of a job to its file; the time of networks in lockstep is shared out."""
    for i, (path, member) in enumerate(zip(paths, members, strict=True)):
        row = slice(i, i + 1)
        tensors = {"theta": trained.theta[row], "best_epoch": trained.best_epoch[row]}
        tensors |= {"best_score": trained.best_score[row]}
        tensors |= {f"buffer.{name}": value[row] for name, value in trained.buffers.items()}
        history = [{name: [values[i]] for name, values in epoch.items()} for epoch in trained.history]
        facts: dict[str, Any] = {"seed": seed, "member": member, "version": __version__, "history": history}
        facts |= {"epochs": trained.epochs, "steps": trained.steps, "converged": [trained.converged[i]]}
        facts |= {"seconds": trained.seconds / len(members), "torch": torch.__version__}
        # of their own: tensors that share memory cannot be written
        write_tensors(path, {name: tensor.clone() for name, tensor in tensors.items()}, facts)
