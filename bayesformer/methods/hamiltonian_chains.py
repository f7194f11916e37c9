"""Hamiltonian chains with gradients of all data: slow, and exact up to Monte Carlo error once they have converged."""

from __future__ import annotations

import logging
import math
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from bayesformer.core.doubts import recorded
from bayesformer.core.rules import above, between, check_ranges, either, one_of, whole
from bayesformer.core.strategy import memory_of
from bayesformer.core.types import Batch, LogJoint, Params, Transform
from bayesformer.data.all_data import WholeData
from bayesformer.data.inputs import map_inputs
from bayesformer.data.mapped import Mapped
from bayesformer.inference import hmc, nuts
from bayesformer.inference.mass_matrix import Metric
from bayesformer.laws import Samples
from bayesformer.layers import has_random_parts
from bayesformer.layers.preparation import Preparation
from bayesformer.methods.chain_checks import EXAMPLES, ChainRecord, examine, output_traces
from bayesformer.posterior import Posterior
from bayesformer.priors.setting import PriorSetting, prior_of
from bayesformer.train.collect import Collect
from bayesformer.train.coordinates import at_joint_mode
from bayesformer.train.members import Stage, facts_of, fit_stage
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import Modes, find_modes, posterior_of, subset_stage, vector_prior
from bayesformer.train.training import Training

DENSE = 256  # weights up to which metric="auto" is dense
MATRICES = 4  # of P by P numbers that a dense metric has in memory
SHARE_OF_MEMORY = 0.25  # for them
LARGEST = {"cpu": 2**20}  # numbers in the largest tensor of a pass on one chunk of the data, where it is not asked for
LARGEST_ELSEWHERE = 2**24
log = logging.getLogger("bayesformer")


