"""Chains of one method on one problem: modes, coordinates, the stage that samples, and the checks after it."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesformer.core.doubts import Doubt, recorded, warn_of
from bayesformer.core.memory import room_for
from bayesformer.core.types import LogJoint, Transform
from bayesformer.inference import schedules, whitened
from bayesformer.inference.affine import Root
from bayesformer.inference.schedules import Schedule
from bayesformer.methods import langevin_checks
from bayesformer.methods.pace import MOST_EPOCHS, Pace
from bayesformer.posterior import Posterior
from bayesformer.predict.self_check import of_output_worth, worth_of_outputs
from bayesformer.train.collect import Collect
from bayesformer.train.coordinates import (
    FEW,
    Coordinates,
    at_joint_mode,
    centred,
    determined_shares,
    find_coordinates,
    polished,
)
from bayesformer.train.full_batch import FullBatch
from bayesformer.train.members import BuildTransform, Fitted, Stage, facts_of, fit_stage
from bayesformer.train.mode_doubts import of_mode
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import (
    Modes,
    SubsetStage,
    find_modes,
    is_proper,
    posterior_of,
    shortened,
    subset_stage,
    vector_prior,
)
from bayesformer.train.training import Training
from bayesformer.train.vector_prior import FlatPrior

if TYPE_CHECKING:
    from bayesformer.methods.sampling import Chains

EXPLORATION = 0.8  # share of a cycle spent moving without noise
KEPT = 100  # draws in all, where nothing is said
DELAY = 0.1  # b of decaying steps, as a share of all steps
NETWORK_EPOCHS = 5  # times the training's, for weights that start fresh
EXAMPLES = 32  # training inputs at which the outputs of draws are looked at, and as many off the data
CHAIN_TOO_SHORT = ("length", "slow directions", "effective draws", "regime")  # doubts that say so already
MODE_SHARE = 0.5  # of the training, for the mode of the weights outside a subset, with warm_up=0
log = logging.getLogger("bayesformer")


@dataclass(frozen=True)
class ChainRun:
    """What the recipes of samplers need: found once, when it is asked for."""

    method: Chains
    prototype: Prototype
    count: int | None = None
    """chains, where a recipe decides how many"""
    earlier: ChainRun | None = None
    """the run before its chains were counted, whose findings are kept"""

    @property
    def name(self) -> str:
        """The method's name, which its checkpoints have."""
        return type(self.method).__name__.lower()

    @property
    def problem(self) -> Problem:
        """The problem that the chains are to sample."""
        return self.prototype.problem

    @cached_property
    def chains(self) -> int:
        """How many chains run; auto is one, unless a recipe decides."""
        if self.count is not None:
            return self.count
        return 1 if self.method.chains == "auto" else self.method.chains

    @cached_property
    def fresh(self) -> bool:
        """Whether weights start anew for every chain: a function that builds models, or init="fresh"."""
        return not isinstance(self.problem.model, nn.Module) or self.problem.init == "fresh"

    @cached_property
    def is_plain(self) -> bool:
        """Whether a step size in the plain weights was given."""
        return self.method.lr != "auto"

    @cached_property
    def surely_network(self) -> bool:
        """Whether the regime is a network's before anything is trained: outputs not linear in more than 500 weights."""
        untrained = find_modes(self.prototype, self.name, self.method.prior, 0.0)
        part = subset_stage(self.prototype, untrained, self.method.subset)
        skeleton = self.prototype.skeleton if part.skeletons is None else part.skeletons[0]
        batch = FullBatch(self.prototype, skeleton, part.starts[0], FlatPrior())
        return not batch.is_objective or (batch.size > FEW and not batch.is_linear())

    @cached_property
    def modes(self) -> Modes:
        """The modes that training finds: one where all chains start from the same weights, else one per chain."""
        if self.method.warm_up is not None:
            share = self.method.warm_up or (MODE_SHARE if is_proper(self.prototype, self.method.subset) else 0.0)
            return find_modes(self.prototype, self.name, self.method.prior, share, self.chains)
        if self.chains > 1 and self._starts_differ():
            return self._found(self.chains)
        known: Modes | None = vars(self.earlier).get("modes") if self.earlier is not None else None
        return (known or self._found(1)).repeated(self.chains)

    def _found(self, count: int) -> Modes:
        """Modes of all of the training, weights outside the subset included."""
        modes = find_modes(self.prototype, self.name, self.method.prior, 1.0, count)
        return at_joint_mode(self.prototype, modes, self.method.subset, self.method.prior)

    @property
    def trainings(self) -> list[Fitted]:
        """The searches for a mode that were made so far."""
        known = [vars(run)["modes"] for run in (self, self.earlier) if run is not None and "modes" in vars(run)]
        return [modes.stage for modes in known[:1] if modes.stage is not None]

    def _starts_differ(self) -> bool:
        first = self.prototype.start(0).theta
        return any(not torch.equal(self.prototype.start(chain).theta, first) for chain in range(1, self.chains))

    @cached_property
    def part(self) -> SubsetStage:
        """The inferred weights around the modes."""
        return subset_stage(self.prototype, self.modes, self.method.subset)

    @cached_property
    def coordinates(self) -> Coordinates:
        """Around the mode of the first chain."""
        method = self.method
        return find_coordinates(self.part, method.prior, kind=method.METRIC, dense_up_to=method.DENSE_UP_TO)

    @cached_property
    def per_epoch(self) -> float:
        """How many steps one epoch has, N/n rounded up."""
        return float(Stage(self.prototype, self.name, replace(self.problem.training, epochs=1, max_steps=None)).steps)

    def sampling(self, epochs: int) -> Training:
        """The training settings of the sampling, with these epochs for each chain."""
        return replace(self.problem.training, epochs=max(1, epochs))

    def steps(self, epochs: int) -> int:
        """Steps of a chain in these epochs."""
        return self.sampling(epochs).steps(round(self.per_epoch))

    def epochs_per_chain(self, recipe: int) -> int:
        """Epochs of each chain: as given, as the rest of the training, or as a recipe has them over all chains."""
        method = self.method
        if method.warm_up is not None:
            share = method.warm_up or (MODE_SHARE if is_proper(self.prototype, method.subset) else 0.0)
            return shortened(self.problem.training, 1 - share).epochs
        if method.epochs != "auto":
            return max(1, round(method.epochs / self.chains))
        fits = 1 if method.draws == "auto" else self._epochs_for(method.draws)
        return max(round(recipe / self.chains), fits, 1)

    def _epochs_for(self, draws: int) -> int:
        """Epochs in which this many draws fit after the burn-in, one step apart."""
        return math.ceil(draws / ((1 - self.method.burn_in) * self.per_epoch))

    def check(self) -> None:
        """Refuse what would only fail after the mode is found: draws that fit in no number of steps, a wrong subset."""
        is_proper(self.prototype, self.method.subset)
        if self.method.draws != "auto":
            most = max(MOST_EPOCHS, NETWORK_EPOCHS * self.problem.training.epochs)
            self.collect(self.steps(self.epochs_per_chain(most)))

    def draws(self, steps: int) -> int:
        """How many states are kept of a chain of this many steps."""
        if self.method.draws != "auto":
            return self.method.draws
        wanted = -(-KEPT // self.chains)
        room = room_for(self.prototype.space.size * self.prototype.space.dtype.itemsize, self.prototype.skeleton.device)
        each = max(1, room // self.chains)
        if each < wanted:
            log.warning("%s keeps %d draws of each chain instead of %d: more would not fit in the memory set aside "
                        "for them", self.name, each, wanted)  # fmt: skip
        left = steps - round(self.method.burn_in * steps)
        if self.method.cycles:
            left = int(steps * (1 - EXPLORATION)) - self.method.cycles
        return max(1, min(wanted, each, left))

    def collect(self, steps: int) -> Collect:
        """The states that are kept of a chain of this many steps."""
        method, count = self.method, self.draws(steps)
        if method.cycles:
            return Collect.cyclical(steps, method.cycles, count, EXPLORATION)
        burn_in = round(method.burn_in * steps)
        if method.decay:
            falling = decaying(1.0, method.decay, steps)
            times = falling(torch.arange(1, steps + 1, dtype=torch.float64, device="cpu")).tolist()
            return Collect.by_time(times, burn_in, count)
        return Collect.spread(steps, burn_in, count)

    def stage(self, part: SubsetStage, training: Training, build: BuildTransform) -> Stage:
        """The stage of the fit in which the chains run."""
        return Stage(
            self.prototype,
            self.name,
            training,
            build=build,
            prior=vector_prior(self.prototype, self.method.prior, part.space),
            starts=part.starts,
            skeletons=part.skeletons,
            collect=self.collect,
            replacement=self.method.REPLACEMENT and self.method.warm_up is None,
            identity={"settings": repr(self.method)},
        )

    def posterior(self, part: SubsetStage, fitted: Fitted, doubts: list[Doubt], **more: Any) -> Posterior:
        """The draws as a posterior, with what is known of their making."""
        stages = [fitted] if self.modes.stage is None else [self.modes.stage, fitted]
        facts = facts_of(self.name, self.method, self.prototype, *stages)
        facts |= {"chains": self.chains, "starts": self._starts(), **more}
        made = posterior_of(self.prototype, part.samples(fitted), facts)
        worth, told = self._worth_of_outputs(made, fitted), any(doubt.check in CHAIN_TOO_SHORT for doubt in doubts)
        doubts = doubts if told else doubts + of_output_worth(worth)
        return posterior_of(self.prototype, made.law, facts | worth | recorded(doubts))

    def _worth_of_outputs(self, made: Posterior, fitted: Fitted) -> dict[str, float]:
        """What the draws of each chain are worth for the outputs, if they are enough to tell."""
        method, draws = self.method, fitted.draws
        if draws is None or draws.shape[1] < langevin_checks.ENOUGH or method.temperature == 0 or method.cycles:
            return {}
        return worth_of_outputs(made, self.prototype.data.first(EXAMPLES).inputs, self.chains)

    def _starts(self) -> str:
        if self.chains == 1 or self.fresh or self._starts_differ():
            return "one per chain"
        return "one for all chains, which therefore cannot see other modes"


def fit_chains(method: Chains, problem: Problem) -> Posterior:
    """Samples of the posterior by a method's recipe for the regime that the problem is in."""
    run = ChainRun(method, Prototype(problem))
    run.check()
    if run.is_plain:
        return plain_chains(run)
    if run.fresh and run.surely_network:  # a mode is no start that the recipe for networks would use
        return method.fit_network(run)
    if run.coordinates.regime == "network":
        return method.fit_network(run)
    return whitened_chains(run, run.coordinates)


def plain_chains(run: ChainRun) -> Posterior:
    """Chains in the weights themselves, with the step size and friction that were given."""
    method, part, decrement = run.method, run.part, None
    if method.warm_up is None:
        part, decrement = polished(part, method.prior)
    recipe = network_epochs(run) if run.surely_network else MOST_EPOCHS // 2
    training = run.sampling(run.epochs_per_chain(recipe))
    if method.warm_up is not None:
        training = shortened(run.problem.training, training.epochs / run.problem.training.epochs)
    fitted = fit_stage(run.stage(part, training, PlainBuild(method)), run.chains)
    more = {} if decrement is None else {"decrement": decrement}
    doubts = of_mode(decrement) + langevin_checks.of_cycles(run) + langevin_checks.of_draws(run, fitted)
    return run.posterior(part, fitted, doubts, **more)


def network_epochs(run: ChainRun) -> int:
    """Epochs over all chains in a network's regime: five times the training's for fresh weights, else once."""
    return run.problem.training.epochs * (NETWORK_EPOCHS if run.fresh else 1)


def network_chains(run: ChainRun) -> Posterior:
    """Chains in the prior's scale, stable and slow: honest about how little they explore."""
    found = run.coordinates
    return whitened_chains(run, found, network_epochs(run))


def whitened_chains(run: ChainRun, found: Coordinates, recipe: int | None = None) -> Posterior:
    """Chains in coordinates, all with the W of the first mode, each around its own."""
    method, part = run.method, run.part
    if run.modes.distinct:
        others = [polished(part, method.prior, chain)[0].starts[chain] for chain in range(1, run.chains)]
        part = replace(part, starts=[centred(part, [found]).starts[0], *others])
    else:
        part = centred(part, [found])
    pace = method.pace(found, run.per_epoch)
    friction: Any = getattr(method, "friction", "auto")
    if friction != "auto":
        pace = replace(pace, friction=friction * math.sqrt(run.problem.num_data))
    training = run.sampling(run.epochs_per_chain(pace.epochs if recipe is None else recipe))
    training = training.evened(run.problem.num_data)
    before = langevin_checks.before(run, found, pace, training.epochs) + langevin_checks.of_thermostat(run, found, pace)
    warn_of(before)
    shares = determined_shares(found)
    fitted = fit_stage(run.stage(part, training, WhitenedBuild(method, found.root, pace, shares)), run.chains)
    doubts = of_mode(found.decrement) + before + langevin_checks.of_draws(run, fitted, pace)
    made = {"step": pace.step, "friction": pace.friction, "time_per_epoch": pace.time, "epochs": training.epochs}
    heat, limit = langevin_checks.judged_temperature(run, part, fitted, found.root, shares)
    doubts += langevin_checks.of_temperature(heat, limit)
    return run.posterior(part, fitted, doubts, coordinates={**found.facts, **made, "temperature": heat})


def decaying(lr: float, gamma: float, steps: int) -> Schedule:
    """Steps a (b + t)^-γ that begin at `lr`, b a tenth of all steps."""
    b = max(1.0, DELAY * steps)
    return schedules.robbins_monro(lr * b**gamma, b, gamma)


def scheduled(method: Chains, lr: float, num_data: int, steps: int) -> tuple[float | Schedule, float | Schedule]:
    """Step size and temperature / N: constant, falling or in cycles."""
    temperature = method.temperature / num_data
    if method.decay:
        return decaying(lr, method.decay, steps), temperature
    if not method.cycles:
        return lr, temperature
    return (
        schedules.cyclical_lr(lr, method.cycles, steps),
        schedules.cyclical_temperature(temperature, method.cycles, steps, EXPLORATION),
    )


@dataclass(frozen=True)
class PlainBuild:
    """Builds the sampler of plain weights for one chain, or for several in rows."""

    method: Chains

    def __call__(self, log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:  # noqa: ARG002
        """The sampler with the step size and friction that were given."""
        method = self.method
        assert method.lr != "auto"
        friction = getattr(method, "friction", None)
        lr, temperature = scheduled(method, method.lr, num_data, steps)
        return method.plain(log_joint, lr, temperature, method.PLAIN_FRICTION if friction == "auto" else friction)


@dataclass(frozen=True)
class WhitenedBuild:
    """Builds the sampler in coordinates for one chain, or for several in rows."""

    method: Chains
    root: Root
    pace: Pace
    shares: Tensor | None
    """how much each axis counts in the temperature"""

    def __call__(self, log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:  # noqa: ARG002
        """The sampler in φ, seen from θ."""
        step, friction = self.pace.units(num_data)
        lr, temperature = scheduled(self.method, step, num_data, steps)
        make = partial(self.method.transform, lr=lr, temperature=temperature, friction=friction)
        return whitened.build(log_joint, self.root, make, round(self.method.burn_in * steps), self.shares)
