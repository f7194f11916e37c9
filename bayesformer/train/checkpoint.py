"""Checkpoints of the training loop: every so many seconds, inside an epoch too, and exact where the data allow it."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesformer.core.errors import DamagedFileError
from bayesformer.core.storage import checksum, read_checked, read_json, write_json, write_tensors
from bayesformer.core.strategy import Chosen, Strategy
from bayesformer.core.types import Params
from bayesformer.version import __version__

if TYPE_CHECKING:
    from bayesformer.train.loop import Job, TrainingRun

log = logging.getLogger("bayesformer")


class Saver:
    """Writes the state of a run to a file from time to time, and reads it back."""

    def __init__(self, job: Job, run: TrainingRun, path: Path | None, every_seconds: float) -> None:
        self.job, self.run, self.path, self.every_seconds = job, run, path, every_seconds
        self.identity = "" if path is None else job_identity(job)
        self.start = "" if path is None else checksum({"theta": run.theta})
        self.saved = time.monotonic()

    def save(self, force: bool = False) -> None:
        """Write a checkpoint if one is due; a stream that cannot be entered in the middle waits for an epoch's end."""
        if self.path is None or not (force or time.monotonic() - self.saved >= self.every_seconds):
            return
        if self.run.step and self.job.data.resumable != "exact":
            return
        _write(self.run, self.job, self.path, {"identity": self.identity, "start": self.start})
        self.saved = time.monotonic()

    def resume(self) -> None:
        """Continue where the file stands, if there is one; a run that began from other weights says so."""
        if self.path is None or not self.path.exists():
            return
        started = _read(self.run, self.job, self.path, self.identity)
        if started not in (None, self.start):
            log.warning("%s began from other weights than those given now, and goes on from its own.", self.path)
            self.start = started


def resume_strategy(folder: Path | None, label: str, wanted: Strategy) -> tuple[Strategy, str | None]:
    """The strategy for a stage whose checkpoints are in a folder, and why "auto" must not batch, if it must not.

    Members that were begun in lockstep go on in lockstep, those begun alone go on alone, in a loop or in processes,
    which are equal bit for bit on one torch thread: a resumed run is the run that was begun.
    """
    path = None if folder is None else _strategy_file(folder, label)
    if path is None or not path.exists():
        return wanted, None
    made = read_json(path, "checkpoint").get("strategy")
    if made not in ("looped", "batched"):
        raise DamagedFileError(f"checkpoint {path} must name a strategy; got {made!r}. Delete it to begin again.")
    if wanted == "auto":
        return ("batched", None) if made == "batched" else ("auto", "the checkpoint was made looped")
    if (wanted == "batched") != (made == "batched"):
        raise ValueError(
            f"strategy must be 'auto' or {made!r} to go on with the checkpoint in {folder}, which was made "
            f"{made}; got {wanted!r}. Or choose another checkpoint folder."
        )
    return wanted, None


def record_strategy(folder: Path | None, label: str, chosen: Chosen) -> None:
    """Note in the folder of checkpoints how the members of a stage run."""
    if folder is not None:
        made = "batched" if chosen == "batched" else "looped"  # processes are the loop, elsewhere
        write_json(_strategy_file(folder, label), {"strategy": made})


def _strategy_file(folder: Path, label: str) -> Path:
    return Path(folder) / f"{label}.strategy.json"


def job_identity(job: Job) -> str:
    """A hash of what decides the result, so that a checkpoint of another job is never continued."""
    return hashlib.sha256(json.dumps(job_facts(job), sort_keys=True).encode()).hexdigest()[:16]


def job_facts(job: Job) -> dict[str, Any]:
    """What decides the result of a job, as JSON knows it."""
    return {
        "version": __version__,
        "training": asdict(job.training),
        "seed": job.seed,
        "members": list(job.members),
        "data": job.data.fingerprint(),
        "validation": None if job.validation is None else job.validation.fingerprint(),
        "space": job.shell.space.to_json(),
        "module": str(job.shell.module),
        "frozen": checksum(_frozen(job)),
        "likelihood": repr(job.likelihood),
        "collect": None if job.collect is None else asdict(job.collect),
        "steps": job.steps,
        "replacement": job.replacement,
        "dropout_rate": job.dropout_rate,
        "held": list(job.held),
        **job.identity,
    }


def _frozen(job: Job) -> Params:
    """The weights that training leaves alone, by name: what is learned on one base is wrong on another."""
    own = dict(job.shell.module.named_parameters(remove_duplicate=False))
    inferred = {id(own[name]) for name in job.shell.space.names}
    return {name: weight.detach() for name, weight in own.items() if id(weight) not in inferred}


