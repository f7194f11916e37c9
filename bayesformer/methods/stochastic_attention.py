"""Stochastic attention as a method: one set of weights, attention weights drawn in every pass."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bayesformer.attention import build_family
from bayesformer.core.rules import above, at_least, check_ranges, one_of, whole
from bayesformer.core.settings import LATER
from bayesformer.laws import Samples
from bayesformer.layers.preparation import STEPS, Preparation
from bayesformer.posterior import Posterior
from bayesformer.priors.setting import PriorSetting, prior_of
from bayesformer.train.members import Stage, facts_of, fit_stage
from bayesformer.train.mode_doubts import with_training
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import posterior_of, refuse_earlier, vector_prior


@dataclass(frozen=True)
class Attention:
    """Stochastic attention: attention weights are latent variables, drawn anew in every forward pass."""

    family: Literal["gaussian", "dirichlet", "weibull", "lognormal"] = "weibull"
    """law of the attention weights: Gaussian logits, Dirichlet rows, or normalised Weibull or Lognormal scores"""
    spread: float | None = None
    """sigma of gaussian and lognormal, sharpness of dirichlet, k of weibull; the first and third learn from there on"""
    data_dependent: bool = False
    """whether a small network gives the spread of each row (gaussian, dirichlet)"""
    length: int | None = None
    """longest sequence, for a learned spread per position or a network fed whole rows; none takes any length"""
    prior: Literal["fixed", "symmetric", "contextual"] = "fixed"
    """fixed; symmetric instead of centred on the logits (dirichlet); or read off the keys (weibull, lognormal)"""
    prior_scale: float | None = None
    """of the prior: sigma of gaussian and lognormal, sharpness of dirichlet, rate beta of weibull"""
    prior_location: float | None = None
    """of a fixed prior: shape alpha of weibull, mu of lognormal"""
    hidden: int = 5
    """width inside the network of a spread or of a contextual prior"""
    gradient: Literal["implicit", "surrogate"] = "implicit"
    """of dirichlet draws: of the exact law, or of an approximate inverse CDF"""
    divergence: Literal["dirichlet", "gamma"] = "dirichlet"
    """KL of dirichlet: of the weights, or of the Gamma draws before they are normalised"""
    temperature: float = 1.0
    """weight of the KL at the end: 1 is the evidence lower bound, 0 leaves it out"""
    annealing: Literal["none", "linear", "sigmoid"] = "sigmoid"
    """how the weight of the KL gets there: at once, as min(1, rho t) or as sigmoid(rho t) at step t from 0"""
    rho: float = 0.01
    """rate of annealing per step"""
    subset: str = "*"
    """name pattern of the attention modules that become stochastic"""
    draws: int = 30
    """forward passes per prediction; 0 predicts by mean attention, without noise"""
    keep_dropout: bool = field(default=True, metadata=LATER)
    """whether dropout, too, stays on in these passes"""
    weight_prior: PriorSetting | None = field(default=None, metadata=LATER)
    """law of the other weights, as for map; none leaves them free"""
    early_stopping: bool = field(default=False, metadata=LATER)
    """whether to keep the epoch at which mean attention scores best on validation data"""
    samples: int = field(default=1, metadata=LATER)
    """forward passes per step, each with draws of its own"""
    per_head: bool = field(default=False, metadata=LATER)
    """whether every head has a network of its own for a contextual prior"""

    AFTER_TRAINING: ClassVar[tuple[str, ...]] = ("draws", "keep_dropout")

    def __post_init__(self) -> None:
        check_ranges(
            self,
            temperature=at_least(0),
            rho=above(0),
            annealing=one_of(("none", "linear", "sigmoid")),
            draws=whole(0),
            samples=whole(1),
        )
        build_family(self.family, **self._settings)
        if self.weight_prior is not None:
            prior_of(self.weight_prior)

    @property
    def _settings(self) -> dict[str, Any]:
        names = ("spread", "data_dependent", "length", "prior", "prior_scale", "prior_location", "hidden")
        return {name: getattr(self, name) for name in (*names, "per_head", "gradient", "divergence")}

    @property
    def preparation(self) -> Preparation:
        """Families in the attention modules, and a counter of steps."""
        return Preparation().then("attention", family=self.family, names=self.subset, **self._settings)

    def fit(self, problem: Problem) -> Posterior:
        """Ascend the evidence lower bound."""
        refuse_earlier(problem, "attention")
        prototype = Prototype(problem, self.preparation)
        stage = Stage(
            prototype,
            "attention",
            problem.training,
            prior=vector_prior(prototype, self.weight_prior),
            # A bound on the evidence needs no early stopping, and the score of mean attention would be another's.
            validation=prototype.validation if self.early_stopping else None,
            kl_weight=Annealing(self.temperature, self.annealing, self.rho),
            samples=self.samples,
            # how it predicts is no part of the training, which cells that differ in that share
            identity={"settings": repr({k: v for k, v in asdict(self).items() if k not in ("draws", "keep_dropout")})},
        )
        fitted = fit_stage(stage, 1)
        return posterior_of(
            prototype,
            Samples(fitted.theta, fitted.buffers),
            with_training(facts_of("attention", self, prototype, fitted)),
            noisy_draws=self.draws,
            dropout_rate=None if self.keep_dropout else 0.0,
        )


@dataclass(frozen=True)
class Annealing:
    """The weight of the KL, which grows with the steps that a buffer of the module counts."""

    temperature: float
    kind: str
    rho: float

    def __call__(self, module: nn.Module) -> Tensor:
        """The weight in this step; counts it."""
        steps = module.get_buffer(STEPS)
        weight = self.weight(steps)
        steps += 1
        return weight

    def weight(self, t: Tensor) -> Tensor:
        """Of the KL at step t, counted from 0. Fan et al. (2020), algorithm 1, for the sigmoid."""
        if self.kind == "none":
            return torch.full_like(t, self.temperature)
        grown = torch.sigmoid(self.rho * t) if self.kind == "sigmoid" else (self.rho * t).clamp_max(1)
        return self.temperature * grown
