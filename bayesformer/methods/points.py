"""Methods that train networks and keep them as they are: Mle, Map, Ensemble, MCDropout."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bayesformer.core.doubts import Doubt, recorded, with_doubts
from bayesformer.core.rules import at_least, check_ranges, whole
from bayesformer.core.settings import LATER
from bayesformer.laws import Samples
from bayesformer.posterior import Posterior
from bayesformer.priors.setting import PriorSetting, prior_of
from bayesformer.train.adapter_penalty import AdapterPenalty, adapter_factors
from bayesformer.train.coordinates import polished
from bayesformer.train.members import Fitted, Stage, facts_of, fit_stage
from bayesformer.train.mode_doubts import of_mode, with_training
from bayesformer.train.objective import Term
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import Modes, posterior_of, subset_stage, vector_prior


@dataclass(frozen=True)
class Mle:
    """Maximum likelihood: one network, the baseline."""

    def fit(self, problem: Problem) -> Posterior:
        """Train one network without a prior; the posterior is its weights."""
        return fit_points("mle", self, Prototype(problem), 1)


@dataclass(frozen=True)
class Map:
    """Maximum a posteriori: one network with a prior on its weights."""

    prior: PriorSetting = "normal(0, 1)"
    """law of every weight, or a table of laws by name pattern; the library divides by N"""

    def __post_init__(self) -> None:
        prior_of(self.prior)

    def fit(self, problem: Problem) -> Posterior:
        """Train one network with the prior in its objective, then go on to the mode where that is cheap."""
        prototype = Prototype(problem)
        fitted = fit_members("map", prototype, 1, self.prior)
        part = subset_stage(prototype, Modes(fitted.theta, fitted.buffers, fitted), "*")
        part, decrement = polished(part, self.prior)
        facts = facts_of("map", self, prototype, fitted)
        if decrement is not None:
            facts |= {"decrement": decrement, **recorded(of_mode(decrement))}
        return posterior_of(prototype, Samples(part.starts[0].theta[None], fitted.buffers), facts)


ALIKE = Doubt(
    "starts",
    "All members start from the weights that were given and differ by the order of their data alone: their spread says "
    "little. Give a function that builds the model, init='fresh', or init='head' for a pretrained model.",
)


@dataclass(frozen=True)
class Ensemble:
    """Deep ensemble: networks with data orders of their own, averaged; a function that builds models gives starts."""

    members: int = 10
    """networks to train"""
    adapter_penalty: float = field(default=0.0, metadata=LATER)
    """λ of a penalty λ Σ ‖BA‖² on what LoRA adapters add to the weights, beside the mean loss per example; it keeps
    members apart for longer (Balabanov & Linander 2024, who take 1)"""

    def __post_init__(self) -> None:
        check_ranges(self, members=whole(1), adapter_penalty=at_least(0))

    def fit(self, problem: Problem) -> Posterior:
        """Train all members, each with its own start and order of the data."""
        prototype = Prototype(problem)
        terms: tuple[Term, ...] = ()
        if self.adapter_penalty:
            if not any(True for _ in adapter_factors(prototype.prepared)):
                raise ValueError(
                    "ensemble.adapter_penalty must be 0 for a model without LoRA adapters that are trained, on which "
                    f"it is put; got {self.adapter_penalty}."
                )
            terms = (AdapterPenalty(self.adapter_penalty),)
        found = fit_points("ensemble", self, prototype, self.members, terms=terms)
        alike = self.members > 1 and torch.equal(prototype.start(0).theta, prototype.start(1).theta)
        return replace(found, facts=with_doubts(found.facts, [ALIKE])) if alike else found


@dataclass(frozen=True)
class MCDropout:
    """MC dropout: one network trained with dropout, which stays on for prediction, attention included."""

    rate: float | None = 0.1
    """dropout rate in force wherever the model drops, attention weights too; none keeps the model's own rates"""
    draws: int = 30
    """forward passes per prediction"""

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < 1:
            raise ValueError(f"mc_dropout.rate must lie strictly between 0 and 1, or be none; got {self.rate}.")
        if self.draws < 1:
            raise ValueError(f"mc_dropout.draws must be at least 1; got {self.draws}.")

    def fit(self, problem: Problem) -> Posterior:
        """Train with dropout and keep it on."""
        prototype = Prototype(problem, dropout_rate=self.rate)
        if prototype.randomness.kind == "none":
            raise ValueError(
                "mc_dropout needs a model with dropout; a training pass of this one draws no random numbers. "
                "Give it nn.Dropout modules, or rates above 0 with mc_dropout.rate=none."
            )
        return fit_points("mc_dropout", self, prototype, 1, noisy_draws=self.draws, dropout_rate=self.rate)


def fit_points(
    name: str,
    method: object,
    prototype: Prototype,
    members: int,
    prior: PriorSetting | None = None,
    terms: tuple[Term, ...] = (),
    **how: Any,
) -> Posterior:
    """Train `members` networks and hold them, with their buffers, as a posterior."""
    fitted = fit_members(name, prototype, members, prior, terms)
    facts = with_training(facts_of(name, method, prototype, fitted))
    return posterior_of(prototype, Samples(fitted.theta, fitted.buffers), facts, bayesian=False, **how)


def fit_members(
    name: str, prototype: Prototype, members: int, prior: PriorSetting | None = None, terms: tuple[Term, ...] = ()
) -> Fitted:
    """Train `members` networks as the problem's training says, with further terms in the objective."""
    stage = Stage(
        prototype,
        name,
        prototype.problem.training,
        prior=vector_prior(prototype, prior),
        validation=prototype.validation,
        terms=terms,
        identity={"prior": repr(prior), **({"terms": repr(terms)} if terms else {})},
    )
    return fit_stage(stage, members)
