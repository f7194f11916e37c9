"""Stochastic attention as a method: one set of weights, attention weights drawn in every pass."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bayesformer.attention import attention_kl, build_family, install
from bayesformer.dropout import set_dropout
from bayesformer.methods.members import buffers_of, facts_of, prior_of, run, task_of
from bayesformer.methods.problem import Problem
from bayesformer.methods.ranges import above, at_least, check_ranges, one_of, whole
from bayesformer.posterior import Posterior
from bayesformer.settings import LATER
from bayesformer.weights import Samples

STEPS = "attention_steps"
"""Buffer that counts training steps: buffers are part of a checkpoint, so annealing resumes where it was."""


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
    weight_prior: str | dict[str, str] | None = field(default=None, metadata=LATER)
    """law of the other weights, as for map; none leaves them free"""
    early_stopping: bool = field(default=False, metadata=LATER)
    """whether to keep the epoch at which mean attention scores best on validation data"""

    AFTER_TRAINING: ClassVar[tuple[str, ...]] = ("draws", "keep_dropout")

    def __post_init__(self) -> None:
        check_ranges(
            self,
            temperature=at_least(0),
            rho=above(0),
            annealing=one_of(("none", "linear", "sigmoid")),
            draws=whole(0),
        )
        build_family(self.family, **self._settings)
        if self.weight_prior is not None:
            prior_of(self.weight_prior)

    @property
    def _settings(self) -> dict[str, Any]:
        names = ("spread", "data_dependent", "length", "prior", "prior_scale", "prior_location", "hidden")
        return {name: getattr(self, name) for name in (*names, "gradient", "divergence")}

    def wrap(self, model: nn.Module) -> nn.Module:
        """A copy of the model with stochastic attention, and a counter of steps."""
        model = install(copy.deepcopy(model), self.family, self.subset, **self._settings)
        model.register_buffer(STEPS, torch.zeros((), device=next(model.parameters()).device), persistent=False)
        return model

    def fit(self, problem: Problem) -> Posterior:
        """Ascend the evidence lower bound, one draw per step."""
        cost = Cost(len(problem.data), self.temperature, self.annealing, self.rho)
        # A bound on the evidence needs no early stopping, and the score of mean attention would be another's.
        validation = problem.validation if self.early_stopping else None
        prior = None if self.weight_prior is None else prior_of(self.weight_prior)
        task = task_of(problem, "attention", validation=validation, prior=prior, prepare=self.wrap, penalty=cost)
        model, result = run(task, 1, problem)
        if not self.keep_dropout:
            set_dropout(model, 0.0)
        facts = facts_of("attention", self, problem, result)
        weights = Samples(result["theta"], buffers_of(result))
        return Posterior(model, problem.likelihood, weights, noisy_draws=self.draws, facts=facts)


@dataclass(frozen=True)
class Cost:
    """What attention costs, in nats for all data: N times the mean KL of the batch, weighted by the annealing."""

    num_data: int
    temperature: float
    annealing: str
    rho: float

    def __call__(self, model: nn.Module) -> Tensor:
        """The cost of the pass that was just made; counts a step."""
        steps = model.get_buffer(STEPS)
        cost = self.num_data * self.weight(steps) * attention_kl(model).mean()
        steps += 1
        return cost

    def weight(self, t: Tensor) -> Tensor:
        """Of the KL at step t, counted from 0. Fan et al. (2020), algorithm 1, for the sigmoid."""
        if self.annealing == "none":
            return torch.full_like(t, self.temperature)
        grown = torch.sigmoid(self.rho * t) if self.annealing == "sigmoid" else (self.rho * t).clamp_max(1)
        return self.temperature * grown
