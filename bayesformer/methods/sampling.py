"""Markov chains with stochastic gradients: optimise to a mode, then sample around it, in one or more chains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from bayesformer.core.rules import above, at_least, check_ranges, whole, within
from bayesformer.core.types import LogJoint, Transform
from bayesformer.inference import baoab, psgld, schedules, sghmc, sgld, sgnht
from bayesformer.inference.schedules import Schedule
from bayesformer.posterior import Posterior
from bayesformer.priors.setting import PriorSetting, prior_of
from bayesformer.train.collect import Collect
from bayesformer.train.members import Stage, facts_of, fit_stage
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import (
    find_modes,
    mode_share,
    posterior_of,
    shortened,
    subset_stage,
    vector_prior,
)
from bayesformer.train.training import Training

EXPLORATION = 0.8  # share of a cycle spent moving without noise


@dataclass(frozen=True)
class Chains(ABC):
    """Settings that all samplers share."""

    chains: int = 1
    """independent chains; several with one draw each are a Bayesian deep ensemble"""
    draws: int = 30
    """states kept of each chain, evenly spaced after the burn-in"""
    lr: float = 2e-4
    """step size"""
    temperature: float = 1.0
    """of the posterior: 1 is Bayes, below 1 is cold, 0 is optimisation; the library divides by N"""
    prior: PriorSetting = "normal(0, 1)"
    """law of every weight, or a table of laws by name pattern"""
    warm_up: float = 0.5
    """share of the epochs spent finding a mode with Adam before sampling starts"""
    burn_in: float = 0.2
    """share of the sampling that is thrown away"""
    cycles: int = 0
    """cosine cycles of the step size, with noise and draws at the end of each; 0 keeps it constant"""
    subset: str = "*"
    """name pattern of the weights to sample; the other learned ones are trained to the mode and stay there"""

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

    def collect(self, steps: int) -> Collect:
        """The states that are kept of a chain of this many steps."""
        if self.cycles:
            return Collect.cyclical(steps, self.cycles, self.draws, EXPLORATION)
        return Collect.spread(steps, round(self.burn_in * steps), self.draws)

    @abstractmethod
    def transform(self, log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule) -> Transform:
        """The transform of the sampler with this step size and temperature / N."""

    def fit(self, problem: Problem) -> Posterior:
        """Find a mode per chain, then sample."""
        name, prototype = type(self).__name__.lower(), Prototype(problem)
        share = mode_share(self, prototype)
        sampling = Stage(
            prototype,
            name,
            shortened(problem.training, 1 - share),
            build=self.build,
            collect=self.collect,
            identity={"settings": repr(self)},
        )
        self.collect(sampling.steps)  # refuses draws that do not fit before the mode is searched for
        modes = find_modes(prototype, name, self.prior, share, self.chains)
        part = subset_stage(prototype, modes, self.subset)
        sampling = replace(
            sampling,
            prior=vector_prior(prototype, self.prior, part.space),
            starts=part.starts,
            skeletons=part.skeletons,
        )
        fitted = fit_stage(sampling, self.chains)
        stages = [fitted] if modes.stage is None else [modes.stage, fitted]
        facts = facts_of(name, self, prototype, *stages) | {"chains": self.chains}
        return posterior_of(prototype, part.samples(fitted), facts)

    def build(self, log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:  # noqa: ARG002
        """The sampler of one chain, with constant or cyclical steps."""
        temperature = self.temperature / num_data
        if not self.cycles:
            return self.transform(log_joint, self.lr, temperature)
        return self.transform(
            log_joint,
            schedules.cyclical_lr(self.lr, self.cycles, steps),
            schedules.cyclical_temperature(temperature, self.cycles, steps, EXPLORATION),
        )


@dataclass(frozen=True)
class Sgld(Chains):
    """Stochastic gradient Langevin dynamics."""

    def transform(self, log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule) -> Transform:
        """The SGLD transform (inference.sgld.build) with this step size and temperature / N."""
        return sgld.build(log_joint, lr, temperature)


@dataclass(frozen=True)
class Psgld(Chains):
    """Langevin dynamics preconditioned by the size of the gradients."""

    lr: float = 1e-5
    """step size, in units of the preconditioner"""

    freeze: int = 100
    """steps after which the preconditioner stays as it is, so that the chain has a stationary law"""

    def transform(self, log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule) -> Transform:
        """The pSGLD transform (inference.psgld.build) with this step size and temperature / N."""
        return psgld.build(log_joint, lr, temperature, freeze=self.freeze)


@dataclass(frozen=True)
class Sghmc(Chains):
    """Stochastic gradient Hamiltonian Monte Carlo: Langevin dynamics with momentum."""

    lr: float = 1e-2
    """step size"""
    friction: float = 10.0
    """how fast momentum is forgotten"""

    def transform(self, log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule) -> Transform:
        """The SGHMC transform (inference.sghmc.build) with this step size and temperature / N."""
        return sghmc.build(log_joint, lr, temperature, self.friction)


@dataclass(frozen=True)
class Sgnht(Chains):
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
        """The SGNHT transform (inference.sgnht.build) with this step size and temperature / N."""
        return sgnht.build(log_joint, lr, temperature, self.friction)


@dataclass(frozen=True)
class Baoab(Chains):
    """Underdamped Langevin dynamics, split so that its variance is exact on a Gaussian."""

    lr: float = 1e-2
    """step size"""
    friction: float = 10.0
    """how fast momentum is forgotten"""

    def transform(self, log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule) -> Transform:
        """The BAOAB transform (inference.baoab.build) with this step size and temperature / N."""
        return baoab.build(log_joint, lr, temperature, self.friction)
