"""Methods made of trained networks: one, one with a prior, several, or one with dropout left on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from bayesformer.dataset import Data
from bayesformer.dropout import dropout_sites, set_dropout
from bayesformer.laws.weights import Samples
from bayesformer.network import device_of, is_stochastic
from bayesformer.posterior import Posterior
from bayesformer.priors.prior import Prior
from bayesformer.train.members import buffers_of, facts_of, prior_of, run, task_of
from bayesformer.train.problem import Problem


@dataclass(frozen=True)
class Mle:
    """Maximum likelihood: one network, no uncertainty in the weights."""

    def fit(self, problem: Problem) -> Posterior:
        """Train one network."""
        return fit_members("mle", self, problem, 1)


@dataclass(frozen=True)
class Map:
    """Maximum a posteriori: one network, pulled towards a prior over the weights."""

    prior: str | dict[str, str] = "normal(0, 1)"
    """law of every weight, e.g. "normal(0, 0.5)", or a table of laws by name pattern"""

    def __post_init__(self) -> None:
        prior_of(self.prior)

    def fit(self, problem: Problem) -> Posterior:
        """Train one network with the prior in its objective."""
        return fit_members("map", self, problem, 1, prior=prior_of(self.prior))


@dataclass(frozen=True)
class Ensemble:
    """Deep ensemble: independent networks from different starts and data orders, averaged."""

    members: int = 10
    """networks to train"""
    init: Literal["fresh", "given"] = "fresh"
    """start each member from new random weights, or all from the weights given"""

    def __post_init__(self) -> None:
        if self.members < 1:
            raise ValueError(f"ensemble.members must be at least 1; got {self.members}.")
        if self.init not in {"fresh", "given"}:
            raise ValueError(f"ensemble.init must be 'fresh' or 'given'; got {self.init!r}.")

    def fit(self, problem: Problem) -> Posterior:
        """Train all members."""
        return fit_members("ensemble", self, problem, self.members, init=self.init)


@dataclass(frozen=True)
class MCDropout:
    """MC dropout: one network trained with dropout, which stays on for prediction, attention included."""

    rate: float | None = 0.1
    """dropout rate set at every site, attention weights too; none keeps the model's own rates"""
    draws: int = 30
    """forward passes per prediction"""

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < 1:
            raise ValueError(f"mc_dropout.rate must lie strictly between 0 and 1, or be none; got {self.rate}.")
        if self.draws < 1:
            raise ValueError(f"mc_dropout.draws must be at least 1; got {self.draws}.")

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model with its dropout rates set."""
        set_dropout(model, self.rate)
        return model

    def fit(self, problem: Problem) -> Posterior:
        """Train with dropout and keep it on."""
        task = task_of(problem, "mc_dropout", prepare=self.wrap)
        _check_random(task.model(0).train(), problem.data)
        posterior = fit_members("mc_dropout", self, problem, 1, prepare=self.wrap)
        return replace(posterior, noisy_draws=self.draws)


def _check_random(model: nn.Module, data: Data) -> None:
    if not is_stochastic(model, data.to(device_of(model)).inputs):
        raise ValueError(
            f"mc_dropout needs a model with dropout; this one has {len(dropout_sites(model))} dropout sites and two "
            "training passes agree exactly. Give mc_dropout.rate, or add nn.Dropout modules."
        )


def fit_members(
    name: str,
    method: Any,
    problem: Problem,
    members: int,
    init: Literal["fresh", "given"] = "given",
    prior: Prior | None = None,
    prepare: Callable[[nn.Module], nn.Module] | None = None,
) -> Posterior:
    """Train `members` networks through the engine and hold them as a posterior."""
    task = task_of(problem, name, init=init, prior=prior, prepare=prepare)
    model, result = run(task, members, problem)
    facts = facts_of(name, method, problem, result)
    return Posterior(model, problem.likelihood, Samples(result["theta"], buffers_of(result)), facts=facts)
