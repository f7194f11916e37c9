"""Markov chains with stochastic gradients: find the mode, measure the curvature there, then sample in its units."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from bayesformer.core.rules import (
    above,
    at_least,
    between_inclusive,
    check_ranges,
    either,
    nothing,
    one_of,
    whole,
    within,
)
from bayesformer.core.settings import LATER
from bayesformer.core.types import LogJoint, Transform
from bayesformer.inference import baoab, psgld, sghmc, sgld, sgnht
from bayesformer.inference.schedules import Schedule
from bayesformer.methods.chain_run import ChainRun, fit_chains, network_chains
from bayesformer.methods.network_chains import fit_network_chains, why_not
from bayesformer.methods.pace import Pace, langevin_pace, momentum_pace, preconditioned_pace, thermostat_pace
from bayesformer.posterior import Posterior
from bayesformer.priors.setting import PriorSetting, prior_of
from bayesformer.train.coordinates import DENSE, FEW, Coordinates, Kind
from bayesformer.train.problem import Problem

Auto = Literal["auto"]
AUTO = one_of(("auto",))
log = logging.getLogger("bayesformer")


@dataclass(frozen=True)
class Chains(ABC):
    """Settings that all samplers share.

    By default `training` is the search for a mode. Chains start there, in coordinates in which the posterior is round
    (`train.coordinates`), with step size and friction that follow from the largest curvature in them and from N. A
    number given for `lr` is a step size in the plain weights instead.
    """

    chains: int | Auto = "auto"
    """independent chains; auto is one, or in networks up to four; several with one draw each are an ensemble"""
    draws: int | Auto = "auto"
    """states kept of each chain, evenly spaced after the burn-in; auto keeps 100 in all, or what fits in memory"""
    lr: float | Auto = "auto"
    """step size in the weights; auto derives one, in units of the posterior's standard deviation"""
    temperature: float = 1.0
    """of the posterior: 1 is Bayes, below 1 is cold, 0 is optimisation; the library divides by N"""
    prior: PriorSetting = "normal(0, 1)"
    """law of every weight, or a table of laws by name pattern"""
    warm_up: float | None = None
    """share of the training's epochs that search for the mode, the rest being the sampling; none gives the search all
    of them and the sampling `epochs` of its own"""
    burn_in: float = 0.2
    """share of the sampling that is thrown away"""
    cycles: int = 0
    """cosine cycles of the step size, with noise and draws at the end of each; 0 keeps it constant"""
    subset: str = "*"
    """name pattern of the weights to sample; the other learned ones are trained to the mode and stay there"""
    epochs: int | Auto = field(default="auto", metadata=LATER)
    """passes over the data of the sampling, over all chains; auto is at most 200 where the posterior is near a
    Gaussian, and in networks five times the training's for weights that start fresh, once for given ones"""
    decay: float = field(default=0.0, metadata=LATER)
    """exponent γ of steps that fall as (b + t)^-γ, with b a tenth of all steps; 0 keeps them constant"""

    METRIC: ClassVar[Kind | Auto] = "auto"
    """the coordinates that auto means"""
    DENSE_UP_TO: ClassVar[int] = FEW
    """weights up to which they are dense"""
    REPLACEMENT: ClassVar[bool] = False
    """whether batches are drawn with replacement"""
    PLAIN_FRICTION: ClassVar[float] = 10.0
    """friction in the plain weights where only lr is given"""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            chains=either(whole(1), AUTO),
            draws=either(whole(1), AUTO),
            lr=either(above(0, finite=True), AUTO),
            temperature=at_least(0),
            warm_up=either(within(0, 1), nothing()),
            burn_in=within(0, 1),
            cycles=whole(0),
            epochs=either(whole(1), AUTO),
            decay=between_inclusive(0, 1),
        )
        prior_of(self.prior)
        owner = type(self).__name__.lower()
        if self.warm_up is not None and self.epochs != "auto":
            raise ValueError(
                f"{owner}.epochs must be left at 'auto' with a warm_up, which gives the sampling the rest of the "
                f"training's epochs; got {self.epochs} with warm_up={self.warm_up}."
            )
        if self.cycles and self.decay:
            raise ValueError(f"{owner}.decay must be 0 with cycles; got {self.decay} with cycles={self.cycles}.")

    @abstractmethod
    def transform(
        self, log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule, friction: float | None
    ) -> Transform:
        """The transform of the sampler with this step size, temperature / N and, where it has one, friction."""

    @abstractmethod
    def pace(self, found: Coordinates, per_epoch: float) -> Pace:
        """Time step, friction and length in coordinates, at this many steps per epoch."""

    def plain(
        self, log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule, friction: float | None
    ) -> Transform:
        """The transform in the plain weights, where the step size is given."""
        return self.transform(log_joint, lr, temperature, friction)

    def fit(self, problem: Problem) -> Posterior:
        """Find a mode, or one per start, then sample around it."""
        return fit_chains(self, problem)

    def fit_network(self, run: ChainRun) -> Posterior:
        """The chains where the posterior is not near a Gaussian: in the prior's scale, with steps that stay stable."""
        return network_chains(run)


