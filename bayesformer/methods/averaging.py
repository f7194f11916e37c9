"""Gaussians from the path of an optimiser: Swag."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bayesformer.core.doubts import Doubt, recorded
from bayesformer.core.rules import above, at_least, check_ranges, one_of, or_auto, whole, within
from bayesformer.core.settings import LATER
from bayesformer.core.types import LogJoint, Transform
from bayesformer.inference import optimise, schedules, sgld, swag
from bayesformer.inference.added_noise import with_noise
from bayesformer.inference.affine import AffineMap
from bayesformer.inference.optimise import Adam
from bayesformer.laws import Dense, GaussianLaw
from bayesformer.posterior import Posterior
from bayesformer.predict.ways import WAYS, Way
from bayesformer.priors.setting import PriorSetting, prior_of
from bayesformer.train.around_mode import AroundMode, Auto, started, tempered_map
from bayesformer.train.coordinates import refuse_too_large
from bayesformer.train.gaussian_doubts import gaussian_doubts
from bayesformer.train.members import Stage
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import fit_gaussian, mode_share, shortened
from bayesformer.train.training import Training

FEWEST_SNAPSHOTS = 2  # one alone has no deviation from its mean
EPOCHS, STEPS = 100, 600  # of a descent in whitened coordinates, which forgets in half an epoch
UNEVEN = 0.25  # root mean square of the logarithm of standard deviations over those of the curvature
OPTIMISER = Doubt(
    "spread",
    "Not a posterior: the spread of an optimiser. As published, SWAG's covariance is set by the learning rate and the "
    "batch size, whatever the data say. Swag(coordinates='whitened') has the posterior's where that is a Gaussian.",
)


@dataclass(frozen=True)
class Swag:
    """SWAG: the mean and spread of the weights that gradient descent visits around a mode.

    As published (Maddox et al. 2019) by default, which is not a posterior: where the noise of gradients has the shape
    of the curvature, the stationary covariance of descent with rate h is (h N / 2n) I whatever the curvature is (Mandt
    et al. 2017). `coordinates="whitened"` descends in θ = θ* + W φ with W Wᵀ the inverse curvature at the mode, at the
    rate h = 2n / (N + n) on the sum over examples, with batches of n drawn with replacement: then that covariance
    is the inverse curvature itself. The prior's gradient has no such noise: its share is added. `trajectory="adamw"` is
    the form published for LoRA (Onal et al. 2024). Several `members` are MultiSWAG (Wilson & Izmailov 2020): a mixture
    of SWAGs around modes of their own.
    """

    lr: float = 2e-4
    """constant rate of the descent that is watched; in whitened coordinates it follows from N and the batch size, with
    trajectory="adamw" `swa_lr` is used instead"""
    rank: int = 20
    """deviations kept for the low-rank part; 0 is the diagonal form"""
    scale: float = 0.5
    """factor of the covariance; 0 is SWA, the mean alone"""
    every: int = 4
    """steps between snapshots; with trajectory="adamw" they are taken after every epoch"""
    prior: PriorSetting = "normal(0, 1)"
    """law of every weight, or a table of laws by name pattern"""
    warm_up: float = 0.5
    """share of the training that finds a mode with Adam, the rest is watched; in whitened coordinates all of it"""
    draws: int = 30
    """draws per prediction"""
    predictive: Way = "sampled"
    """from weights to outputs: sampled, linearised, streamlined (for a few forward passes) or one_pass"""
    subset: str = "*"
    """name pattern of the weights that get a spread; the other learned ones are trained to the mode and stay there"""
    coordinates: Literal["plain", "whitened"] = field(default="plain", metadata=LATER)
    """weights as they are, or in units of the posterior's standard deviations (at most 2000 weights)"""
    epochs: int | Auto = field(default="auto", metadata=LATER)
    """that are watched in whitened coordinates; auto: 100, and at least 600 steps"""
    trajectory: Literal["sgd", "adamw"] = field(default="sgd", metadata=LATER)
    """what is watched: plain descent, or AdamW as published for LoRA, from the best weights on validation data on, with
    the training's weight decay, its rate annealed to `swa_lr`, and a snapshot after every epoch"""
    swa_lr: float | Auto = field(default="auto", metadata=LATER)
    """rate that AdamW is annealed to; auto: a tenth of the training's"""
    anneal: int = field(default=5, metadata=LATER)
    """epochs in which AdamW's rate falls linearly from the training's to `swa_lr`"""
    members: int = field(default=1, metadata=LATER)
    """SWAGs in the mixture, each with a start, a data order and a mode of its own"""

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
            coordinates=one_of(("plain", "whitened")),
            epochs=or_auto(whole(1)),
            trajectory=one_of(("sgd", "adamw")),
            swa_lr=or_auto(above(0)),
            anneal=whole(1),
            members=whole(1),
        )
        prior_of(self.prior)
        self._check_together()

    def _check_together(self) -> None:
        """Refuse settings that each make sense, but not with each other."""
        if self.members > 1 and self.predictive != "sampled":
            raise ValueError(
                f"swag.predictive must be 'sampled' with several members, for a mixture is no Gaussian; got "
                f"{self.predictive!r}."
            )
        if self.coordinates == "whitened" and (self.members > 1 or self.trajectory != "sgd"):
            raise ValueError(
                "swag.coordinates must be 'plain' with several members or trajectory='adamw'; got 'whitened'."
            )

    def fit(self, problem: Problem) -> Posterior:
        """Run gradient descent and fit a Gaussian to the weights it passes through."""
        prototype = Prototype(problem)
        law = partial(swag.law, scale=self.scale)
        if self.coordinates == "whitened":
            return self._whitened(prototype)
        self._check(prototype)
        build = partial(self.build, per_epoch=_per_epoch(prototype))
        found = fit_gaussian(self, prototype, build, law, prior=self.prior, members=self.members)
        return replace(found, facts={**found.facts, **recorded([OPTIMISER])})

    def _whitened(self, prototype: Prototype) -> Posterior:
        refuse_too_large("dense", prototype.space.select(self.subset).size, "coordinates='plain', Vi(kind='kron')")
        around = AroundMode(self, prototype, self.prior, "dense")
        if around.coordinates.regime == "network":
            raise ValueError(
                "swag.coordinates must be 'plain' for a network, where descent in units of the curvature at one mode "
                "leaves that mode at once; got 'whitened'. Use Sghmc() for its posterior."
            )
        frame = tempered_map(around.coordinates.center, around.coordinates.root, 1.0)

        def law(state: Any) -> GaussianLaw:
            return frame.to_theta(swag.law(state, scale=self.scale))

        return around.run(
            partial(self.build, frame=frame, quiet=_prior_root(around, frame)),
            law,
            around.training(self.epochs, EPOCHS, STEPS),
            replacement=True,
            check=partial(self._doubts, around),
        )

    def _doubts(self, around: AroundMode, law: GaussianLaw) -> tuple[Doubt, ...]:
        seed = around.prototype.problem.seed
        how: dict[str, Any] = {"temperature": 1.0, "family": "dense", "seed": seed, "variational": False}
        doubts = gaussian_doubts(around.coordinates, around.full_batch(), law, **how)
        return (*doubts, *(_of_spread(around, law) if self.scale == Swag.scale else ()))

    def _check(self, prototype: Prototype) -> None:
        """Refuse a training with fewer than two snapshots, which would have no spread, before anything is trained."""
        training = shortened(prototype.problem.training, 1 - mode_share(self, prototype))
        steps = Stage(prototype, "swag", training).steps
        every, start = self.every, self._start(training, steps)
        if self.trajectory == "adamw":
            every, start = _per_epoch(prototype), 0
        snapshots = (steps - start) // every
        if self.scale and snapshots < FEWEST_SNAPSHOTS:
            raise ValueError(
                f"swag must take at least {FEWEST_SNAPSHOTS} snapshots to have a spread; {steps} steps after the "
                f"warm-up with every={every} give {snapshots}. Train for more epochs, or lower every or warm_up."
            )

    def build(
        self,
        log_joint: LogJoint,
        training: Training,
        steps: int,
        num_data: int,
        frame: AffineMap | None = None,
        quiet: Tensor | None = None,
        per_epoch: int = 1,
    ) -> Transform:
        """Gradient descent, which is Langevin dynamics at temperature 0, watched after its first epoch; or AdamW."""
        if self.trajectory == "adamw":
            return swag.build(self._adamw(log_joint, training, per_epoch), 0, per_epoch, self.rank)
        start = self._start(training, steps)
        if frame is None:
            return swag.build(sgld.build(log_joint, self.lr, 0.0), start, self.every, self.rank)
        size = min(training.batch_size, num_data)
        # φ ← (1 - h) φ + noise of variance h² N/n: stationary at variance 1 for h = 2n / (N + n), in units of 1 / N.
        # Batches make the data's share of that noise; the prior's, whose gradient has none, is added.
        rate = 2 * size / (num_data + size)
        descent = sgld.build(frame.in_phi(log_joint), rate * num_data, 0.0)
        if quiet is not None:
            descent = with_noise(descent, rate * math.sqrt(num_data / size) * quiet)
        return started(swag.build(descent, start, self.every, self.rank), frame)

    def _adamw(self, log_joint: LogJoint, training: Training, per_epoch: int) -> Transform:
        """AdamW with a rate that falls linearly from the training's to that of the average."""
        end = training.lr / 10 if self.swa_lr == "auto" else self.swa_lr
        rate = schedules.annealed(training.lr, end, self.anneal * per_epoch)
        return optimise.build(log_joint, Adam(rate, weight_decay=training.weight_decay), training.clip)

    @staticmethod
    def _start(training: Training, steps: int) -> int:
        """Steps before the first snapshot can be taken: one epoch, if there are several."""
        return 0 if training.epochs == 1 else steps // training.epochs


