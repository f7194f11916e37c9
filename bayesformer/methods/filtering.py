"""The extended Kalman filter over weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from bayesformer.core.doubts import Doubt
from bayesformer.core.rules import above, at_least, check_ranges, one_of, or_auto, whole, within
from bayesformer.core.settings import LATER
from bayesformer.core.types import LogJoint, Transform
from bayesformer.inference import ekf_dense, ekf_diag
from bayesformer.inference.vi_dense import LIMIT
from bayesformer.laplace.batch_curvature import BatchCurvature
from bayesformer.laws import GaussianLaw
from bayesformer.posterior import Posterior
from bayesformer.predict.ways import WAYS, Way
from bayesformer.priors.setting import PriorSetting, prior_of
from bayesformer.train.around_mode import AroundMode, Auto
from bayesformer.train.example_scores import scores_for
from bayesformer.train.gaussian_doubts import gaussian_doubts
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import earlier_law, fit_gaussian
from bayesformer.train.training import Training


@dataclass(frozen=True)
class Ekf:
    """Extended Kalman filter: one pass over the data, each batch updates a Gaussian by its curvature.

    By default it starts from the prior, is linearised at the mode that `training` finds, and adds the Gauss-Newton
    matrix of every batch; on linear regression the dense form is the Kalman filter, and after its pass the exact
    posterior. The mean of a diagonal filter is off by .2 to .8 standard deviations after one pass even there, so that
    the diagonal form keeps the mode as its mean and filters the variances: a diagonal Laplace approximation, made batch
    by batch. In a network its variances are divided by the largest curvature in units of their own diagonal, else
    draws of all weights together would drown what was learned. An earlier posterior is the Gaussian that the filter
    starts from, without a search for a mode.
    """

    kind: Literal["diag", "dense"] = "diag"
    """one precision per weight, or all of them (a few thousand weights)"""
    sd: float | Auto = "auto"
    """standard deviation of the weights around the start before the pass; auto: the prior's"""
    transition_sd: float = 0.0
    """how far weights may wander between batches"""
    temperature: float = 1.0
    """of the posterior: 1 is Bayes, below 1 is cold; of the likelihood alone if sd is a number"""
    warm_up: float | Auto = "auto"
    """share of the training that finds the start; auto: all of it (half if sd is a number)"""
    draws: int = 30
    """draws per prediction"""
    predictive: Way = "sampled"
    """from weights to outputs: sampled, linearised, streamlined (for a few forward passes) or one_pass"""
    subset: str = "*"
    """name pattern of the weights that get a spread; the other learned ones are trained to the mode and stay there"""
    prior: PriorSetting = field(default="normal(0, 1)", metadata=LATER)
    """law of every weight, or a table of laws by name pattern; unused if sd is a number"""
    curvature: Literal["auto", "ggn", "fisher"] = field(default="auto", metadata=LATER)
    """of a batch: Gauss-Newton, or the squared scores of its targets; auto: Gauss-Newton (scores if sd is a number)"""

    AFTER_TRAINING: ClassVar = ("draws", "predictive")

    def __post_init__(self) -> None:
        check_ranges(
            self,
            kind=one_of(("diag", "dense")),
            sd=or_auto(above(0)),
            transition_sd=at_least(0),
            temperature=above(0),
            warm_up=or_auto(within(0, 1)),
            draws=whole(1),
            predictive=one_of(WAYS),
            curvature=one_of(("auto", "ggn", "fisher")),
        )
        prior_of(self.prior)

    @property
    def gauss_newton(self) -> bool:
        """Whether batches give their Gauss-Newton matrix."""
        return self.curvature == "ggn" or (self.curvature == "auto" and self.sd == "auto")

    def fit(self, problem: Problem) -> Posterior:
        """Filter once through the data, from a mode or from an earlier posterior."""
        prototype = Prototype(problem)
        self._check(prototype)
        if problem.prior is not None or self.sd != "auto":
            return self._from_spread(prototype)
        around = AroundMode(self, prototype, self.prior, "diag", self.warm_up)
        found, heat = around.coordinates, self.temperature
        if found.regime == "network" and self.kind == "diag":
            heat /= max(found.largest, 1.0)  # in no direction wider than the curvature's
        pull = torch.empty_like(found.center)
        around.vector_prior.write(found.center, pull, 1.0)  # of the prior, towards its centre
        begin: dict[str, Any] = {"sd": (found.prior_precision / heat).rsqrt(), "temperature": heat}
        if self.kind == "dense":
            begin["prior_mean"] = found.center + pull / found.prior_precision
        else:
            begin["moves"] = False
        law = self._law
        if prototype.data.is_random:  # the mean of one pass is that of one reading, the mode that of many
            law = partial(_centred, law=law, center=found.center)
        return around.run(
            partial(self.build, begin=begin, prototype=prototype),
            law,
            replace(problem.training, epochs=1, max_steps=None),
            prior_in_objective=False,
            held=self._held(prototype),
            check=partial(self._doubts, around),
        )

    def _check(self, prototype: Prototype) -> None:
        """Refuse what would only fail after training."""
        if prototype.problem.prior is not None and self.subset != "*":
            raise ValueError(f"ekf.subset must be '*' with an earlier posterior as the prior; got {self.subset!r}.")
        size = prototype.space.select(self.subset).size
        if self.kind == "dense" and size > LIMIT:
            raise ValueError(
                f"ekf.kind must be 'diag' beyond {LIMIT} weights; got 'dense' with {size}, whose matrix takes "
                f"{4 * size * size / 2**30:.1f} GiB."
            )

    def _from_spread(self, prototype: Prototype) -> Posterior:
        """A filter that starts from an earlier posterior, or with one standard deviation around a start."""
        method, begin = self, cast(dict[str, Any], {"sd": self.sd})
        if self.warm_up == "auto":
            method = replace(self, warm_up=0.5)
        if prototype.problem.prior is not None:
            earlier, method = earlier_law(prototype), replace(self, warm_up=0.0)
            begin = {"start_precision": earlier.precision()} if self.kind == "dense" else {"sd": earlier.sd}
        return fit_gaussian(
            method,
            prototype,
            partial(self.build, begin=begin, prototype=prototype),
            self._law,
            prior=None,
            prior_in_objective=False,
            training=replace(prototype.problem.training, epochs=1),
            held=self._held(prototype),
        )

    def _held(self, prototype: Prototype) -> tuple[str, ...]:
        """Modules in evaluation mode: all of them where a batch is linearised; else as an example by itself needs."""
        if self.gauss_newton:
            return tuple(name for name, _ in prototype.prepared.named_modules())
        return prototype.noisy_held

    @property
    def _law(self) -> Callable[[Any], GaussianLaw]:
        return ekf_diag.law if self.kind == "diag" else ekf_dense.law

    def _doubts(self, around: AroundMode, law: GaussianLaw) -> tuple[Doubt, ...]:
        seed, family = around.prototype.problem.seed, "diagonal" if self.kind == "diag" else "dense"
        how: dict[str, Any] = {"temperature": self.temperature, "family": family, "seed": seed, "variational": False}
        return tuple(gaussian_doubts(around.coordinates, around.full_batch(), law, **how))

    def build(
        self,
        log_joint: LogJoint,
        training: Training,  # noqa: ARG002
        steps: int,  # noqa: ARG002
        num_data: int,  # noqa: ARG002
        begin: dict[str, Any],
        prototype: Prototype,
    ) -> Transform:
        """The filter, diagonal or dense."""
        module: Any = ekf_diag if self.kind == "diag" else ekf_dense
        how: dict[str, Any] = {"temperature": self.temperature, **begin}
        how["temperature"] *= prototype.data.readings  # one pass stands for N examples
        if not self.gauss_newton:
            each = scores_for(prototype, self._held(prototype))
            return module.build(log_joint, None, self.transition_sd, each=each, **how)
        form: Literal["diag", "full"] = "diag" if self.kind == "diag" else "full"
        shell = log_joint.shell  # type: ignore[attr-defined]
        curvature = BatchCurvature(shell, prototype.likelihood, prototype.data, form)
        return module.build(log_joint, None, self.transition_sd, curvature=curvature, **how)


def _centred(state: Any, law: Callable[[Any], GaussianLaw], center: Tensor) -> GaussianLaw:
    """The law of a state around another mean."""
    return replace(law(state), mean=center)
