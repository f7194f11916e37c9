"""Training of a method's members, as a task for the engine."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from bayesformer.attention import attention_kl, families
from bayesformer.dataset import Data
from bayesformer.dropout import dropout_sites
from bayesformer.engine import run_members
from bayesformer.errors import unknown_name
from bayesformer.functional import THETA
from bayesformer.inference import optimise
from bayesformer.layers import IMPROVED
from bayesformer.likelihoods import Likelihood
from bayesformer.methods.problem import Problem, check_problem
from bayesformer.model.randomness import pass_noise
from bayesformer.network import (
    FlatLogJoint,
    FlatModel,
    Layout,
    apply,
    device_of,
    is_stochastic,
    reinitialise,
    trainable,
)
from bayesformer.priors import Prior, as_prior
from bayesformer.progress import Reporter
from bayesformer.seeds import stream
from bayesformer.train import Collect, Job, Trained, Training, train
from bayesformer.types import LogJoint, ModelFactory, Params, Transform


class BuildTransform(Protocol):
    """How a method makes its transform; N is the number of training examples. Must be picklable."""

    def __call__(self, log_joint: LogJoint, training: Training, num_data: int) -> Transform:
        """The transform."""
        ...


def prior_of(setting: str | dict[str, str]) -> Prior:
    """The prior a setting names: a law, a table of laws, or a table of the thesis, as in "improved/m1"."""
    if isinstance(setting, str) and setting.startswith("improved/"):
        name = setting.removeprefix("improved/")
        if name not in IMPROVED:
            raise unknown_name("improved prior", name, IMPROVED)
        return as_prior(IMPROVED[name])
    return as_prior(setting)


def build_optimiser(log_joint: LogJoint, training: Training, num_data: int) -> Transform:
    """Adam as the training settings describe it."""
    return optimise.build(log_joint, training.adam(num_data), training.clip)


@dataclass(frozen=True)
class AttentionCost:
    """The KL of a model's stochastic attention, in nats for all data: part of what is inferred about its weights."""

    num_data: int

    def __call__(self, model: nn.Module) -> Tensor:
        """N times the mean of the batch."""
        return self.num_data * attention_kl(model).mean()


