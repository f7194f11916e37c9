"""The only training loop. It drives any transform, on one member or on several in lockstep.

Nothing in it knows a method, a model or a task. Randomness is derived from (seed, member, epoch), so a run that was
killed and resumed, a run in a worker process and a run in a loop are the same run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesformer.core.errors import TrainingDivergedError
from bayesformer.core.progress import Reporter, Silent
from bayesformer.core.seeds import fold, generator
from bayesformer.core.types import Batch, Params, Transform
from bayesformer.core.vectors import THETA
from bayesformer.data.all_data import WholeData
from bayesformer.data.batches import Batches
from bayesformer.data.in_memory import InMemory
from bayesformer.likelihoods import Likelihood
from bayesformer.model.modes import set_training
from bayesformer.model.randomness import Randomness
from bayesformer.model.shell import Shell
from bayesformer.train import checkpoint as checkpoints
from bayesformer.train.collect import Collect
from bayesformer.train.convergence import ENOUGH, has_converged, parts_of
from bayesformer.train.training import Training

CHECK_EVERY = 20  # steps between checks for NaN: a check waits for the device
SCORE_CHUNK = 256  # validation examples per pass


@dataclass(frozen=True)
class Job:
    """One group of members to train together: theta is (P,) for one, (L, P) in lockstep."""

    shell: Shell
    transform: Transform
    theta: Tensor
    data: Batches
    validation: Batches | None
    likelihood: Likelihood
    training: Training
    seed: int
    members: tuple[int, ...]
    steps: int
    """steps in all, at most"""
    randomness: Randomness = field(default_factory=Randomness)
    """how a pass draws random numbers"""
    dropout_rate: float | None = None
    """rate of every dropout in place of the model's own"""
    held: tuple[str, ...] = ()
    """modules that stay in evaluation mode while the others train"""
    replacement: bool = False
    """whether batches are drawn with replacement"""
    join_single: bool = False
    """whether a last batch of one example is joined to the one before, as BatchNorm needs"""
    whole: WholeData | None = None
    """all data, for algorithms whose step takes them all: an epoch then is one step"""
    collect: Collect | None = None
    """states to keep on the way"""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """facts beyond the training settings that make this job this one; guards a checkpoint"""

    @property
    def is_foreign(self) -> bool:
        """Whether the algorithm is not of this library: then it draws by functions of torch, as a model may."""
        return type(self.transform) is not Transform


class Trained(NamedTuple):
    """The result of a job, with the member axis in front."""

    theta: Tensor  # (L, P), the best weights on validation data, or the last without
    buffers: Params  # each (L, ...), those that go with theta
    history: list[dict[str, list[Any]]]  # per epoch and member: log joint, its parts, validation score, statistics
    best_epoch: Tensor  # (L,)
    best_score: Tensor  # (L,), validation log-likelihood per example there; -inf without validation data
    epochs: int  # epochs begun
    steps: int  # steps made
    seconds: float  # spent in training, over all resumptions
    converged: list[bool | None]  # per member; None where the run is too short to tell
    draws: Tensor | None  # (L, S, P), states that were collected
    draw_buffers: Params  # each (L, S, ...), the buffers at those states
    state: Any  # the last state of the transform


@dataclass
class TrainingRun:
    """Everything a checkpoint holds."""

    state: Any
    epoch: int  # epochs finished
    step: int  # steps made in the epoch that is going on
    generators: Sequence[torch.Generator]  # one per member
    best_theta: Tensor | None  # like theta; None while the best weights are the last
    best_buffers: Params
    best_score: Tensor  # (L,)
    best_epoch: Tensor  # (L,)
    stopped: Tensor  # (L,)
    stale: Tensor  # (L,), validation evaluations since the best one
    values: list[Tensor]  # log joints of the epoch that is going on, each () or (L,)
    sizes: list[int]  # examples that each was taken on
    history: list[dict[str, list[Any]]]
    draws: list[Tensor]  # each like theta
    draw_buffers: list[Params]
    latest: dict[str, list[float]] = field(default_factory=dict)  # scores of the epoch's last validation evaluation
    total: int = 0  # steps made in all
    seconds: float = 0.0  # spent before this session
    began: float = field(default_factory=time.perf_counter)

    @property
    def elapsed(self) -> float:
        """Seconds of training over all sessions."""
        return self.seconds + time.perf_counter() - self.began

    @property
    def theta(self) -> Tensor:
        """The current weights, (P,) or (L, P)."""
        return self.state.params[THETA]


def train(
    job: Job, checkpoint: Path | None = None, every_seconds: float = 10.0, reporter: Reporter | None = None
) -> Trained:
    """Train to the end, resuming from `checkpoint` if it holds this very job."""
    reporter = reporter or Silent()
    run = _begin(job)
    saver = checkpoints.Saver(job, run, checkpoint, every_seconds)
    saver.resume()
    label = _label(job.members)
    set_training(job.shell.module, job.held)
    while not _ended(run, job):
        reporter.update(label, run.epoch, job.training.epochs, _note(run))
        _epoch(run, job, saver)
        saver.save(force=_ended(run, job))
    reporter.update(label, job.training.epochs, job.training.epochs)
    return _result(run, job)