def _prior_root(around: AroundMode, frame: AffineMap) -> Tensor:
    """(P, P): R with R Rᵀ = Wᵀ Π W, the share of the prior in the curvature I of the coordinates."""
    eye = torch.eye(len(frame.center), dtype=frame.center.dtype, device=frame.center.device)
    once = frame.root.times_root(around.vector_prior.precision_times(frame.center, eye))  # (P, P), Π W
    share = frame.root.times_root(once.mT).double()
    values, vectors = torch.linalg.eigh((share + share.mT) / 2)
    return (vectors * values.clamp(0, 1).sqrt()).to(frame.center)


def _of_spread(around: AroundMode, law: GaussianLaw) -> list[Doubt]:
    """Whether the spread is that of the curvature, by which coordinates are of unit variance."""
    found = around.coordinates
    assert isinstance(found.root, Dense)
    ratio = float((law.sd / found.root.diagonal().sqrt()).log().square().mean().sqrt())
    if ratio <= UNEVEN:
        return []
    sentence = (
        f"The spread of the descent differs from the curvature's by a factor of {math.exp(ratio):.2g} on average: the "
        "noise of its batches has another shape, as it has with few examples. Use Laplace(), or Sghmc()."
    )
    return [Doubt("spread", sentence, ratio, UNEVEN)]


def _per_epoch(prototype: Prototype) -> int:
    """Steps in one epoch of the problem's training."""
    return Stage(prototype, "swag", replace(prototype.problem.training, epochs=1, max_steps=None)).steps
