"""Methods whose posterior over weights is one Gaussian: Vi, Ivon, Swag, Ekf."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bayesformer.core.rules import above, at_least, between, check_ranges, finite, one_of, whole, within
from bayesformer.core.settings import LATER
from bayesformer.core.types import LogJoint, Transform
from bayesformer.inference import ekf_dense, ekf_diag, ivon, sgld, swag, vi_dense, vi_diag
from bayesformer.inference.ekf_common import Scores
from bayesformer.laws import GaussianLaw
from bayesformer.posterior import Posterior
from bayesformer.predict.ways import WAYS, Way
from bayesformer.priors.setting import PriorSetting, prior_of
from bayesformer.train.example_scores import scores_for
from bayesformer.train.members import Stage
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import earlier_law, fit_gaussian, mode_share, shortened
from bayesformer.train.training import Training

FEWEST_SNAPSHOTS = 2  # of swag: one alone has no deviation from its mean


@dataclass(frozen=True)
class Vi:
    """Variational inference: the Gaussian over weights that maximises the evidence lower bound."""

    kind: Literal["diag", "dense"] = "diag"
    """one standard deviation per weight, or a full covariance (at most a few thousand weights)"""
    temperature: float = 1.0
    """of the posterior: 1 is Bayes, below 1 is cold; the library divides by N"""
    prior: PriorSetting = "normal(0, 1)"
    """law of every weight, or a table of laws by name pattern"""
    log_sd: float = -5.0
    """logarithm of the standard deviations at the start"""
    samples: int = 1
    """draws per step"""
    draws: int = 30
    """draws per prediction"""
    predictive: Way = "sampled"
    """from weights to outputs: sampled, linearised, streamlined (for a few forward passes) or one_pass"""
    warm_up: float = 0.0
    """share of the epochs spent finding a mode with Adam first; with a subset at least half of them"""
    subset: str = "*"
    """name pattern of the weights that get a spread; the other learned ones are trained to the mode and stay there"""

    AFTER_TRAINING: ClassVar = ("draws", "predictive")

    def __post_init__(self) -> None:
        check_ranges(
            self,
            kind=one_of(("diag", "dense")),
            temperature=at_least(0),
            log_sd=finite(),
            samples=whole(1),
            draws=whole(1),
            predictive=one_of(WAYS),
            warm_up=within(0, 1),
        )
        prior_of(self.prior)

    def fit(self, problem: Problem) -> Posterior:
        """Ascend the evidence lower bound."""
        module = vi_diag if self.kind == "diag" else vi_dense
        return fit_gaussian(self, Prototype(problem), self.build, module.law, prior=self.prior)

    def build(self, log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:
        """The ascent, diagonal or dense."""
        module = vi_diag if self.kind == "diag" else vi_dense
        return module.build(
            log_joint,
            self.temperature / num_data,
            replace(training, weight_decay=0.0).adam(steps),
            log_sd=self.log_sd,
            draws=self.samples,
            clip=training.clip,
        )


@dataclass(frozen=True)
class Ivon:
    """Improved variational online Newton: diagonal variational inference at the cost of Adam."""

    lr: float = 0.1
    """step size, in units of 1 / h0"""
    prior_sd: float = 1.0
    """standard deviation of the Gaussian prior"""
    temperature: float = 1.0
    """of the posterior: 1 is Bayes, below 1 is cold"""
    h0: float = 100.0
    """curvature to start from: standard deviations start at 1 / √(N h0)"""
    decay: float = 0.9999
    """memory of the curvature's running estimate; the paper's .99999 needs 100,000 steps to leave h0"""
    clip_radius: float = 1e-4
    """largest step of a weight before it is scaled by lr · h0"""
    draws: int = 30
    """draws per prediction"""
    predictive: Way = "sampled"
    """from weights to outputs: sampled, linearised, streamlined (for a few forward passes) or one_pass"""
    warm_up: float = 0.5
    """share of the epochs spent finding a mode with Adam first; with a subset at least half of them"""
    subset: str = "*"
    """name pattern of the weights that get a spread; the other learned ones are trained to the mode and stay there"""
    samples: int = field(default=1, metadata=LATER)
    """draws per step"""

    AFTER_TRAINING: ClassVar = ("draws", "predictive")

    def __post_init__(self) -> None:
        check_ranges(
            self,
            lr=above(0),
            prior_sd=above(0),
            temperature=above(0),
            h0=above(0),
            decay=between(0, 1),
            clip_radius=above(0),
            draws=whole(1),
            predictive=one_of(WAYS),
            warm_up=within(0, 1),
            samples=whole(1),
        )

    def settings(self, num_data: int, earlier: bool = False) -> tuple[float, float]:
        """Effective sample size λ and weight decay δ: λ δ is the prior's precision at temperature 1.

        Where an earlier posterior is the prior, that is in the objective, and δ only keeps the precision positive.
        """
        return num_data / self.temperature, 1e-10 if earlier else 1 / (num_data * self.prior_sd**2)

    def fit(self, problem: Problem) -> Posterior:
        """Run IVON from the model's weights; the posterior is its diagonal Gaussian."""
        earlier = problem.prior is not None
        ess, decay = self.settings(problem.num_data, earlier)
        law = partial(ivon.law, ess=ess, weight_decay=decay)
        build = partial(self.build, earlier=earlier)
        return fit_gaussian(self, Prototype(problem), build, law, prior=None, prior_in_objective=earlier)

    def build(
        self,
        log_joint: LogJoint,
        training: Training,  # noqa: ARG002
        steps: int,
        num_data: int,
        earlier: bool = False,
    ) -> Transform:
        """The IVON transform (inference.ivon.build), its step size a cosine down to 0."""
        ess, decay = self.settings(num_data, earlier)

        def cosine(step: Tensor) -> Tensor:
            return self.lr * 0.5 * (1 + torch.cos(math.pi * (step / steps).clamp(max=1)))

        return ivon.build(
            log_joint,
            cosine,
            ess,
            weight_decay=decay,
            h0=self.h0,
            betas=(0.9, self.decay),
            clip_radius=self.clip_radius,
            draws=self.samples,
        )