@dataclass
class TrainTask:
    """Training of every member of a method."""

    source: nn.Module | ModelFactory
    likelihood: Likelihood
    data: Data
    validation: Data | None
    training: Training
    seed: int
    label: str
    build: BuildTransform = build_optimiser
    init: Literal["fresh", "given"] = "given"
    prior: Prior | None = None
    penalty: Callable[[nn.Module], Tensor] | None = None
    """a term to subtract from the log joint, read off the module, in nats for all data"""
    prepare: Callable[[nn.Module], nn.Module] | None = None
    """changes or wraps a fresh model before training"""
    collect: Collect | None = None
    start: Tensor | None = None
    """(L, P): weights to start the members from"""
    subset: str = "*"
    """name pattern of the parameters to infer; the others keep their starting values"""
    checkpoint: Path | None = None
    checkpoint_seconds: float = 10.0

    def model(self, member: int) -> nn.Module:
        """The untrained network of one member."""
        with stream(self.seed, "init", member):
            if isinstance(self.source, nn.Module):
                model = copy.deepcopy(self.source)
                if self.init == "fresh":
                    reinitialise(model)
            else:
                model = self.source()
            if self.prepare is not None:
                model = self.prepare(model)
        if self.start is not None:
            weights = Layout.of(model).views(self.start[member])
            with torch.no_grad():
                for name, parameter in trainable(model).items():
                    parameter.copy_(weights[name])
        return freeze_outside(model, self.subset)

    def job(self, members: Sequence[int]) -> Job:
        """The members as one job of the training loop."""
        models = [FlatModel(self.model(member)) for member in members]
        first = models[0]
        theta = first.theta if len(members) == 1 else torch.stack([m.theta for m in models])
        penalty = self.penalty
        if penalty is None and families(first.module):
            penalty = AttentionCost(len(self.data))
        joint = FlatLogJoint(first, self.likelihood, self.prior, len(self.data), penalty)
        return Job(
            model=first,
            transform=self.build(joint, self.training, len(self.data)),
            theta=theta,
            data=self.data.to(theta.device),
            validation=None if self.validation is None else self.validation.to(theta.device),
            likelihood=self.likelihood,
            training=self.training,
            seed=self.seed,
            members=tuple(members),
            collect=self.collect,
            identity={"method": self.label, "prior": repr(self.prior), "init": self.init, "subset": self.subset},
        )

    def single(self, member: int, reporter: Reporter) -> Params:
        """Train one member."""
        trained = self._train([member], reporter)
        # One member's state has no leading axis; everything else has.
        state = {f"state.{name}": value for name, value in trained.state.items()}
        return {**{k: v[0] for k, v in self._result(trained).items()}, **state}

    def batched(self, members: Sequence[int], reporter: Reporter) -> Params:
        """Train several members in lockstep."""
        trained = self._train(members, reporter)
        count = len(members)
        state = {
            f"state.{name}": value if value.dim() and len(value) == count else value.expand(count, *value.shape)
            for name, value in trained.state.items()
        }
        return {**self._result(trained), **state}

    def _train(self, members: Sequence[int], reporter: Reporter) -> Trained:
        path = None
        if self.checkpoint is not None:
            path = self.checkpoint / f"{self.label}-{members[0]}-{members[-1]}.safetensors"
        return train(self.job(members), path, self.checkpoint_seconds, reporter)

    @staticmethod
    def _result(trained: Trained) -> Params:
        members = len(trained.theta)
        return {
            "theta": trained.theta,
            "best_epoch": trained.best_epoch,
            "validation": trained.best_score,
            "epochs": torch.full((members,), len(trained.history)),
            "seconds": torch.full((members,), trained.seconds / members, dtype=torch.float64),
            **({} if trained.draws is None else {"draws": trained.draws}),
            **{f"buffer.{name}": value for name, value in trained.buffers.items()},
        }

    def trial(self, members: Sequence[int]) -> Callable[[], object]:
        """One step on the first batch."""
        job = self.job(members)
        size = min(self.training.batch_size, len(self.data))
        index = torch.arange(size, device=job.theta.device)
        batch = job.data.take(index if len(members) == 1 else index.expand(len(members), size))
        state = job.transform.init({THETA: job.theta})
        job.model.module.train()
        return lambda: job.transform.update(state, batch)

    @property
    def units(self) -> int:
        """Steps."""
        return self.training.epochs * -(-len(self.data) // self.training.batch_size)

    @cached_property
    def _example(self) -> nn.Module:
        return self.model(0)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return device_of(self._example)

    @cached_property
    def signature(self) -> str:
        """Model, algorithm, batch and number of steps."""
        rates = [getattr(module, name) for module, name in dropout_sites(self._example)]
        batch = self.data.take(slice(0, self.training.batch_size))
        text = f"{self._example}{rates}{self.build}{self.subset}{batch.targets.shape}{self.units}{self.device}"
        return "train " + hashlib.sha256(text.encode()).hexdigest()[:12]

    def why_not_batched(self) -> str | None:
        """Members in lockstep share one pass, which must be free of noise and of state of its own."""
        model = copy.deepcopy(self._example).train()
        before = {name: value.clone() for name, value in model.named_buffers()}
        few = self.data.to(self.device).take(slice(0, 2)).inputs
        if self.subset != "*":
            return "every member has frozen weights of its own"
        if self.penalty is not None or is_stochastic(model, few):
            return "the model has dropout or noise, and every member has a noise stream of its own"
        with torch.no_grad():
            apply(model, few)
        if any(not torch.equal(before[name], value) for name, value in model.named_buffers()):
            return "training changes the model's buffers (running averages)"
        noise = [torch.Generator(self.device), torch.Generator(self.device)]
        try:
            step = self.trial([0, 1])
            with pass_noise(noise):  # as in training: draws that do not know members are refused
                step()
        except RuntimeError as error:
            return f"the model cannot be vmapped ({str(error).splitlines()[0]})"
        return None


def freeze_outside(model: nn.Module, subset: str) -> nn.Module:
    """The model with only the parameters whose names match left to train."""
    if subset == "*":
        return model
    named = trainable(model)
    if not any(fnmatchcase(name, subset) for name in named):
        raise ValueError(f"subset must match a trainable parameter; {subset!r} matches none of {list(named)}.")
    for name, parameter in named.items():
        parameter.requires_grad_(fnmatchcase(name, subset))
    return model


def task_of(problem: Problem, label: str, **options: Any) -> TrainTask:
    """A training task on this problem."""
    return TrainTask(
        source=problem.model,
        likelihood=problem.likelihood,
        data=problem.data,
        validation=options.pop("validation", problem.validation),
        training=options.pop("training", problem.training),
        seed=problem.seed,
        label=label,
        checkpoint=problem.checkpoint,
        checkpoint_seconds=problem.checkpoint_seconds,
        **options,
    )


def run(task: TrainTask, members: int, problem: Problem) -> tuple[nn.Module, Params]:
    """Check the problem, train all members; returns member 0's untrained model and the results by name."""
    model = task.model(0)
    if task.prior is not None:
        task.prior.assign(trainable(model))
    check_problem(model, problem)
    result = run_members(task, range(members), problem.strategy, problem.workers, problem.reporter)
    return model.eval(), result


def facts_of(name: str, method: Any, problem: Problem, result: Params) -> dict[str, Any]:
    """What is known of a posterior's making."""
    return {
        "method": {"name": name, **asdict(method)},
        "training": asdict(problem.training),
        "seed": problem.seed,
        "num_data": len(problem.data),
        "data": problem.data.fingerprint(),
        "epochs": result["epochs"].tolist(),
        "best_epoch": result["best_epoch"].tolist(),
        "seconds": result["seconds"].sum().item(),
    }


def buffers_of(result: Params) -> Params:
    """Running averages of the members."""
    return {k.removeprefix("buffer."): v for k, v in result.items() if k.startswith("buffer.")}


def shortened(training: Training, share: float) -> Training:
    """The same training with a share of its epochs, at least one."""
    return replace(training, epochs=max(1, round(training.epochs * share)))
