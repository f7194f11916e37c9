"""Many members of one method: networks of an ensemble, chains, or a single one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bayesformer.core.draws import drawing_from
from bayesformer.core.progress import Reporter
from bayesformer.core.strategy import decide, largest_tensor, run_as
from bayesformer.core.types import LogJoint, Params, Transform
from bayesformer.core.vectors import THETA
from bayesformer.data.all_data import WholeData
from bayesformer.data.batches import Batches
from bayesformer.data.in_memory import Data, batch_to
from bayesformer.data.inputs import tensors_of
from bayesformer.inference import optimise
from bayesformer.laws.samples import shared
from bayesformer.model.modes import set_training
from bayesformer.model.skeleton import Skeleton
from bayesformer.train.checkpoint import record_strategy, resume_strategy
from bayesformer.train.collect import Collect
from bayesformer.train.loop import Job, Trained, train
from bayesformer.train.networks import keep_networks, network_path, read_network
from bayesformer.train.objective import KlWeight, Objective, Term
from bayesformer.train.problem import Problem, settings_of
from bayesformer.train.prototype import Prototype, Start
from bayesformer.train.training import Training
from bayesformer.train.vector_prior import VectorPrior


class BuildTransform(Protocol):
    """How a method makes its transform, given the objective, the training settings, the steps in all and N."""

    def __call__(self, log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:
        """The transform for one member, or for several in rows."""
        ...


def build_optimiser(log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:  # noqa: ARG001
    """Adam as the training settings describe it."""
    return optimise.build(log_joint, training.adam(steps), training.clip)


@dataclass
class Stage:
    """One stage of a fit: members trained by one transform from their starts."""

    prototype: Prototype
    label: str
    training: Training
    build: BuildTransform = build_optimiser
    prior: VectorPrior | None = None
    priors: Sequence[VectorPrior] | None = None
    """the prior of each member, where they differ"""
    validation: Batches | None = None
    kl_weight: KlWeight | None = None
    terms: tuple[Term, ...] = ()
    samples: int = 1
    replacement: bool = False
    chunk: int | None = None
    """every step takes all data, evaluated in chunks of this many examples; None: a step takes a batch"""
    held: tuple[str, ...] | None = None
    """modules in evaluation mode; None: those of the prototype"""
    collect: Callable[[int], Collect] | None = None
    """from the number of steps in all to the states that are kept"""
    starts: Sequence[Start] | None = None
    """where members start; None asks the prototype"""
    skeletons: Sequence[Skeleton] | None = None
    """the skeleton of each member, where its fixed weights are its own; None: the prototype's for all"""
    alone: str | None = None
    """why members cannot run in lockstep, where the transform is what forbids it"""
    identity: dict[str, Any] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        """The problem that the members are fitted to."""
        return self.prototype.problem

    @property
    def steps(self) -> int:
        """Steps that a member makes, at most."""
        return self.training.steps(1 if self.chunk is not None else self.steps_per_epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one pass over the data."""
        joined = self.prototype.moves_buffers
        per_epoch = self.prototype.data.steps(self.training.batch_size, join_single=joined)
        if per_epoch is None:
            size = self.prototype.data.batch_size or self.training.batch_size
            per_epoch = -(-self.problem.num_data // size)
        return per_epoch

    @property
    def passes(self) -> int:
        """Passes over the data that a member begins, at most; those of full-batch steps are checked by `WholeData`."""
        return 1 if self.chunk is not None else -(-self.steps // self.steps_per_epoch)

    def skeleton(self, member: int) -> Skeleton:
        """The skeleton that a member is trained on."""
        return self.prototype.skeleton if self.skeletons is None else self.skeletons[member]

    def start(self, member: int) -> Start:
        """The weights and buffers that a member starts from."""
        return self.prototype.start(member) if self.starts is None else self.starts[member]

    def job(self, members: Sequence[int]) -> Job:
        """The members as one job of the training loop."""
        prototype, steps, count = self.prototype, self.steps, self.problem.num_data
        if prototype.moves_buffers and 1 in {self.training.batch_size, count}:
            prototype.check_single()
        random = prototype.randomness  # its trial comes before anything that stays in memory
        starts = [self.start(member) for member in members]
        theta = starts[0].theta if len(members) == 1 else None
        shell = self.skeleton(members[0]).shell(theta=theta)  # the start itself is trained: no copy of it is kept
        shell.load_buffers(starts[0].buffers)
        objective = Objective(
            shell,
            prototype.likelihood,
            count,
            self.prior if self.priors is None else self.priors[members[0]],
            kl_weight=self.kl_weight,
            terms=self.terms,
            samples=self.samples,
            autocast=self.training.precision == "bf16",
            check_targets=prototype.data.tensors is None,
        )
        return Job(
            shell=shell,
            transform=self.build(objective, self.training, steps, count),
            theta=shell.theta if len(members) == 1 else torch.stack([start.theta for start in starts]),
            data=prototype.data,
            validation=self.validation,
            likelihood=prototype.likelihood,
            training=self.training,
            seed=self.problem.seed,
            members=tuple(members),
            steps=steps,
            randomness=random,
            dropout_rate=prototype.dropout_rate,
            held=prototype.held if self.held is None else self.held,
            replacement=self.replacement,
            join_single=prototype.moves_buffers,
            whole=None if self.chunk is None else WholeData(prototype.data, self.chunk, self.device),
            collect=None if self.collect is None else self.collect(steps),
            identity={"method": self.label, "init": self.problem.init, **self.identity},
        )

    def single(self, member: int, reporter: Reporter) -> Trained:
        """The result of training one member alone."""
        return self._train([member], reporter)

    def batched(self, members: Sequence[int], reporter: Reporter) -> Trained:
        """Train several members in lockstep."""
        return self._train(members, reporter)

    def _train(self, members: Sequence[int], reporter: Reporter) -> Trained:
        path, folder = None, self.problem.checkpoint
        if folder is not None:
            path = Path(folder) / f"{self.label}-{members[0]}-{members[-1]}.safetensors"
        files = [file for member in members if (file := network_path(self, member)) is not None]
        trained = train(self.job(members), path, self.problem.checkpoint_seconds, reporter)
        if files:
            keep_networks(files, trained, self.problem.seed, members)
        return trained

    @property
    def is_plain(self) -> bool:
        """Whether members are networks trained by the optimiser from their own starts, and nothing besides."""
        changed = (self.starts, self.skeletons, self.kl_weight, self.collect, self.terms or None)
        return self.build is build_optimiser and all(part is None for part in changed)

    @property
    def weights(self) -> int:
        """P, the weights that a member is trained in."""
        return self.skeleton(0).space.size

    def largest(self) -> int:
        """Numbers in the largest tensor of a forward pass on one batch, scaled up from two examples."""
        shell, batch = self.skeleton(0).shell(gradients=False), self.prototype.trial_batch
        found = largest_tensor(lambda: self.prototype.trial(shell, batch))
        return found * self.training.batch_size // len(batch.targets)

    def shared(self) -> dict[str, Tensor]:
        """The model's weights and the data in memory, which worker processes map instead of getting copies."""
        found = {f"weight.{name}": p.detach() for name, p in self.prototype.model.named_parameters()}
        data = self.prototype.data.tensors
        if data is not None:
            every = [*tensors_of(data.inputs), data.targets, *([] if data.mask is None else [data.mask])]
            found |= {f"data.{i}": tensor for i, tensor in enumerate(every)}
        return {name: tensor for name, tensor in found.items() if tensor.device.type == "cpu"}

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return self.prototype.skeleton.device

    def why_not_batched(self) -> str | None:
        """Members in lockstep share one pass, which must be free of noise and of state of its own."""
        made, data = self.prototype, self.prototype.data.tensors
        if data is None:
            return "the data are not tensors in memory, and members read them in different orders"
        if self.alone is not None:
            return self.alone
        rules = (
            (self.priors is not None, "every member has a prior of its own"),
            (self.chunk is not None, "steps on all data take as many evaluations as the trajectory of each chain"),
            (self.skeletons is not None, "every member has fixed weights of its own"),
            (
                made.randomness.kind != "none" or self.kl_weight is not None or bool(self.terms),
                "the model has dropout or noise, and every member has a noise stream of its own",
            ),
            (made.moves_buffers, "training changes the model's buffers (running averages)"),
            (
                bool(made.skeleton.facts.staged),
                "inferred weights have another precision than the vector they are kept in",
            ),
        )
        return next((reason for holds, reason in rules if holds), None) or self._trial(data)

    def _trial(self, data: Data) -> str | None:
        """One step of two members in lockstep on one example: the reason why it fails, or None."""
        job, index = self.job([0, 1]), torch.zeros(2, 2, dtype=torch.int64, device=data.targets.device)
        set_training(job.shell.module, job.held)
        try:
            with drawing_from([torch.Generator(self.device) for _ in range(2)]):
                job.transform.update(job.transform.init({THETA: job.theta}), batch_to(data.take(index), self.device))
        except RuntimeError as error:
            return f"the model cannot be vmapped ({str(error).splitlines()[0]})"
        return None


@dataclass(frozen=True)
class Fitted:
    """All members after a stage, stacked in their order."""

    theta: Tensor  # (L, P)
    buffers: Params  # each (L, ...)
    states: list[Any]  # the last state of the transform of each job; one per member unless they ran in lockstep
    draws: Tensor | None  # (L, S, P)
    draw_buffers: Params  # each (L, S, ...)
    strategy: str
    facts: dict[str, Any]
    histories: list[list[dict[str, list[float]]]] = field(default_factory=list)  # per job, per epoch: numbers by name


def fit_stage(stage: Stage, members: int) -> Fitted:
    """Train all members of a stage, however they are run."""
    stage.problem.data.require_passes(stage.passes * members)
    strategy, results = _results(stage, range(members))
    found = [r.draws for r in results if r.draws is not None]
    draws = torch.cat(found) if found else None
    joined = {name: torch.cat([r.buffers[name] for r in results]) for name in results[0].buffers}
    kept = {name: torch.cat([r.draw_buffers[name] for r in results]) for name in results[0].draw_buffers}
    facts = {
        "epochs": [r.epochs for r in results for _ in r.theta],
        "steps": [r.steps for r in results for _ in r.theta],
        "best_epoch": torch.cat([r.best_epoch for r in results]).tolist(),
        "seconds": sum(r.seconds for r in results),
        "converged": [value for r in results for value in r.converged],
        "strategy": strategy,
    }
    theta = results[0].theta if len(results) == 1 else torch.cat([r.theta for r in results])
    states, histories = [r.state for r in results], [r.history for r in results]
    return Fitted(theta, shared(joined), states, draws, kept, strategy, facts, histories)


def _results(stage: Stage, members: Sequence[int]) -> tuple[str, list[Trained]]:
    """The strategy, and the results of all members in order: networks that were kept are not trained again."""
    problem, folder = stage.problem, stage.problem.checkpoint
    files = {member: path for member in members if (path := network_path(stage, member)) is not None}
    missing = [member for member in members if member not in files or not files[member].exists()]
    strategy, made = "kept", []
    if missing:
        wanted, veto = resume_strategy(folder, stage.label, problem.strategy)
        chosen = decide(stage, missing, wanted, problem.workers, veto)
        record_strategy(folder, stage.label, chosen)
        strategy, made = chosen, run_as(stage, missing, chosen, problem.workers, problem.reporter)
    return strategy, [read_network(files[member]) for member in members] if files else made


def facts_of(name: str, method: object, prototype: Prototype, *stages: Fitted) -> dict[str, Any]:
    """What is known of a posterior's making, over all stages of its fit."""
    problem, last = prototype.problem, stages[-1]
    return {
        "method": {"name": name, **settings_of(method)},
        "training": asdict(problem.training),
        "seed": problem.seed,
        "num_data": problem.num_data,
        "data": problem.data.fingerprint(),
        "init": problem.init if isinstance(problem.model, nn.Module) or problem.init != "given" else "built",
        **last.facts,
        "seconds": sum(stage.facts["seconds"] for stage in stages),
        "converged": stages[0].facts["converged"],
    }