@dataclass(frozen=True)
class Swag:
    """SWAG: the mean and spread of the weights that gradient descent visits around a mode."""

    lr: float = 2e-4
    """constant rate of the descent that is watched"""
    rank: int = 20
    """deviations kept for the low-rank part; 0 is the diagonal form"""
    scale: float = 0.5
    """factor of the covariance; 0 is SWA, the mean alone"""
    every: int = 4
    """steps between snapshots"""
    prior: PriorSetting = "normal(0, 1)"
    """law of every weight, or a table of laws by name pattern"""
    warm_up: float = 0.5
    """share of the epochs spent finding a mode with Adam; with a subset at least half of them"""
    draws: int = 30
    """draws per prediction"""
    predictive: Way = "sampled"
    """from weights to outputs: sampled, linearised, streamlined (for a few forward passes) or one_pass"""
    subset: str = "*"
    """name pattern of the weights that get a spread; the other learned ones are trained to the mode and stay there"""

    AFTER_TRAINING: ClassVar = ("draws", "predictive")

    def __post_init__(self) -> None:
        check_ranges(
            self,
            lr=above(0),
            rank=whole(0),
            scale=at_least(0),
            every=whole(1),
            warm_up=within(0, 1),
            draws=whole(1),
            predictive=one_of(WAYS),
        )
        prior_of(self.prior)

    def fit(self, problem: Problem) -> Posterior:
        """Run gradient descent and fit a Gaussian to the weights it passes through."""
        prototype = Prototype(problem)
        self._check(prototype)
        return fit_gaussian(self, prototype, self.build, partial(swag.law, scale=self.scale), prior=self.prior)

    def _check(self, prototype: Prototype) -> None:
        """Refuse a training with fewer than two snapshots, which would have no spread, before anything is trained."""
        training = shortened(prototype.problem.training, 1 - mode_share(self, prototype))
        steps = Stage(prototype, "swag", training).steps
        snapshots = (steps - self._start(training, steps)) // self.every
        if self.scale and snapshots < FEWEST_SNAPSHOTS:
            raise ValueError(
                f"swag must take at least {FEWEST_SNAPSHOTS} snapshots to have a spread; {steps} steps after the "
                f"warm-up with every={self.every} give {snapshots}. Train for more epochs, or lower every or warm_up."
            )

    def build(self, log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:  # noqa: ARG002
        """Gradient descent, which is Langevin dynamics at temperature 0, watched after its first epoch."""
        start = self._start(training, steps)
        return swag.build(sgld.build(log_joint, self.lr, 0.0), start, self.every, self.rank)

    @staticmethod
    def _start(training: Training, steps: int) -> int:
        """Steps before the first snapshot can be taken: one epoch, if there are several."""
        return 0 if training.epochs == 1 else steps // training.epochs


@dataclass(frozen=True)
class Ekf:
    """Extended Kalman filter: one pass over the data, each batch updates a Gaussian by its empirical Fisher matrix."""

    kind: Literal["diag", "dense"] = "diag"
    """one precision per weight, or all of them (a few thousand weights)"""
    sd: float = 0.003
    """standard deviation of the weights around the start before the pass"""
    transition_sd: float = 0.0
    """how far weights may wander between batches"""
    temperature: float = 1.0
    """below 1 every batch counts for more"""
    warm_up: float = 0.5
    """share of the epochs spent finding a start with Adam"""
    draws: int = 30
    """draws per prediction"""
    predictive: Way = "sampled"
    """from weights to outputs: sampled, linearised, streamlined (for a few forward passes) or one_pass"""
    subset: str = "*"
    """name pattern of the weights that get a spread; the other learned ones are trained to the mode and stay there"""

    AFTER_TRAINING: ClassVar = ("draws", "predictive")

    def __post_init__(self) -> None:
        check_ranges(
            self,
            kind=one_of(("diag", "dense")),
            sd=above(0),
            transition_sd=at_least(0),
            temperature=above(0),
            warm_up=within(0, 1),
            draws=whole(1),
            predictive=one_of(WAYS),
        )

    def fit(self, problem: Problem) -> Posterior:
        """Filter once through the data; an earlier posterior, if given, is the Gaussian it starts from."""
        prototype = Prototype(problem)
        module: Any = ekf_diag if self.kind == "diag" else ekf_dense
        method, begin = self, self._beginning(None)
        if problem.prior is not None:
            method, begin = replace(self, warm_up=0.0), self._beginning(earlier_law(prototype))
            if self.subset != "*":
                raise ValueError(f"ekf.subset must be '*' with an earlier posterior as the prior; got {self.subset!r}.")
        held = prototype.noisy_held  # an example by itself has no averages of a batch
        return fit_gaussian(
            method,
            prototype,
            partial(self.build, begin=begin, each=scores_for(prototype, held)),
            module.law,
            prior=None,
            prior_in_objective=False,
            training=replace(problem.training, epochs=1),
            held=held,
        )

    def _beginning(self, earlier: GaussianLaw | None) -> dict[str, Any]:
        """The spread that the filter starts from: its setting, or that of an earlier posterior."""
        if earlier is None:
            return {"sd": self.sd}
        return {"start_precision": earlier.precision()} if self.kind == "dense" else {"sd": earlier.sd}

    def build(
        self,
        log_joint: LogJoint,
        training: Training,
        steps: int,  # noqa: ARG002
        num_data: int,  # noqa: ARG002
        begin: dict[str, Any],
        each: Scores,
    ) -> Transform:
        """The filter, diagonal or dense."""
        module: Any = ekf_diag if self.kind == "diag" else ekf_dense
        lr = None if self.temperature == 1 else training.batch_size / self.temperature
        return module.build(log_joint, lr, self.transition_sd, each=each, **begin)
