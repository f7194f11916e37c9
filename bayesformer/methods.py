"""Methods: the user's choice, as small frozen dataclasses, each turning a problem into a posterior.

`METHODS` is the list that the command line and the runner read. A method's docstring starts with its one-line
description; the text under a field is its help.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from bayesformer.dataset import Data
from bayesformer.dropout import dropout_sites, set_dropout
from bayesformer.engine import Strategy, run_members
from bayesformer.errors import unknown_name
from bayesformer.inference import optimise
from bayesformer.likelihoods import Likelihood
from bayesformer.network import FlatLogJoint, FlatModel, apply, device_of, is_stochastic, reinitialise, trainable
from bayesformer.posterior import Posterior
from bayesformer.priors import Prior, as_prior
from bayesformer.progress import Reporter, Silent
from bayesformer.seeds import stream
from bayesformer.train import Job, Trained, Training, train
from bayesformer.types import ModelFactory, Params


@dataclass(frozen=True)
class Problem:
    """Everything a method needs to know."""

    model: nn.Module | ModelFactory
    likelihood: Likelihood
    data: Data
    validation: Data | None = None
    training: Training = field(default_factory=Training)
    seed: int = 0
    strategy: Strategy = "auto"
    workers: int | None = None
    checkpoint: Path | None = None
    checkpoint_seconds: float = 10.0
    reporter: Reporter = field(default_factory=Silent)


class Method(Protocol):
    """Anything with `fit(problem) -> Posterior`."""

    def fit(self, problem: Problem) -> Posterior:
        """The posterior of this method."""
        ...


@dataclass(frozen=True)
class Mle:
    """Maximum likelihood: one network, no uncertainty in the weights."""

    def fit(self, problem: Problem) -> Posterior:
        """Train one network."""
        return _fit_members(self, problem, 1, init="given")


@dataclass(frozen=True)
class Map:
    """Maximum a posteriori: one network, pulled towards a prior over the weights."""

    prior: str | dict[str, str] = "normal(0, 1)"
    """law of every weight, e.g. "normal(0, 0.5)", or a table of laws by name pattern"""

    def __post_init__(self) -> None:
        as_prior(self.prior)

    def fit(self, problem: Problem) -> Posterior:
        """Train one network with the prior in its objective."""
        return _fit_members(self, problem, 1, init="given", prior=as_prior(self.prior))


@dataclass(frozen=True)
class Ensemble:
    """Deep ensemble: independent networks from different starts and data orders, averaged."""

    members: int = 10
    """networks to train"""
    init: Literal["fresh", "given"] = "fresh"
    """start each member from new random weights, or all from the weights given"""

    def __post_init__(self) -> None:
        if self.members < 1:
            raise ValueError(f"ensemble.members must be at least 1; got {self.members}.")
        if self.init not in {"fresh", "given"}:
            raise ValueError(f"ensemble.init must be 'fresh' or 'given'; got {self.init!r}.")

    def fit(self, problem: Problem) -> Posterior:
        """Train all members."""
        return _fit_members(self, problem, self.members, init=self.init)


@dataclass(frozen=True)
class MCDropout:
    """MC dropout: one network trained with dropout, which stays on for prediction, attention included."""

    rate: float | None = 0.1
    """dropout rate set at every site, attention weights too; none keeps the model's own rates"""
    draws: int = 30
    """forward passes per prediction"""

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < 1:
            raise ValueError(f"mc_dropout.rate must lie strictly between 0 and 1, or be none; got {self.rate}.")
        if self.draws < 1:
            raise ValueError(f"mc_dropout.draws must be at least 1; got {self.draws}.")

    def fit(self, problem: Problem) -> Posterior:
        """Train with dropout and keep it on."""
        prepare = _Dropout(self.rate)
        posterior = _fit_members(self, problem, 1, init="given", prepare=prepare)
        return replace(posterior, noisy_draws=self.draws)


METHODS: dict[str, type[Any]] = {
    "mle": Mle,
    "map": Map,
    "ensemble": Ensemble,
    "mc_dropout": MCDropout,
}


def method_name(method: Method) -> str:
    """The name a method is listed under, or its class's name."""
    return next((name for name, kind in METHODS.items() if type(method) is kind), type(method).__name__)


def build_method(name: str, settings: dict[str, Any] | None = None) -> Method:
    """A method from its name and settings."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    kind = METHODS[name]
    known = [f.name for f in fields(kind)]
    for key in settings or {}:
        if key not in known:
            raise unknown_name(f"setting of {name}", key, known)
    return kind(**(settings or {}))


@dataclass(frozen=True)
class _Dropout:
    """Sets a model's dropout rates; a class rather than a closure so that worker processes can have it."""

    rate: float | None

    def __call__(self, model: nn.Module, data: Data) -> None:
        sites = set_dropout(model, self.rate)
        model.train()
        if not is_stochastic(model, data.inputs):
            raise ValueError(
                f"mc_dropout needs a model with dropout; this one has {len(sites)} dropout sites and two training "
                "passes agree exactly. Give mc_dropout.rate, or add nn.Dropout modules."
            )