@dataclass(frozen=True)
class Sgld(Chains):
    """Stochastic gradient Langevin dynamics."""

    DENSE_UP_TO: ClassVar[int] = DENSE

    def transform(
        self,
        log_joint: LogJoint,
        lr: float | Schedule,
        temperature: float | Schedule,
        friction: float | None,  # noqa: ARG002
    ) -> Transform:
        """The SGLD transform (inference.sgld.build) with this step size and temperature / N."""
        return sgld.build(log_joint, lr, temperature)

    def pace(self, found: Coordinates, per_epoch: float) -> Pace:
        """Half a unit of time per epoch: more would heat by the noise of the batches."""
        return langevin_pace(found, per_epoch, self.temperature)


@dataclass(frozen=True)
class Psgld(Chains):
    """Langevin dynamics with one scale per weight: from the curvature, or with an lr from the size of the gradients."""

    freeze: int = 100
    """steps after which a preconditioner from gradients stays as it is, so that the chain has a stationary law"""

    METRIC: ClassVar[Kind | Auto] = "diag"

    def transform(
        self,
        log_joint: LogJoint,
        lr: float | Schedule,
        temperature: float | Schedule,
        friction: float | None,  # noqa: ARG002
    ) -> Transform:
        """SGLD (inference.sgld.build): its coordinates are the preconditioner."""
        return sgld.build(log_joint, lr, temperature)

    def plain(
        self,
        log_joint: LogJoint,
        lr: float | Schedule,
        temperature: float | Schedule,
        friction: float | None,  # noqa: ARG002
    ) -> Transform:
        """The pSGLD transform (inference.psgld.build), preconditioned by RMSprop's average, with this step size."""
        return psgld.build(log_joint, lr, temperature, freeze=self.freeze)

    def pace(self, found: Coordinates, per_epoch: float) -> Pace:
        """As far as the stiffest direction allows, for longer than SGLD."""
        return preconditioned_pace(found, per_epoch, self.temperature)


@dataclass(frozen=True)
class Momenta(Chains):
    """Samplers with momenta and therefore with friction."""

    friction: float | Auto = "auto"
    """how fast momentum is forgotten, in the units of `lr`; auto is one e-folding per unit of time, or .3"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, friction=either(above(0, finite=True), AUTO))

    def pace(self, found: Coordinates, per_epoch: float) -> Pace:
        """One unit of time per epoch in round coordinates."""
        return momentum_pace(found, per_epoch, self.temperature)


@dataclass(frozen=True)
class Underdamped(Momenta):
    """Samplers that have a recipe for networks (`methods.network_chains`), and share it."""

    def fit_network(self, run: ChainRun) -> Posterior:
        """Chains with variance reduced gradients and friction along stiff directions, where they are possible."""
        reason = why_not(run)
        if reason is None:
            return fit_network_chains(run)
        log.info("%s samples this network by plain batches: %s", run.name, reason)
        return network_chains(run)


@dataclass(frozen=True)
class Sghmc(Underdamped):
    """Stochastic gradient Hamiltonian Monte Carlo: Langevin dynamics with momentum."""

    def transform(
        self, log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule, friction: float | None
    ) -> Transform:
        """The SGHMC transform (inference.sghmc.build) with this step size, temperature / N and friction."""
        assert friction is not None
        return sghmc.build(log_joint, lr, temperature, friction)


@dataclass(frozen=True)
class Sgnht(Momenta):
    """Nosé-Hoover thermostat: friction adapts to the noise of the gradients."""

    DENSE_UP_TO: ClassVar[int] = DENSE
    REPLACEMENT: ClassVar[bool] = True  # its thermostat takes batch noise for white noise

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cycles or self.temperature == 0:
            raise ValueError(
                "sgnht needs a temperature above 0 throughout, for its friction only grows at 0; "
                f"got temperature={self.temperature}, cycles={self.cycles}."
            )

    def transform(
        self, log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule, friction: float | None
    ) -> Transform:
        """The SGNHT transform (inference.sgnht.build) with this step size, temperature / N and first friction."""
        assert friction is not None
        return sgnht.build(log_joint, lr, temperature, friction)

    def pace(self, found: Coordinates, per_epoch: float) -> Pace:
        """Slow, with much friction of its own: its one thermostat must not cool directions without batch noise."""
        return thermostat_pace(found, per_epoch, self.temperature)


@dataclass(frozen=True)
class Baoab(Underdamped):
    """Underdamped Langevin dynamics, split so that its variance is exact on a Gaussian."""

    def transform(
        self, log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule, friction: float | None
    ) -> Transform:
        """The BAOAB transform (inference.baoab.build) with this step size, temperature / N and friction."""
        assert friction is not None
        return baoab.build(log_joint, lr, temperature, friction)
