"""Variational methods over weights, whose posterior is one Gaussian: Vi and Ivon."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bayesformer.core.doubts import Doubt
from bayesformer.core.rules import above, at_least, between, check_ranges, finite, one_of, or_auto, whole, within
from bayesformer.core.settings import LATER
from bayesformer.core.types import LogJoint, Transform
from bayesformer.inference import ivon, vi_dense, vi_diag
from bayesformer.inference.affine import AffineMap
from bayesformer.inference.optimise import Adam
from bayesformer.inference.schedules import warmup_cosine
from bayesformer.laws import GaussianLaw
from bayesformer.posterior import Posterior
from bayesformer.predict.ways import WAYS, Way
from bayesformer.priors.setting import PriorSetting, prior_of
from bayesformer.train.around_mode import AroundMode, Auto, started, tempered_map
from bayesformer.train.coordinates import refuse_too_large
from bayesformer.train.gaussian_doubts import gaussian_doubts
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import fit_gaussian
from bayesformer.train.training import Training

EPOCHS, STEPS = 50, 300  # of the ascent: from a start at the curvature's own scale, few steps are what small data lack
RATE = {"diag": 0.02, "kron": 0.02, "dense": 0.01}  # of Adam, in standard deviations
WARMUP = 20  # steps in which it rises
FEW = 100  # weights up to which a dense factor stands that rate


@dataclass(frozen=True)
class Vi:
    """Variational inference: the Gaussian over weights that maximises the evidence lower bound.

    By default it starts at the mode θ* that `training` finds, with the spread that the curvature has there, and ascends
    in units of that spread: θ = θ* + W φ, with W Wᵀ the inverse of the curvature (of its diagonal, in its Kronecker
    basis, or of all of it). Adam has the rate .02 (dense: .01), 20 steps of warm-up, then a cosine to 0; every batch
    sees a pair ±ε, in which its own noise cancels. Such a rate is a pure number, whatever N, the data and the model.
    """

    kind: Literal["diag", "kron", "dense"] = "diag"
    """one standard deviation per weight; one per axis of the Kronecker basis of each matrix; or a full covariance"""
    temperature: float = 1.0
    """of the posterior: 1 is Bayes, below 1 is cold; the library divides by N"""
    prior: PriorSetting = "normal(0, 1)"
    """law of every weight, or a table of laws by name pattern"""
    log_sd: float | Auto = "auto"
    """logarithm of the standard deviations at the start, in plain coordinates; auto: those of the curvature"""
    samples: int = 1
    """draws per step; pairs of them unless log_sd is a number"""
    draws: int = 30
    """draws per prediction"""
    predictive: Way = "sampled"
    """from weights to outputs: sampled, linearised, streamlined (for a few forward passes) or one_pass"""
    warm_up: float | Auto = "auto"
    """share of the training that finds the mode, the rest is for the ascent; auto: all, and the ascent has epochs"""
    subset: str = "*"
    """name pattern of the weights that get a spread; the other learned ones are trained to the mode and stay there"""
    epochs: int | Auto = field(default="auto", metadata=LATER)
    """of the ascent after the mode; auto: 50, and at least 300 steps (a network: as many as the training)"""
    lr: float | Auto = field(default="auto", metadata=LATER)
    """rate of the ascent in standard deviations; auto: .02, dense .01 up to 100 weights and less above"""

    AFTER_TRAINING: ClassVar = ("draws", "predictive")

    def __post_init__(self) -> None:
        check_ranges(
            self,
            kind=one_of(("diag", "kron", "dense")),
            temperature=above(0) if self.log_sd == "auto" else at_least(0),
            log_sd=or_auto(finite()),
            samples=whole(1),
            draws=whole(1),
            predictive=one_of(WAYS),
            warm_up=or_auto(within(0, 1)),
            epochs=or_auto(whole(1)),
            lr=or_auto(above(0, finite=True)),
        )
        prior_of(self.prior)
        if self.log_sd != "auto" and self.kind == "kron":
            raise ValueError(
                f"vi.log_sd must be 'auto' with kind='kron', whose axes the curvature gives; got {self.log_sd}."
            )

    def fit(self, problem: Problem) -> Posterior:
        """Find the mode, then ascend the evidence lower bound around it."""
        prototype = Prototype(problem)
        if self.log_sd != "auto":
            return self._plain(prototype)
        refuse_too_large(self.kind, prototype.space.select(self.subset).size)
        around = AroundMode(self, prototype, self.prior, self.kind, self.warm_up)
        network = around.coordinates.regime == "network"
        frame = self._frame(around)
        law = partial(self._law, frame=frame)
        return around.run(
            partial(self.build, frame=frame),
            law,
            around.training(self.epochs, problem.training.epochs if network else EPOCHS, STEPS),
            check=partial(self._doubts, around),
        )

    def _frame(self, around: AroundMode) -> AffineMap:
        """The coordinates of the ascent: those of the curvature, or narrower ones with their axes in a network."""
        found = around.coordinates
        root = found.root if found.regime == "gaussian" else around.calm_root()
        return tempered_map(found.center, root, self.temperature)

    def _doubts(self, around: AroundMode, law: GaussianLaw) -> tuple[Doubt, ...]:
        family = {"diag": "diagonal", "kron": "Kronecker-diagonal", "dense": "dense"}[self.kind]
        found = gaussian_doubts(
            around.coordinates,
            around.full_batch(),
            law,
            temperature=self.temperature,
            family=family,
            seed=around.prototype.problem.seed,
        )
        return tuple(found)

    def build(
        self, log_joint: LogJoint, training: Training, steps: int, num_data: int, frame: AffineMap | None = None
    ) -> Transform:
        """The ascent, in plain coordinates without a `frame`."""
        module: Any = vi_dense if self.kind == "dense" else vi_diag
        if frame is None:
            return module.build(
                log_joint,
                self.temperature / num_data,
                replace(training, weight_decay=0.0).adam(steps),
                log_sd=self.log_sd,
                draws=self.samples,
                clip=training.clip,
            )
        rule = Adam(warmup_cosine(self.rate(frame.size), WARMUP, steps))
        settings = {"log_sd": 0.0, "draws": self.samples, "pairs": True}
        return started(module.build(frame.in_phi(log_joint), self.temperature / num_data, rule, **settings), frame)

    def rate(self, weights: int) -> float:
        """The peak rate of Adam, in standard deviations.

        Its steps have the size of the rate in each of the P² / 2 numbers of a dense factor, so that the noise that they
        leave in the covariance grows with P: above 100 weights the rate falls as 1 / P.
        """
        if self.lr != "auto":
            return self.lr
        return RATE[self.kind] * (min(1.0, FEW / weights) if self.kind == "dense" else 1.0)

    def _law(self, state: Any, frame: AffineMap | None = None) -> GaussianLaw:
        module: Any = vi_dense if self.kind == "dense" else vi_diag
        found: GaussianLaw = module.law(state)
        return found if frame is None else frame.to_theta(found)

    def _plain(self, prototype: Prototype) -> Posterior:
        """As numbers were meant before there were coordinates: weights as they are, and the rate of `training`."""
        method = self if self.warm_up != "auto" else replace(self, warm_up=0.0)
        training = None if self.epochs == "auto" else replace(prototype.problem.training, epochs=self.epochs)
        return fit_gaussian(method, prototype, self.build, self._law, prior=self.prior, training=training)


@dataclass(frozen=True)
class Ivon:
    """Improved variational online Newton: diagonal variational inference at the cost of Adam.

    By default it starts at the mode that `training` finds, with the curvature of every weight there. The mean makes
    natural-gradient steps of α = min(n/N, .1, .5 / λmax), n the batch size and λmax the largest curvature in units of
    its own diagonal; the curvature is remembered for about 12 epochs, measured by pairs ±ε on the same batch, and
    averaged over the second half. Reason: one estimate of it has a relative variance of about N/n, so that epochs and
    not steps say how well it is known.
    """

    lr: float | Auto = "auto"
    """step size: of the natural gradient; in units of 1 / h0 if h0 is a number (auto: .1)"""
    prior_sd: float = 1.0
    """standard deviation of the Gaussian prior"""
    temperature: float = 1.0
    """of the posterior: 1 is Bayes, below 1 is cold"""
    h0: float | Auto = "auto"
    """curvature to start from: standard deviations start at 1 / √(N h0); auto: that of every weight at the mode"""
    decay: float | Auto = "auto"
    """memory of the curvature's running estimate; auto: 1 - 2n / (25 N), at least .9 (.9999 if h0 is a number)"""
    clip_radius: float | Auto = "auto"
    """largest step of a weight before it is scaled by lr · h0; auto: none (1e-4 if h0 is a number)"""
    draws: int = 30
    """draws per prediction"""
    predictive: Way = "sampled"
    """from weights to outputs: sampled, linearised, streamlined (for a few forward passes) or one_pass"""
    warm_up: float | Auto = "auto"
    """share of the training that finds the mode, the rest is for Ivon; auto: all, and Ivon has epochs of its own"""
    subset: str = "*"
    """name pattern of the weights that get a spread; the other learned ones are trained to the mode and stay there"""
    samples: int = field(default=1, metadata=LATER)
    """draws per step; pairs of them unless h0 is a number"""
    epochs: int | Auto = field(default="auto", metadata=LATER)
    """after the mode; auto: 50, and at least 300 steps (a network: as many as the training)"""

    AFTER_TRAINING: ClassVar = ("draws", "predictive")

    def __post_init__(self) -> None:
        check_ranges(
            self,
            lr=or_auto(above(0)),
            prior_sd=above(0),
            temperature=above(0),
            h0=or_auto(above(0)),
            decay=or_auto(between(0, 1)),
            clip_radius=or_auto(above(0)),
            draws=whole(1),
            predictive=one_of(WAYS),
            warm_up=or_auto(within(0, 1)),
            samples=whole(1),
            epochs=or_auto(whole(1)),
        )

    def settings(self, num_data: int, earlier: bool = False) -> tuple[float, float]:
        """Effective sample size λ and weight decay δ: λ δ is the prior's precision at temperature 1.

        Where an earlier posterior is the prior, that is in the objective, and δ only keeps the precision positive.
        """
        return num_data / self.temperature, 1e-10 if earlier else 1 / (num_data * self.prior_sd**2)

    def fit(self, problem: Problem) -> Posterior:
        """Find the mode, then run IVON from it; the posterior is its diagonal Gaussian."""
        prototype, earlier = Prototype(problem), problem.prior is not None
        ess, decay = self.settings(problem.num_data, earlier)
        law = partial(ivon.law, ess=ess, weight_decay=decay)
        if self.h0 != "auto":
            return self._plain(prototype, law, earlier)
        around = AroundMode(self, prototype, f"normal(0, {self.prior_sd!r})", "diag", self.warm_up)
        network = around.coordinates.regime == "network"
        return around.run(
            partial(self.build, earlier=earlier, around=around),
            law,
            around.training(self.epochs, problem.training.epochs if network else EPOCHS, STEPS),
            prior_in_objective=earlier,
            check=partial(self._doubts, around),
        )

    def _plain(self, prototype: Prototype, law: Any, earlier: bool) -> Posterior:
        """As numbers were meant before the curvature at the mode was asked for."""
        method = self if self.warm_up != "auto" else replace(self, warm_up=0.5)
        training = None if self.epochs == "auto" else replace(prototype.problem.training, epochs=self.epochs)
        build = partial(self.build, earlier=earlier)
        return fit_gaussian(method, prototype, build, law, prior=None, prior_in_objective=earlier, training=training)

    def _doubts(self, around: AroundMode, law: GaussianLaw) -> tuple[Doubt, ...]:
        seed = around.prototype.problem.seed
        how: dict[str, Any] = {"temperature": self.temperature, "family": "diagonal", "seed": seed}
        return tuple(gaussian_doubts(around.coordinates, around.full_batch(), law, **how))

    def build(
        self,
        log_joint: LogJoint,
        training: Training,
        steps: int,
        num_data: int,
        earlier: bool = False,
        around: AroundMode | None = None,
    ) -> Transform:
        """The IVON transform (inference.ivon.build), its step size a cosine down to 0."""
        ess, decay = self.settings(num_data, earlier)
        if around is None:
            lr, memory, radius = (0.1, 0.9999, 1e-4)
            own: dict[str, Any] = {"h0": self.h0}
        else:
            share, found = min(1.0, training.batch_size / num_data), around.coordinates
            lr, memory, radius = min(share, 0.1, 0.5 / found.largest), 1 - min(0.1, 2 * share / 25), math.inf
            calm = found.largest if found.regime == "network" else 1.0  # in no direction wider than the curvature's
            h0 = (max(calm, 1.0) * found.curvature_diagonal / num_data - decay).clamp_min(0)
            own = {"h0": h0, "pairs": True, "rescale_lr": False, "average_after": steps // 2}
        lr = lr if self.lr == "auto" else self.lr

        def cosine(step: Tensor) -> Tensor:
            return lr * 0.5 * (1 + torch.cos(math.pi * (step / steps).clamp(max=1)))

        return ivon.build(
            log_joint,
            cosine,
            ess,
            weight_decay=decay,
            betas=(0.9, memory if self.decay == "auto" else self.decay),
            clip_radius=radius if self.clip_radius == "auto" else self.clip_radius,
            draws=self.samples,
            **own,
        )