@dataclass
class TrainTask:
    """Training of every member of a method, for the engine."""

    source: nn.Module | ModelFactory
    likelihood: Likelihood
    data: Data
    validation: Data | None
    training: Training
    seed: int
    init: Literal["fresh", "given"]
    prior: Prior | None
    prepare: Callable[[nn.Module, Data], None] | None
    checkpoint: Path | None
    checkpoint_seconds: float
    label: str

    def model(self, member: int) -> nn.Module:
        """The untrained network of one member; member 0 of a given model starts from its own weights."""
        with stream(self.seed, "init", member):
            if isinstance(self.source, nn.Module):
                model = copy.deepcopy(self.source)
                if self.init == "fresh":
                    reinitialise(model)
            else:
                model = self.source()
        if self.prepare is not None:
            self.prepare(model, self.data.to(device_of(model)))
        return model

    def job(self, members: Sequence[int]) -> Job:
        """The members as one job of the training loop."""
        models = [FlatModel(self.model(member)) for member in members]
        first = models[0]
        theta = first.theta if len(members) == 1 else torch.stack([m.theta for m in models])
        joint = FlatLogJoint(first, self.likelihood, self.prior, len(self.data))
        transform = optimise.build(joint, self.training.adam(), self.training.clip)
        return Job(
            first,
            transform,
            theta,
            self.data.to(theta.device),
            None if self.validation is None else self.validation.to(theta.device),
            self.likelihood,
            self.training,
            self.seed,
            tuple(members),
            {"method": self.label, "prior": repr(self.prior), "init": self.init},
        )

    def single(self, member: int, reporter: Reporter) -> Params:
        """Train one member."""
        return {k: v[0] for k, v in self._result(self._train([member], reporter)).items()}

    def batched(self, members: Sequence[int], reporter: Reporter) -> Params:
        """Train several members in lockstep."""
        return self._result(self._train(members, reporter))

    def _train(self, members: Sequence[int], reporter: Reporter) -> Trained:
        path = None
        if self.checkpoint is not None:
            path = self.checkpoint / f"members-{members[0]}-{members[-1]}.safetensors"
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
            **{f"buffer.{name}": value for name, value in trained.buffers.items()},
        }

    def trial(self, members: Sequence[int]) -> Callable[[], object]:
        """One step on the first batch."""
        job = self.job(members)
        size = min(self.training.batch_size, len(self.data))
        index = torch.arange(size, device=job.theta.device)
        batch = job.data.take(index if len(members) == 1 else index.expand(len(members), size))
        state = job.transform.init({"theta": job.theta})
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
        """Model, batch and number of steps."""
        rates = [getattr(module, name) for module, name in dropout_sites(self._example)]
        batch = self.data.take(slice(0, self.training.batch_size))
        text = f"{self._example}{rates}{batch.targets.shape}{self.units}{self.device}"
        return "train " + hashlib.sha256(text.encode()).hexdigest()[:12]

    def why_not_batched(self) -> str | None:
        """Members in lockstep share one pass, which must be free of noise and of state of its own."""
        model = copy.deepcopy(self._example).train()
        before = {name: value.clone() for name, value in model.named_buffers()}
        few = self.data.to(self.device).take(slice(0, 2)).inputs
        if is_stochastic(model, few):
            return "the model has dropout, and every member has a noise stream of its own"
        if any(not torch.equal(before[name], value) for name, value in model.named_buffers()):
            return "training changes the model's buffers (running averages)"
        try:
            self.trial([0, 1])()
        except RuntimeError as error:
            return f"the model cannot be vmapped ({str(error).splitlines()[0]})"
        return None


def _fit_members(
    method: Method,
    problem: Problem,
    members: int,
    init: Literal["fresh", "given"],
    prior: Prior | None = None,
    prepare: Callable[[nn.Module, Data], None] | None = None,
) -> Posterior:
    """Train `members` networks through the engine and hold them as a posterior."""
    name = method_name(method)
    task = TrainTask(
        source=problem.model,
        likelihood=problem.likelihood,
        data=problem.data,
        validation=problem.validation,
        training=problem.training,
        seed=problem.seed,
        init=init,
        prior=prior,
        prepare=prepare,
        checkpoint=problem.checkpoint,
        checkpoint_seconds=problem.checkpoint_seconds,
        label=name,
    )
    model = task.model(0)
    if prior is not None:
        prior.assign(trainable(model))
    check_problem(model, problem)
    result = run_members(task, range(members), problem.strategy, problem.workers, problem.reporter)
    facts = {
        "method": {"name": name, **asdict(method)},  # type: ignore[call-overload]
        "training": asdict(problem.training),
        "seed": problem.seed,
        "num_data": len(problem.data),
        "data": problem.data.fingerprint(),
        "epochs": result["epochs"].tolist(),
        "best_epoch": result["best_epoch"].tolist(),
        "validation": None if problem.validation is None else result["validation"].tolist(),
        "seconds": result["seconds"].sum().item(),
    }
    buffers = {k.removeprefix("buffer."): v for k, v in result.items() if k.startswith("buffer.")}
    return Posterior(model.eval(), problem.likelihood, result["theta"], buffers, 0, facts)


def check_problem(model: nn.Module, problem: Problem) -> None:
    """Run the model on two examples and see that its outputs, the likelihood and all targets fit together."""
    model.eval()
    for label, given in [("train", problem.data), ("validation", problem.validation)]:
        if given is None:
            continue
        data = given.to(device_of(model))
        few = data.take(slice(0, 2))
        with torch.no_grad():
            outputs = apply(model, few.inputs)
        if len(outputs) != len(few.targets):
            raise ValueError(f"model must return one output per example; got {len(outputs)} for {len(few.targets)}.")
        # The labels of all examples, against outputs of the first: only the number of classes matters.
        full = outputs[:1].expand(len(data), *outputs.shape[1:])
        try:
            problem.likelihood.check(full, data.targets, data.mask)
        except ValueError as error:
            raise ValueError(f"{label} data: {error}") from error
