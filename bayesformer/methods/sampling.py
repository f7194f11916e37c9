"""Markov chains with stochastic gradients: optimise to a mode, then sample around it, in one or more chains."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesformer.inference import baoab, psgld, schedules, sghmc, sgld, sgnht
from bayesformer.inference.schedules import Schedule
from bayesformer.methods.members import buffers_of, facts_of, prior_of, run, shortened, task_of
from bayesformer.methods.problem import Problem
from bayesformer.methods.ranges import above, at_least, check_ranges, whole, within
from bayesformer.network import Layout
from bayesformer.posterior import Posterior
from bayesformer.priors import Prior
from bayesformer.train import Collect, Training, steps_per_epoch
from bayesformer.types import LogJoint, Transform
from bayesformer.weights import Samples

EXPLORATION = 0.8  # share of a cycle spent moving without noise


@dataclass(frozen=True)
class _Chains(ABC):
    """Settings that all samplers share."""

    chains: int = 1
    """independent chains; several with one draw each are a Bayesian deep ensemble"""
    draws: int = 30
    """states kept of each chain, evenly spaced after the burn-in"""
    lr: float = 2e-4
    """step size"""
    temperature: float = 1.0
    """of the posterior: 1 is Bayes, below 1 is cold, 0 is optimisation; the library divides by N"""
    prior: str | dict[str, str] = "normal(0, 1)"
    """law of every weight, or a table of laws by name pattern"""
    warm_up: float = 0.5
    """share of the epochs spent finding a mode with Adam before sampling starts"""
    burn_in: float = 0.2
    """share of the sampling that is thrown away"""
    cycles: int = 0
    """cosine cycles of the step size, with noise and draws at the end of each; 0 keeps it constant"""
    subset: str = "*"
    """name pattern of the weights to sample; the others stay at the mode"""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            chains=whole(1),
            draws=whole(1),
            lr=above(0, finite=True),
            temperature=at_least(0),
            warm_up=within(0, 1),
            burn_in=within(0, 1),
            cycles=whole(0),
        )
        prior_of(self.prior)

    def _collect(self, steps: int) -> Collect:
        if self.cycles:
            return Collect.cyclical(steps, self.cycles, self.draws, EXPLORATION)
        return Collect.spread(steps, round(self.burn_in * steps), self.draws)

    @abstractmethod
    def transform(self, log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule) -> Transform:
        """The sampler itself."""

    def fit(self, problem: Problem) -> Posterior:
        """Find a mode per chain, then sample."""
        name = type(self).__name__.lower()
        modes, found = find_modes(name, problem, self.chains, prior_of(self.prior), self.warm_up)
        sampling = shortened(problem.training, 1 - self.warm_up)
        steps = sampling.epochs * steps_per_epoch(len(problem.data), sampling.batch_size)
        task = task_of(
            problem,
            name,
            training=sampling,
            validation=None,  # nothing is selected while sampling
            build=_Builder(self, steps),
            prior=prior_of(self.prior),
            collect=self._collect(steps),
            start=modes,
            subset=self.subset,
        )
        model, result = run(task, self.chains, problem)
        facts = facts_of(name, self, problem, result) | {"chains": self.chains}
        facts["seconds"] += found
        rows = spread_rows(model, modes, result["draws"], self.subset)
        return Posterior(model.requires_grad_(True), problem.likelihood, Samples(rows.flatten(0, 1)), facts=facts)


@dataclass(frozen=True)
class _Builder:
    """Builds the sampler for one chain; an object so that worker processes can have it."""

    method: _Chains
    steps: int

    def __call__(self, log_joint: LogJoint, training: Training, num_data: int) -> Transform:  # noqa: ARG002
        method, temperature = self.method, self.method.temperature / num_data
        if not method.cycles:
            return method.transform(log_joint, method.lr, temperature)
        return method.transform(
            log_joint,
            schedules.cyclical_lr(method.lr, method.cycles, self.steps),
            schedules.cyclical_temperature(temperature, method.cycles, self.steps, EXPLORATION),
        )


def find_modes(name: str, problem: Problem, chains: int, prior: Prior | None, warm_up: float) -> tuple[Tensor, float]:
    """(C, P): where chains start, found by Adam with the same prior; and the seconds it took."""
    init = "fresh" if chains > 1 else "given"
    task = task_of(
        problem, f"{name}-mode", training=shortened(problem.training, warm_up or 1.0), init=init, prior=prior
    )
    if warm_up == 0:
        models = [task.model(member) for member in range(chains)]
        return torch.stack([Layout.of(m).pack(dict(m.named_parameters())) for m in models]), 0.0
    _, result = run(task, chains, problem)
    averages = [buffer for buffer in buffers_of(result) if "running" in buffer]
    if averages:
        raise ValueError(
            f"{name} needs a model without running averages, which make its target ill-defined; "
            f"this one has {averages[0]!r}. Freeze them or use LayerNorm."
        )
    return result["theta"], result["seconds"].sum().item()


def spread_rows(model: nn.Module, base: Tensor, draws: Tensor, subset: str) -> Tensor:
    """(C, S, P): draws of a subset (C, S, Q) put into the full weights (C, P) of their chain."""
    if subset == "*":
        return draws
    inner = Layout.of(model)
    full = Layout.of(copy.deepcopy(model).requires_grad_(True))
    rows = base.unsqueeze(1).expand(-1, draws.shape[1], -1).clone()
    places = full.views(rows)
    for name, value in inner.views(draws).items():
        places[name].copy_(value)
    return rows


@dataclass(frozen=True)
class Sgld(_Chains):
    """Stochastic gradient Langevin dynamics."""

    def transform(self, log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule) -> Transform:
        """SGLD."""
        return sgld.build(log_joint, lr, temperature)


@dataclass(frozen=True)
class Psgld(_Chains):
    """Langevin dynamics preconditioned by the size of the gradients."""

    lr: float = 1e-5
    """step size, in units of the preconditioner"""

    freeze: int = 100
    """steps after which the preconditioner stays as it is, so that the chain has a stationary law"""

    def transform(self, log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule) -> Transform:
        """Preconditioned SGLD."""
        return psgld.build(log_joint, lr, temperature, freeze=self.freeze)


@dataclass(frozen=True)
class Sghmc(_Chains):
    """Stochastic gradient Hamiltonian Monte Carlo: Langevin dynamics with momentum."""

    lr: float = 1e-2
    """step size"""
    friction: float = 10.0
    """how fast momentum is forgotten"""

    def transform(self, log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule) -> Transform:
        """SGHMC."""
        return sghmc.build(log_joint, lr, temperature, self.friction)


@dataclass(frozen=True)
class Sgnht(_Chains):
    """Nosé-Hoover thermostat: friction adapts to the noise of the gradients."""

    lr: float = 1e-2
    """step size"""
    friction: float = 10.0
    """friction to start from"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cycles or self.temperature == 0:
            raise ValueError(
                "sgnht needs a temperature above 0 throughout, for its friction only grows at 0; "
                f"got temperature={self.temperature}, cycles={self.cycles}."
            )

    def transform(self, log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule) -> Transform:
        """SGNHT."""
        return sgnht.build(log_joint, lr, temperature, self.friction)


@dataclass(frozen=True)
class Baoab(_Chains):
    """Underdamped Langevin dynamics, split so that its variance is exact on a Gaussian."""

    lr: float = 1e-2
    """step size"""
    friction: float = 10.0
    """how fast momentum is forgotten"""

    def transform(self, log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule) -> Transform:
        """BAOAB."""
        return baoab.build(log_joint, lr, temperature, self.friction)