def _begin(job: Job) -> TrainingRun:
    members, theta = len(job.members), job.theta
    if theta.dim() == 1:
        # The state lives in the shell's own vector: no copy per step.
        job.shell.load(theta)
        theta = job.shell.theta
    device = theta.device
    return TrainingRun(
        state=job.transform.init({THETA: theta}),
        epoch=0,
        step=0,
        generators=[torch.Generator(device) for _ in job.members],
        best_theta=None if job.validation is None else theta.clone(),
        best_buffers={} if job.validation is None else _buffers(job),
        best_score=torch.full((members,), -torch.inf, dtype=torch.float64, device="cpu"),
        best_epoch=torch.zeros(members, dtype=torch.int64, device="cpu"),
        stopped=torch.zeros(members, dtype=torch.bool, device="cpu"),
        stale=torch.zeros(members, dtype=torch.int64, device="cpu"),
        values=[],
        sizes=[],
        history=[],
        draws=[],
        draw_buffers=[],
    )


def _ended(run: TrainingRun, job: Job, epochs: int | None = None) -> bool:
    done = run.epoch if epochs is None else epochs
    planned = job.collect is not None and run.total < max(
        job.collect.steps, default=0
    )  # epochs of a stream may be shorter
    return (done >= job.training.epochs and not planned) or run.total >= job.steps or bool(run.stopped.all())


def _epoch(run: TrainingRun, job: Job, saver: checkpoints.Saver) -> None:
    """From the step where the epoch stands to its end, to the last step of all, or until nothing gets better."""
    if run.step == 0:
        for member, generator in zip(job.members, run.generators, strict=True):
            generator.manual_seed(fold(job.seed, member, run.epoch, "noise"))
    every = job.training.evaluate_every
    for batch in _batches(job, run):
        with job.randomness.passing(run.generators, job.dropout_rate, watch=job.is_foreign):
            run.state = job.transform.update(run.state, batch, inplace=True)[0]  # outputs are not kept until the next
        run.values.append(log_value(run.state).clone())  # some algorithms overwrite it in the next step
        run.sizes.append(_examples(batch, job))
        run.step, run.total = run.step + 1, run.total + 1
        if job.collect is not None and run.total in job.collect.steps:
            _keep_draw(run, job)
        if run.step % CHECK_EVERY == 0:
            _check_finite(run, job)
        if every is not None and run.total % every == 0:
            _judge(run, job)
        if run.total >= job.steps or bool(run.stopped.all()):
            break
        saver.save()
    _check_finite(run, job)
    _end_epoch(run, job)


def _end_epoch(run: TrainingRun, job: Job) -> None:
    """Note the epoch in the history, after a validation evaluation if one is due."""
    every = job.training.evaluate_every
    unseen = _ended(run, job, run.epoch + 1) and every is not None and run.total % every
    if every is None or unseen:  # the last weights are judged in any case
        _judge(run, job)
    values = torch.stack(run.values).double().reshape(len(run.values), -1)
    parts = {"parts": parts_of(values)} if run.epoch < ENOUGH else {}
    shares = torch.tensor(run.sizes, dtype=torch.float64, device=values.device)
    mean = (shares / shares.sum()) @ values  # over examples: a small last batch would bring its noise
    run.history.append({"log_joint": mean.tolist(), **parts, **run.latest, **_statistics(run.state)})
    if run.best_theta is None:
        run.best_epoch.fill_(run.epoch)
    run.epoch, run.step, run.values, run.sizes, run.latest = run.epoch + 1, 0, [], [], {}


def _examples(batch: Batch | WholeData, job: Job) -> int:
    """Examples of a batch, of each member where several are trained in lockstep."""
    return batch.targets.shape[job.theta.dim() - 1] if isinstance(batch, Batch) else 1


def _statistics(state: Any) -> dict[str, list[float]]:
    """What an algorithm says of its last step, by name; most say nothing."""
    found = getattr(state, "statistics", None)
    return {} if found is None else {name: [value.item()] for name, value in found._asdict().items()}


def _batches(job: Job, run: TrainingRun) -> Iterator[Batch | WholeData]:
    if job.whole is not None:
        return iter([job.whole][run.step :])
    size, device = job.training.batch_size, job.theta.device
    options: dict[str, Any] = {"seed": job.seed, "epoch": run.epoch, "start": run.step, "device": device}
    options |= {"replacement": job.replacement, "join_single": job.join_single}
    if job.theta.dim() == 1:
        return job.data.epoch(size, member=job.members[0], **options)
    assert isinstance(job.data, InMemory)
    return job.data.lockstep(size, members=job.members, **options)