@dataclass(frozen=True)
class HamiltonianChains(ABC):
    """Settings that Hmc and Nuts share."""

    chains: int = 4
    """independent chains; their agreement is checked"""
    draws: int = 250
    """states kept of each chain after the warm-up"""
    thin: int = 2
    """transitions per state that is kept"""
    warm_up: int = 1000
    """transitions that adapt step size and mass matrix, and are thrown away"""
    metric: Literal["auto", "diagonal", "dense"] = "auto"
    """mass matrix: "dense" sees correlations of weights, P² numbers; "auto" is dense up to 256 weights"""
    target: float = 0.8
    """mean acceptance that the step size is adapted to; nearer 1 are smaller steps, for narrow posteriors"""
    start: Literal["mode", "given"] = "mode"
    """where chains start: at the mode that `training` finds, or at the weights given"""
    temperature: float = 1.0
    """of the posterior: 1 is Bayes, below 1 is cold; the library divides by N"""
    prior: PriorSetting = "normal(0, 1)"
    """law of every weight, or a table of laws by name pattern"""
    precision: Literal["float32", "float64"] = "float32"
    """of the dynamics; float64 computes with a copy of the model in it, for sharp posteriors or many data"""
    chunk: int | Literal["auto"] = "auto"
    """examples per pass, for memory's sake; a gradient always is the sum over all data"""
    batch_size: int | None = None
    """not for these methods: their gradients are of all data. A number below N is refused"""
    subset: str = "*"
    """name pattern of the weights to sample; the other learned ones are trained to the mode and stay there"""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            chains=whole(1),
            draws=whole(1),
            thin=whole(1),
            warm_up=whole(0),
            metric=one_of(("auto", "diagonal", "dense")),
            target=between(0, 1),
            start=one_of(("mode", "given")),
            temperature=above(0, finite=True),
            precision=one_of(("float32", "float64")),
            chunk=either(one_of(("auto",)), whole(1)),
        )
        if self.batch_size is not None:
            check_ranges(self, batch_size=whole(1))
        prior_of(self.prior)

    @property
    def transitions(self) -> int:
        """Transitions of a chain in all."""
        return self.warm_up + self.draws * self.thin

    @property
    @abstractmethod
    def longest(self) -> int:
        """Leapfrogs of a trajectory that was cut because it was as long as it may be."""

    @abstractmethod
    def transform(self, log_joint: LogJoint, temperature: float, metric: Metric) -> Transform:
        """The transform of the sampler at temperature / N with this kind of mass matrix."""

    def collect(self, steps: int) -> Collect:
        """The steps of a chain of `steps` transitions after which its state is kept as a draw.

        They are `draws` evenly spaced steps after the warm-up, the last one at the end of the chain.
        """
        return Collect.spread(steps, self.warm_up, self.draws)

    def fit(self, problem: Problem) -> Posterior:
        """Find a mode per chain where asked for, then sample with gradients of all data."""
        name = type(self).__name__.lower()
        prototype = Prototype(problem, evaluation=True)
        self.check(prototype)
        metric = self.metric_for(prototype.space.select(self.subset).size, prototype)
        modes = find_modes(prototype, name, self.prior, float(self.start == "mode"), self.chains)
        modes = at_joint_mode(prototype, modes, self.subset, self.prior)
        wide = widened(prototype, modes) if self.precision == "float64" else prototype
        part = subset_stage(wide, replace(modes, theta=modes.theta.to(wide.space.dtype)), self.subset)
        stage = Stage(
            wide,
            name,
            replace(
                problem.training, epochs=self.transitions, max_steps=None, evaluate_every=None, precision="float32"
            ),
            build=_Build(self, metric),
            collect=self.collect,
            prior=vector_prior(wide, self.prior, part.space),
            starts=part.starts,
            skeletons=part.skeletons,
            identity={"settings": repr(self), "metric": metric},
        )
        fitted = fit_stage(replace(stage, chunk=self.chunk_for(stage)), self.chains)
        stages = [fitted] if modes.stage is None else [modes.stage, fitted]
        facts = facts_of(name, self, prototype, *stages) | {"chains": self.chains, "metric": metric}
        posterior = posterior_of(prototype, narrowed(part.samples(fitted), prototype), facts)
        record = ChainRecord.of(fitted.histories, self.warm_up, self.longest)
        outputs = output_traces(posterior, prototype.data.first(EXAMPLES).inputs, self.chains)
        found, doubts = examine(record, outputs)
        return replace(posterior, facts={**facts, "diagnostics": found, **recorded(doubts)})

    def check(self, prototype: Prototype) -> None:
        """Refuse, before work begins, what has no log joint that is one function of the weights."""
        name, problem = type(self).__name__.lower(), prototype.problem
        count = problem.num_data
        if self.batch_size is not None and self.batch_size < count:
            raise ValueError(
                f"{name}.batch_size must be left out: with gradients of {self.batch_size} of {count} examples the "
                "acceptance test is wrong and the chain has another law. Use chunk for memory's sake, or Sghmc or "
                "Baoab, which are made for batches."
            )
        WholeData(prototype.data, 1)  # refuses a stream that can be read once only
        if prototype.data.is_random:
            raise ValueError(
                f"{name} needs a log joint that stays the same; reading {prototype.data.name} draws random numbers, as "
                "augmentation and some samplers do, and every reading has another one. Give data without augmentation, "
                "the dataset without its sampler, or use Sghmc."
            )
        if has_random_parts(prototype.prepared):
            raise ValueError(
                f"{name} needs a model whose outputs are a function of its weights; this one has stochastic attention "
                "or random layers. Use Combined(weights='sghmc'), or the plain model."
            )
        moved = [n for n in prototype.probed.buffers_changed if n.rpartition(".")[0] not in prototype.held_by_default]
        if moved:
            raise ValueError(
                f"{name} needs a log joint that stays the same; training passes of this model change buffers "
                f"({moved[0]}), as BatchNorm in training mode does. Hold them with Training(buffers='fixed')."
            )
        if prototype.randomness.kind != "none":
            drawn = ", ".join(prototype.randomness.functions) or "numbers"
            raise ValueError(f"{name} needs a model that is deterministic in evaluation mode; this one draws {drawn}.")
        if self.precision == "float64" and problem.prior is not None:
            raise ValueError("precision must be 'float32' where prior is an earlier posterior; got 'float64'.")
        if prototype.noisy_in_training:
            log.warning("%s: dropout is switched off, since the log joint must be one function of the weights", name)

    def metric_for(self, size: int, prototype: Prototype) -> Metric:
        """The kind of mass matrix for P weights; a dense one that does not fit memory is said, and not used."""
        if self.metric != "dense":
            return "dense" if self.metric == "auto" and size <= DENSE else "diagonal"
        wanted = MATRICES * size**2 * torch.finfo(getattr(torch, self.precision)).bits // 8
        there = memory_of(prototype.skeleton.device) or _physical_memory()
        if wanted <= SHARE_OF_MEMORY * there:
            return "dense"
        log.warning(
            "%s: a dense metric of %d weights takes %.1f GiB, more than a quarter of %.1f GiB; a diagonal is used",
            type(self).__name__.lower(),
            size,
            wanted / 2**30,
            there / 2**30,
        )
        return "diagonal"

    def chunk_for(self, stage: Stage) -> int:
        """Examples per pass: as asked for, or as many as keep the largest tensor of a pass small."""
        if self.chunk != "auto":
            return self.chunk
        most = LARGEST.get(stage.device.type, LARGEST_ELSEWHERE)
        each = max(1, stage.largest() // stage.training.batch_size)
        return min(stage.problem.num_data, max(stage.training.batch_size, most // each))


@dataclass(frozen=True)
class _Build:
    """How the chains of a stage are made: see `train.members.BuildTransform`."""

    method: HamiltonianChains
    metric: Metric

    def __call__(self, log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:  # noqa: ARG002
        return self.method.transform(log_joint, self.method.temperature / num_data, self.metric)


def widened(prototype: Prototype, modes: Modes) -> Prototype:
    """A copy of the model and its data in float64, with the weights of the first chain."""
    if prototype.space.dtype == torch.float64:
        return prototype
    model = prototype.skeleton.plain(modes.theta[0], modes.start(0).buffers).double()
    problem = replace(
        prototype.problem,
        model=model,
        likelihood=prototype.likelihood,
        data=Mapped(prototype.data, double_batch),
        infer=prototype.space.names,
        init="given",
        head=None,
        validation=None,
        preparation=Preparation(),
    )
    try:
        return Prototype(problem, evaluation=True)
    except RuntimeError as error:
        raise ValueError(
            f"precision must be 'float32' for this model, which does not run in float64 ({error}); got 'float64'."
        ) from error


def double_batch(batch: Batch) -> Batch:
    """The batch with real numbers in float64; whole numbers and masks as they are."""

    def wide(x: Tensor) -> Tensor:
        return x.double() if x.is_floating_point() else x

    return Batch(map_inputs(batch.inputs, wide), wide(batch.targets), batch.mask)


def narrowed(samples: Samples, prototype: Prototype) -> Samples:
    """Draws in the precision of the model's own space and buffers."""
    if samples.theta.dtype == prototype.space.dtype:
        return samples
    own: Params = prototype.start(0).buffers
    return Samples(
        samples.theta.to(prototype.space.dtype), {name: value.to(own[name]) for name, value in samples.buffers.items()}
    )


def _physical_memory() -> int:
    """Bytes of memory of this machine; as good as unlimited where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**62


@dataclass(frozen=True)
class Nuts(HamiltonianChains):
    """The No-U-Turn Sampler with gradients of all data: the posterior itself, for small models."""

    max_depth: int = 10
    """doublings of a trajectory, at most: 2^max_depth - 1 gradient evaluations per transition"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, max_depth=whole(1))

    @property
    def longest(self) -> int:
        """Leapfrogs of a trajectory of the largest depth."""
        return 2**self.max_depth - 1

    def transform(self, log_joint: LogJoint, temperature: float, metric: Metric) -> Transform:
        """The NUTS transform (inference.nuts.build) with these settings."""
        return nuts.build(
            log_joint,
            temperature,
            warm_up=self.warm_up,
            metric=metric,
            target=self.target,
            max_depth=self.max_depth,
        )


@dataclass(frozen=True)
class Hmc(HamiltonianChains):
    """Hamiltonian Monte Carlo with gradients of all data and trajectories of one length."""

    length: float = math.pi / 2
    """integration time of a trajectory; a quarter of a period, π/2, where the mass matrix is right"""
    max_leapfrogs: int = 1000
    """gradient evaluations per transition, at most"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, length=above(0, finite=True), max_leapfrogs=whole(1))

    @property
    def longest(self) -> int:
        """The most leapfrogs that a trajectory may have."""
        return self.max_leapfrogs

    def transform(self, log_joint: LogJoint, temperature: float, metric: Metric) -> Transform:
        """The HMC transform (inference.hmc.build) with these settings."""
        return hmc.build(
            log_joint,
            temperature,
            warm_up=self.warm_up,
            length=self.length,
            metric=metric,
            target=self.target,
            max_leapfrogs=self.max_leapfrogs,
        )
