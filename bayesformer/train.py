"""The only training loop. It drives any transform, on one member or on several in lockstep.

Nothing in it knows a method, a model or a task. Randomness is derived from (seed, member, epoch), so a run
that was killed and resumed, a run in a worker process and a run in a loop are the same run.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bayesformer.dataset import Data
from bayesformer.errors import DamagedFileError, TrainingDivergedError
from bayesformer.functional import THETA
from bayesformer.inference import schedules
from bayesformer.inference.optimise import Adam
from bayesformer.inference.schedules import Schedule
from bayesformer.likelihoods import Likelihood
from bayesformer.model.randomness import Randomness, find_randomness
from bayesformer.network import FlatModel, batched_outputs
from bayesformer.progress import Reporter, Silent
from bayesformer.seeds import generator
from bayesformer.storage import read_facts, read_tensors, write_tensors
from bayesformer.types import Params, Transform
from bayesformer.version import __version__

CHECK_EVERY = 20  # steps between looks for NaN: a look waits for the device


@dataclass(frozen=True)
class Training:
    """How weights are trained, whatever the method."""

    epochs: int = 100
    """passes over the training data, at most"""
    batch_size: int = 50
    """examples per step"""
    lr: float = 3e-3
    """learning rate: its peak with warm-up, its value when constant"""
    schedule: Literal["warmup", "cosine", "constant"] = "warmup"
    """after a linear warm-up the inverse square root of the step, or a cosine down to 0; or a constant rate"""
    warmup: int = 100
    """steps of warm-up"""
    weight_decay: float = 0.0
    """decoupled weight decay (AdamW); 0 is Adam. A prior is not weight decay: use Map for that"""
    clip: float = 1.0
    """largest gradient norm; inf never clips"""
    patience: int = 15
    """epochs without a better validation log-likelihood before stopping; 0 never stops"""

    def __post_init__(self) -> None:
        rules = {
            "epochs": self.epochs >= 1,
            "batch_size": self.batch_size >= 1,
            "lr": self.lr > 0,
            "warmup": self.warmup >= 1,
            "weight_decay": self.weight_decay >= 0,
            "clip": self.clip > 0,
            "patience": self.patience >= 0,
        }
        for name, holds in rules.items():
            if not holds:
                least = "at least 0" if name in {"weight_decay", "patience"} else "positive"
                raise ValueError(f"training.{name} must be {least}; got {getattr(self, name)}.")
        if self.schedule not in {"warmup", "cosine", "constant"}:
            raise ValueError(f"training.schedule must be 'warmup', 'cosine' or 'constant'; got {self.schedule!r}.")

    def adam(self, num_data: int) -> Adam:
        """The optimiser these settings describe, for this many examples."""
        return Adam(self.rate(num_data), weight_decay=self.weight_decay)

    def rate(self, num_data: int) -> Schedule:
        """The learning rate as a function of the step."""
        if self.schedule == "constant":
            return schedules.constant(self.lr)
        if self.schedule == "cosine":
            steps = self.epochs * steps_per_epoch(num_data, self.batch_size)
            return schedules.warmup_cosine(self.lr, self.warmup, steps)
        return schedules.warmup_inverse_sqrt(self.lr, self.warmup)


@dataclass(frozen=True)
class Collect:
    """The steps, counted from 1, after which the state of a chain is kept."""

    steps: tuple[int, ...]

    @classmethod
    def spread(cls, total: int, burn_in: int, count: int) -> Collect:
        """`count` states after the burn-in of a chain of `total` steps, widely spaced, the last at its end."""
        every = (total - burn_in) // count if count >= 1 else 0
        if burn_in < 0 or every < 1:
            raise ValueError(
                f"draws must fit after the burn-in; got {count} draws in {total} steps of which {burn_in} are burn-in."
            )
        return cls(tuple(total - every * i for i in reversed(range(count))))

    @classmethod
    def cyclical(cls, total: int, cycles: int, count: int, exploration: float) -> Collect:
        """`count` states from the last part of each cycle, where the temperature is on."""
        length = -(-total // cycles)
        per_cycle = -(-count // cycles)
        steps: list[int] = []
        for cycle in range(cycles):
            first, last = cycle * length, min((cycle + 1) * length, total)
            inner = cls.spread(last - first, round(exploration * length), per_cycle)
            steps += [first + step for step in inner.steps]
        return cls(tuple(steps[-count:]))


@dataclass(frozen=True)
class Job:
    """One group of members to train together: theta is (P,) for one, (L, P) in lockstep."""

    model: FlatModel
    transform: Transform
    theta: Tensor
    data: Data
    validation: Data | None
    likelihood: Likelihood
    training: Training
    seed: int
    members: tuple[int, ...]
    collect: Collect | None = None
    """states to keep on the way"""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """facts beyond the training settings that make this job this one; guards a checkpoint"""


class Trained(NamedTuple):
    """The result of a job, with the member axis in front."""

    theta: Tensor  # (L, P), the best epoch on validation data, or the last without
    buffers: Params  # each (L, ...), running averages that training changed
    history: list[dict[str, list[float]]]  # per epoch: the log joint and the validation score of each member
    best_epoch: Tensor  # (L,)
    best_score: Tensor  # (L,), validation log-likelihood per example there; -inf without validation data
    seconds: float  # spent in training, over all resumptions
    draws: Tensor | None  # (L, S, P), states that were collected
    state: Params  # the last state of the transform by path, as `pack_state` names it


@dataclass
class _Run:
    """Everything a checkpoint holds."""

    state: Any
    epoch: int
    best_theta: Tensor  # like theta
    best_buffers: Params
    best_score: Tensor  # (L,)
    best_epoch: Tensor  # (L,)
    stopped: Tensor  # (L,)
    history: list[dict[str, list[float]]]
    draws: list[Tensor]  # each like theta
    seconds: float = 0.0


def train(
    job: Job, checkpoint: Path | None = None, every_seconds: float = 10.0, reporter: Reporter | None = None
) -> Trained:
    """Train to the end, resuming from `checkpoint` if it holds this very job."""
    reporter = reporter or Silent()
    identity = job_identity(job)
    run = _begin(job)
    if checkpoint is not None and checkpoint.exists():
        _resume(run, job, checkpoint, identity)
    label = _label(job.members)
    saved = time.monotonic()
    epochs = job.training.epochs
    randomness = _randomness(job)
    while run.epoch < epochs and not bool(run.stopped.all()):
        reporter.update(label, run.epoch, epochs, _note(run))
        start = time.perf_counter()
        _epoch(run, job, randomness)
        _judge(run, job)
        run.epoch += 1
        run.seconds += time.perf_counter() - start
        ended = run.epoch == epochs or bool(run.stopped.all())
        if checkpoint is not None and (ended or time.monotonic() - saved >= every_seconds):
            _save(run, job, checkpoint, identity)
            saved = time.monotonic()
    reporter.update(label, epochs, epochs)
    rows = run.best_theta if run.best_theta.dim() == 2 else run.best_theta[None]
    buffers = {k: v if len(job.members) > 1 else v[None] for k, v in run.best_buffers.items()}
    return Trained(
        rows, buffers, run.history, run.best_epoch, run.best_score, run.seconds, _draws(run), pack_state(run.state)
    )


def score(model: FlatModel, likelihood: Likelihood, theta: Tensor, data: Data, chunk: int = 256) -> Tensor:
    """(L,): mean log-likelihood per example of each member, without dropout."""
    model.module.eval()
    total: Tensor | float = 0.0
    with torch.no_grad():
        for batch in data.chunks(chunk):
            if theta.dim() == 1:
                model.load(theta)
                outputs = model(batch.inputs)[None]
            else:
                outputs = batched_outputs(model.module, model.layout.views(theta), batch.inputs)
            values = [likelihood.log_prob(row, batch.targets, batch.mask).sum() for row in outputs]
            total = total + torch.stack(values).double()
    return torch.as_tensor(total) / len(data)


def _begin(job: Job) -> _Run:
    members = len(job.members)
    theta = job.theta
    if theta.dim() == 1:
        # The state lives in the model's own vector: no copy per step.
        job.model.load(theta)
        theta = job.model.theta
    return _Run(
        state=job.transform.init({THETA: theta}),
        epoch=0,
        best_theta=theta.clone(),
        best_buffers=_copy(job.model.buffers) if members == 1 else _spread(job.model.buffers, members),
        best_score=torch.full((members,), -torch.inf, dtype=torch.float64),
        best_epoch=torch.zeros(members, dtype=torch.int64),
        stopped=torch.zeros(members, dtype=torch.bool),
        history=[],
        draws=[],
    )


def _randomness(job: Job) -> Randomness:
    """What a training pass draws, by a trial on two examples; members in lockstep have no noise of their own."""
    if len(job.members) > 1:
        return Randomness()
    few = job.data.take(slice(0, 2)).inputs
    job.model.module.train()
    return find_randomness(job.model.module, lambda: job.model(few), backward=True)


def _epoch(run: _Run, job: Job, randomness: Randomness) -> None:
    data, size = job.data, job.training.batch_size
    orders = [torch.randperm(len(data), generator=generator(job.seed, m, run.epoch, "order")) for m in job.members]
    order = orders[0] if run.best_theta.dim() == 1 else torch.stack(orders)
    order = order.to(run.best_theta.device)
    job.model.module.train()
    values: list[Tensor] = []
    before = run.epoch * steps_per_epoch(len(data), size)
    device = job.theta.device
    noise = [generator(job.seed, member, run.epoch, "noise", device=device) for member in job.members]
    for start in range(0, len(data), size):
        batch = data.take(order[..., start : start + size])
        with randomness.passing(noise, watch=start == 0) as mode:
            run.state, _ = job.transform.update(run.state, batch, inplace=True)
        if mode is not None and not randomness.functions:  # the algorithm may draw by functions of torch, too
            randomness = replace(randomness, functions=tuple(mode.called))
        values.append(log_value(run.state))
        if job.collect is not None and before + len(values) in job.collect.steps:
            run.draws.append(run.state.params[THETA].clone())
        if len(values) % CHECK_EVERY == 0:
            _check_finite(values, run, job)
    _check_finite(values, run, job)
    mean = torch.stack(values).double().mean(0).reshape(-1)
    run.history.append({"log_joint": mean.tolist()})


def _judge(run: _Run, job: Job) -> None:
    """Keep the best weights so far of every member that has not stopped, and stop those out of patience."""
    theta = run.state.params[THETA]
    if job.validation is None:
        run.best_theta.copy_(theta)
        run.best_buffers = _copy(job.model.buffers) if theta.dim() == 1 else run.best_buffers
        run.best_epoch.fill_(run.epoch)
        return
    value = score(job.model, job.likelihood, theta, job.validation).cpu()
    run.history[-1]["validation"] = value.tolist()
    better = (value > run.best_score) & ~run.stopped
    if theta.dim() == 1:
        if bool(better):
            run.best_theta.copy_(theta)
            run.best_buffers = _copy(job.model.buffers)
    else:
        run.best_theta[better] = theta[better]
    run.best_score = torch.where(better, value, run.best_score)
    run.best_epoch[better] = run.epoch
    if job.training.patience:
        run.stopped |= run.epoch - run.best_epoch >= job.training.patience


def _check_finite(values: list[Tensor], run: _Run, job: Job) -> None:
    table = torch.stack(values).reshape(len(values), -1)
    bad = (~torch.isfinite(table)).nonzero()
    if not len(bad):
        return
    row, column = bad[0].tolist()
    before = run.epoch * steps_per_epoch(len(job.data), job.training.batch_size)
    advice = (
        f"Try a smaller training.lr (now {job.training.lr}), a smaller training.clip (now {job.training.clip}) or a "
        f"longer training.warmup (now {job.training.warmup})"
        if job.collect is None
        else "It was collecting draws: try a smaller lr of the method itself"
    )
    raise TrainingDivergedError(
        f"the log joint became {table[row, column].item()} at step {before + row + 1} "
        f"(epoch {run.epoch + 1}, member {job.members[column]}). {advice}, "
        "and check the scale of the inputs and targets."
    )


def log_value(state: Any) -> Tensor:
    """The log joint where the last gradient was taken; `posteriors` calls it `log_posterior`."""
    return state.log_joint if hasattr(state, "log_joint") else state.log_posterior


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """Batches in one pass, the last perhaps smaller."""
    return -(-examples // batch_size)


def _draws(run: _Run) -> Tensor | None:
    if not run.draws:
        return None
    stacked = torch.stack(run.draws, -2)  # (S, P) or (L, S, P)
    return stacked if stacked.dim() == 3 else stacked[None]


def job_identity(job: Job) -> str:
    """A hash of what decides the result, so that a checkpoint of another job is never continued."""
    facts = {
        "version": __version__,
        "training": asdict(job.training),
        "seed": job.seed,
        "members": list(job.members),
        "data": job.data.fingerprint(),
        "validation": None if job.validation is None else job.validation.fingerprint(),
        "layout": [job.model.layout.names, job.model.layout.shapes],
        "likelihood": repr(job.likelihood),
        "collect": None if job.collect is None else asdict(job.collect),
        **job.identity,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _save(run: _Run, job: Job, path: Path, identity: str) -> None:
    tensors = {f"state.{k}": v for k, v in pack_state(run.state).items()}
    tensors |= {"best.theta": run.best_theta, "best.score": run.best_score, "best.epoch": run.best_epoch}
    tensors |= {"stopped": run.stopped}
    if run.draws:
        tensors["draws"] = torch.stack(run.draws)
    tensors |= {f"buffer.{k}": v for k, v in job.model.buffers.items()}
    tensors |= {f"best_buffer.{k}": v for k, v in run.best_buffers.items()}
    # safetensors refuses tensors that share memory, as buffers of tied modules may
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    facts = {"identity": identity, "epoch": run.epoch, "history": run.history, "seconds": run.seconds}
    write_tensors(path, tensors, facts)


def _resume(run: _Run, job: Job, path: Path, identity: str) -> None:
    tensors, facts = read_tensors(path, "checkpoint"), read_facts(path, "checkpoint")
    if facts.get("identity") != identity:
        raise DamagedFileError(
            f"checkpoint {path} belongs to another run (other data, settings, model or version); "
            "delete it or choose another checkpoint folder."
        )
    state = {k.removeprefix("state."): v for k, v in tensors.items() if k.startswith("state.")}
    unpack_state(run.state, state)
    run.epoch, run.history, run.seconds = facts["epoch"], facts["history"], facts["seconds"]
    run.best_theta.copy_(tensors["best.theta"])
    run.best_score, run.best_epoch, run.stopped = (
        tensors["best.score"],
        tensors["best.epoch"],
        tensors["stopped"],
    )
    job.model.load_buffers({k[7:]: v for k, v in tensors.items() if k.startswith("buffer.")})
    for name, value in run.best_buffers.items():
        value.copy_(tensors[f"best_buffer.{name}"])
    run.draws = list(tensors["draws"].to(run.best_theta.device)) if "draws" in tensors else []


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
    """Copy saved tensors into a state of the same form."""
    own = pack_state(state)
    if own.keys() != packed.keys():
        raise DamagedFileError(f"checkpoint must hold {sorted(own)}; got {sorted(packed)}.")
    for name, tensor in own.items():
        tensor.copy_(packed[name])


def _copy(buffers: Params) -> Params:
    return {name: value.clone() for name, value in buffers.items()}


def _spread(buffers: Params, members: int) -> Params:
    return {name: value.expand(members, *value.shape).clone() for name, value in buffers.items()}


def _label(members: tuple[int, ...]) -> str:
    return f"member {members[0]}" if len(members) == 1 else f"members {members[0]}-{members[-1]}"


def _note(run: _Run) -> str:
    if not run.history:
        return ""
    last = run.history[-1]
    values = last.get("validation", last["log_joint"])
    kind = "validation" if "validation" in last else "log joint"
    return f"{kind} {sum(values) / len(values):.3f}"