def _keep_draw(run: TrainingRun, job: Job) -> None:
    run.draws.append(run.theta.clone())
    run.draw_buffers.append(_buffers(job))


def _judge(run: TrainingRun, job: Job) -> None:
    """Keep the best weights so far of every member that has not stopped, and stop those out of patience."""
    if job.validation is None or run.best_theta is None:
        return
    theta = run.theta
    source = generator(job.seed, "validation", run.total, device=theta.device)
    with job.randomness.passing(source):  # some models draw in evaluation mode, too
        value = score(job.shell, job.likelihood, theta, job.validation).cpu()
    set_training(job.shell.module, job.held)
    better = (value > run.best_score) & ~run.stopped
    if theta.dim() == 1:
        if bool(better):
            run.best_theta.copy_(theta)
            run.best_buffers = _buffers(job)
    else:
        run.best_theta[better] = theta[better]
    run.best_score = torch.where(better, value, run.best_score)
    run.best_epoch[better] = run.epoch
    run.stale = torch.where(better, 0, run.stale + 1)
    if job.training.patience:
        run.stopped |= run.stale >= job.training.patience
    run.latest = {"validation": value.tolist()}


def score(shell: Shell, likelihood: Likelihood, theta: Tensor, data: Batches) -> Tensor:
    """(L,): mean log-likelihood per example of each member, without dropout."""
    shell.module.eval()
    total, count = torch.zeros(1, dtype=torch.float64, device=theta.device), 0
    with torch.no_grad():
        for batch in data.in_order(SCORE_CHUNK, device=theta.device):
            rows = theta[None] if theta.dim() == 1 else theta
            values = []
            for row in rows:
                shell.load(row)
                values.append(likelihood.log_prob(shell(batch.inputs), batch.targets, batch.mask).sum())
            total, count = total + torch.stack(values).double(), count + len(batch.targets)
    return total / count


def _check_finite(run: TrainingRun, job: Job) -> None:
    """Look at the log joints of the epoch so far, and at the weights, which the last step may have spoiled."""
    table = torch.stack(run.values).reshape(len(run.values), -1) if run.values else run.theta.new_zeros(0, 1)
    spoiled = ~torch.isfinite(run.theta.sum(-1)).reshape(1, -1)  # a sum is not finite if an entry is not
    bad = torch.cat([~torch.isfinite(table), spoiled]).nonzero()
    if not len(bad):
        return
    row, column = bad[0].tolist()
    what = f"the log joint became {table[row, column].item()}" if row < len(table) else "weights became NaN or infinite"
    step = run.total - len(run.values) + min(row + 1, len(run.values))
    advice = (
        f"Try a smaller training.lr (now {job.training.lr}), a smaller training.clip (now {job.training.clip}) or a "
        f"longer training.warmup (now {job.training.warmup})"
        if job.collect is None
        else "It was collecting draws: try a smaller lr of the method itself"
    )
    raise TrainingDivergedError(
        f"{what} at step {step} (epoch {run.epoch + 1}, member {job.members[column]}). {advice}, "
        "and check the scale of the inputs and targets."
    )


def log_value(state: Any) -> Tensor:
    """The log joint where the last gradient was taken; `posteriors` calls it `log_posterior`."""
    return state.log_joint if hasattr(state, "log_joint") else state.log_posterior


def _buffers(job: Job) -> Params:
    return {name: value.clone() for name, value in job.shell.buffers.items()}


def _result(run: TrainingRun, job: Job) -> Trained:
    members, alone = len(job.members), run.theta.dim() == 1
    rising = 0 if job.training.schedule == "constant" else job.training.warmup
    theta = run.theta if run.best_theta is None else run.best_theta
    buffers = _buffers(job) if run.best_theta is None else run.best_buffers
    draws = torch.stack(run.draws, -2) if run.draws else None  # (S, P) or (L, S, P)
    kept = {name: torch.stack([b[name] for b in run.draw_buffers]) for name in (run.draw_buffers or [{}])[0]}
    return Trained(
        theta=theta[None] if alone else theta,
        buffers={name: value.expand(members, *value.shape) for name, value in buffers.items()},
        history=run.history,
        best_epoch=run.best_epoch,
        best_score=run.best_score,
        epochs=run.epoch,
        steps=run.total,
        seconds=run.elapsed,
        converged=[has_converged(run.history, run.total, i, bool(run.stopped[i]), rising) for i in range(members)],
        draws=draws[None] if draws is not None and alone else draws,
        draw_buffers={name: value.expand(members, *value.shape) for name, value in kept.items()},
        state=run.state,
    )


def _label(members: tuple[int, ...]) -> str:
    return f"member {members[0]}" if len(members) == 1 else f"members {members[0]}-{members[-1]}"


def _note(run: TrainingRun) -> str:
    if not run.history:
        return ""
    last = run.history[-1]
    values = last.get("validation", last["log_joint"])
    kind = "validation" if "validation" in last else "log joint"
    return f"{kind} {sum(values) / len(values):.3f}"
