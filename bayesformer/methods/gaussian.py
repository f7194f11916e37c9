"""Methods whose posterior over weights is one Gaussian: Vi, Ivon, Swag, Ekf."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bayesformer.functional import THETA
from bayesformer.inference import ivon, sgld, swag, vi_dense, vi_diag
from bayesformer.inference.ekf import dense as ekf_dense
from bayesformer.inference.ekf import diag as ekf_diag
from bayesformer.methods.members import BuildTransform, facts_of, prior_of, run, shortened, task_of
from bayesformer.methods.problem import Problem
from bayesformer.methods.ranges import above, at_least, between, check_ranges, finite, one_of, whole, within
from bayesformer.methods.sampling import find_modes, spread_rows
from bayesformer.posterior import WAYS, Posterior, Way
from bayesformer.train import Training, steps_per_epoch
from bayesformer.types import LogJoint, Params, Transform
from bayesformer.weights import GaussianWeights


def _fit(
    method: Any,
    problem: Problem,
    build: BuildTransform,
    prior: Any,
    warm_up: float,
    epochs: int | None = None,
) -> tuple[Any, Tensor, Params, dict[str, Any]]:
    """A mode first where asked for, then the algorithm on the subset; returns model, base weights, state, facts."""
    name = type(method).__name__.lower()
    modes, seconds = find_modes(name, problem, 1, None if prior is None else prior_of(prior), warm_up)
    training = shortened(problem.training, 1 - warm_up)
    if epochs is not None:
        training = replace(training, epochs=epochs)
    task = task_of(
        problem,
        name,
        training=training,
        validation=None,  # the whole run counts; nothing is selected
        build=build,
        prior=None if prior is None else prior_of(prior),
        start=modes,
        subset=method.subset,
    )
    model, result = run(task, 1, problem)
    facts = facts_of(name, method, problem, result)
    facts["seconds"] += seconds
    state = {k.removeprefix("state."): v[0] for k, v in result.items() if k.startswith("state.")}
    return model, modes, state, facts


def _posterior(
    method: Any, problem: Problem, fitted: tuple[Any, Tensor, Params, dict[str, Any]], law: GaussianWeights
) -> Posterior:
    """The law over the subset as one over all weights: the others have no spread."""
    model, base, _, facts = fitted

    def full(rows: Tensor | None, around: Tensor) -> Tensor | None:
        return None if rows is None else spread_rows(model, around, rows[None], method.subset)[0]

    nothing = torch.zeros_like(base)
    mean, sd = full(law.mean[None], base), full(None if law.sd is None else law.sd[None], nothing)
    assert mean is not None
    if method.subset != "*" and law.tril is not None:
        factor = full(law.tril.T, nothing)  # L Lᵀ over the subset is a low-rank covariance over all
        weights = GaussianWeights(mean[0], factor=factor)
    else:
        weights = GaussianWeights(mean[0], None if sd is None else sd[0], full(law.factor, nothing), law.tril)
    model.requires_grad_(True)
    way: Way = method.predictive
    return Posterior(model, problem.likelihood, weights, default_draws=method.draws, predictive=way, facts=facts)


@dataclass(frozen=True)
class Vi:
    """Variational inference: the Gaussian over weights that maximises the evidence lower bound."""

    kind: Literal["diag", "dense"] = "diag"
    """one standard deviation per weight, or a full covariance (at most a few thousand weights)"""
    temperature: float = 1.0
    """of the posterior: 1 is Bayes, below 1 is cold; the library divides by N"""
    prior: str | dict[str, str] = "normal(0, 1)"
    """law of every weight, or a table of laws by name pattern"""
    log_sd: float = -5.0
    """logarithm of the standard deviations at the start"""
    samples: int = 1
    """draws per step"""
    draws: int = 30
    """draws per prediction"""
    predictive: Way = "sampled"
    """from weights to outputs: sampled, linearised, or streamlined (moments in one forward pass)"""
    warm_up: float = 0.0
    """share of the epochs spent finding a mode with Adam first"""
    subset: str = "*"
    """name pattern of the weights to infer; the others stay at the mode, so give a warm-up"""

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
        fitted = _fit(self, problem, _BuildVi(self), self.prior, self.warm_up)
        state = fitted[2]
        mean = state[f"params.{THETA}"]
        if self.kind == "diag":
            law = GaussianWeights(mean, state[f"log_sd.{THETA}"].exp())
        else:
            factor = state["factor"]
            law = GaussianWeights(mean, tril=factor.tril(-1) + factor.diagonal().exp().diag())
        return _posterior(self, problem, fitted, law)


@dataclass(frozen=True)
class _BuildVi:
    method: Vi

    def __call__(self, log_joint: LogJoint, training: Training, num_data: int) -> Transform:
        module = vi_diag if self.method.kind == "diag" else vi_dense
        return module.build(
            log_joint,
            self.method.temperature / num_data,
            training.adam(num_data),
            log_sd=self.method.log_sd,
            draws=self.method.samples,
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
    """from weights to outputs: sampled, linearised, or streamlined (moments in one forward pass)"""
    warm_up: float = 0.5
    """share of the epochs spent finding a mode with Adam first"""
    subset: str = "*"
    """name pattern of the weights to infer; the others stay at the mode"""

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
        )

    def settings(self, num_data: int) -> tuple[float, float]:
        """Effective sample size λ and weight decay δ: λ δ is the prior's precision at temperature 1."""
        return num_data / self.temperature, 1 / (num_data * self.prior_sd**2)

    def fit(self, problem: Problem) -> Posterior:
        """Run IVON."""
        fitted = _fit(self, problem, _BuildIvon(self), None, self.warm_up)
        ess, decay = self.settings(len(problem.data))
        state = fitted[2]
        sd = ((state[f"hessian.{THETA}"] + decay) * ess).rsqrt()
        return _posterior(self, problem, fitted, GaussianWeights(state[f"params.{THETA}"], sd))