def _write(run: TrainingRun, job: Job, path: Path, own: Mapping[str, str]) -> None:
    tensors = {f"state.{k}": v for k, v in pack_state(run.state).items()}
    tensors |= {"best.score": run.best_score, "best.epoch": run.best_epoch, "stopped": run.stopped, "stale": run.stale}
    if run.best_theta is not None:
        tensors["best.theta"] = run.best_theta
    if run.values:
        tensors["values"] = torch.stack(run.values)
        tensors["sizes"] = torch.tensor(run.sizes, dtype=torch.int64, device="cpu")
    if run.draws:
        tensors["draws"] = torch.stack(run.draws)
        tensors |= {f"draw_buffer.{k}": torch.stack([b[k] for b in run.draw_buffers]) for k in run.draw_buffers[0]}
    tensors |= {f"buffer.{k}": v for k, v in job.shell.buffers.items()}
    tensors |= {f"best_buffer.{k}": v for k, v in run.best_buffers.items()}
    tensors |= {f"noise.{i}": generator.get_state() for i, generator in enumerate(run.generators)}
    # safetensors refuses tensors that share memory, as buffers of tied modules may
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    facts = {**own, "history": run.history, "latest": run.latest, "seconds": run.elapsed}
    facts |= {"epoch": run.epoch, "step": run.step, "total": run.total}
    write_tensors(path, tensors, facts)


def _read(run: TrainingRun, job: Job, path: Path, identity: str) -> str | None:
    """Put the run where the file stands; returns the checksum of the weights that it began from, if it is known."""
    try:
        tensors, facts = read_checked(path, "checkpoint")
    except DamagedFileError as error:
        raise DamagedFileError(f"{error} Delete it to begin this member again.") from error
    if facts.get("identity") != identity:
        raise DamagedFileError(
            f"checkpoint {path} belongs to another run (other data, settings, model or version); "
            "delete it or choose another checkpoint folder."
        )
    device = run.theta.device
    unpack_state(run.state, _under("state.", tensors))
    run.epoch, run.step, run.total = facts["epoch"], facts["step"], facts["total"]
    run.history, run.latest, run.seconds = facts["history"], facts["latest"], facts["seconds"]
    if run.best_theta is not None:
        run.best_theta.copy_(tensors["best.theta"])
    run.best_buffers = {k: v.to(device) for k, v in _under("best_buffer.", tensors).items()}
    run.best_score, run.best_epoch = tensors["best.score"], tensors["best.epoch"]
    run.stopped, run.stale = tensors["stopped"], tensors["stale"]
    job.shell.load_buffers(_under("buffer.", tensors))
    run.values = list(tensors["values"].to(device)) if "values" in tensors else []
    run.sizes = tensors["sizes"].tolist() if "sizes" in tensors else [1] * len(run.values)
    run.draws = list(tensors["draws"].to(device)) if "draws" in tensors else []
    kept = {k: v.to(device) for k, v in _under("draw_buffer.", tensors).items()}
    run.draw_buffers = [{k: v[i] for k, v in kept.items()} for i in range(len(run.draws))]
    for i, generator in enumerate(run.generators):
        generator.set_state(tensors[f"noise.{i}"])
    started: str | None = facts.get("start")
    return started


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> Params:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def pack_state(state: Any) -> Params:
    """The tensors of a NamedTuple state by path: `params.theta`, `step`."""
    packed: Params = {}
    items = state._asdict() if hasattr(state, "_asdict") else state if isinstance(state, Mapping) else state.to_dict()
    for name, value in items.items():
        if isinstance(value, Tensor):
            packed[name] = value
        else:
            packed |= {f"{name}.{key}": tensor for key, tensor in pack_state(value).items()}
    return packed


def unpack_state(state: Any, packed: Params) -> None:
    """Copy saved tensors into a state of the same form, whose tensors take over the layout of the saved ones."""
    own = pack_state(state)
    if own.keys() != packed.keys():
        raise DamagedFileError(f"checkpoint must hold {sorted(own)}; got {sorted(packed)}.")
    for name, tensor in own.items():
        same = tensor.stride() == packed[name].stride()
        if not same and not (tensor.is_contiguous() and packed[name].is_contiguous()):
            tensor.data = torch.empty_like(packed[name], dtype=tensor.dtype, device=tensor.device)
        tensor.copy_(packed[name])