@dataclass(frozen=True)
class _BuildIvon:
    method: Ivon

    def __call__(self, log_joint: LogJoint, training: Training, num_data: int) -> Transform:
        ess, decay = self.method.settings(num_data)
        steps = training.epochs * steps_per_epoch(num_data, training.batch_size)

        def cosine(step: Tensor) -> Tensor:
            return self.method.lr * 0.5 * (1 + torch.cos(math.pi * (step / steps).clamp(max=1)))

        method = self.method
        return ivon.build(
            log_joint,
            cosine,
            ess,
            weight_decay=decay,
            h0=method.h0,
            betas=(0.9, method.decay),
            clip_radius=method.clip_radius,
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
    prior: str | dict[str, str] = "normal(0, 1)"
    """law of every weight, or a table of laws by name pattern"""
    warm_up: float = 0.5
    """share of the epochs spent finding a mode with Adam"""
    draws: int = 30
    """draws per prediction"""
    predictive: Way = "sampled"
    """from weights to outputs: sampled, linearised, or streamlined (moments in one forward pass)"""
    subset: str = "*"
    """name pattern of the weights that move; the others stay at the mode"""

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
        """Watch gradient descent."""
        fitted = _fit(self, problem, _BuildSwag(self), self.prior, self.warm_up)
        state = fitted[2]
        variance, ring = state[f"variance.{THETA}"], state[f"deviations.{THETA}"]
        held = (state["snapshots"].clamp(max=max(self.rank, 1)) - 1).clamp(min=1)
        share = self.scale if self.rank else 2 * self.scale  # without the low-rank part the diagonal holds it all
        factor = ring * (self.scale / held).sqrt().to(ring) if self.rank else None
        return _posterior(
            self, problem, fitted, GaussianWeights(state[f"params.{THETA}"], (share * variance).sqrt(), factor)
        )


@dataclass(frozen=True)
class _BuildSwag:
    method: Swag

    def __call__(self, log_joint: LogJoint, training: Training, num_data: int) -> Transform:
        start = steps_per_epoch(num_data, training.batch_size)  # the first epoch settles down
        if training.epochs == 1:
            start = 0
        # Langevin dynamics at temperature 0 is gradient descent.
        return swag.build(sgld.build(log_joint, self.method.lr, 0.0), start, self.method.every, self.method.rank)


@dataclass(frozen=True)
class Ekf:
    """Extended Kalman filter: one pass over the data, each batch a Bayes update of a Gaussian."""

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
    """from weights to outputs: sampled, linearised, or streamlined (moments in one forward pass)"""
    subset: str = "*"
    """name pattern of the weights to infer; the others stay at the start"""

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
        """Filter once through the data."""
        fitted = _fit(self, problem, _BuildEkf(self), None, self.warm_up, epochs=1)
        state = fitted[2]
        mean = state[f"params.{THETA}"]
        if self.kind == "diag":
            return _posterior(self, problem, fitted, GaussianWeights(mean, state[f"precision.{THETA}"].rsqrt()))
        covariance = torch.linalg.inv(state["precision"].double())
        tril = torch.linalg.cholesky((covariance + covariance.T) / 2).to(mean)
        return _posterior(self, problem, fitted, GaussianWeights(mean, tril=tril))


@dataclass(frozen=True)
class _BuildEkf:
    method: Ekf

    def __call__(self, log_joint: LogJoint, training: Training, num_data: int) -> Transform:  # noqa: ARG002
        module = ekf_diag if self.method.kind == "diag" else ekf_dense
        lr = None if self.method.temperature == 1 else training.batch_size / self.method.temperature
        return module.build(log_joint, lr, self.method.transition_sd, sd=self.method.sd)
