"""Methods whose network is itself random: mean-field variational weights and concrete dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from bayesformer.layers import convert, convert_concrete, kl_divergence
from bayesformer.methods.members import facts_of, prior_of, run, task_of
from bayesformer.methods.problem import Problem, check_ranges
from bayesformer.posterior import Posterior
from bayesformer.weights import Samples


@dataclass(frozen=True)
class MeanField:
    """Mean-field variational weights of five families, with local reparameterisation where it exists."""

    family: Literal["gaussian", "cauchy", "laplace", "logistic", "student_t"] = "gaussian"
    """law of every weight under the posterior"""
    prior: str | dict[str, str] = "normal(0, 1)"
    """law of every weight before the data, a table of laws by name pattern, or improved/m1 and its like"""
    subset: str = "*"
    """name pattern of the random weights; the others are trained as points"""
    temperature: float = 1.0
    """weight of the KL: 1 is the evidence lower bound, below 1 is cold; the library divides by N"""
    local: bool = True
    """draw outputs of linear layers instead of weights, where the family is closed under sums"""
    flipout: bool = False
    """flip the signs of weight draws per example, where outputs are not drawn"""
    rho: float = -7.0
    """where the scales start, before softplus"""
    draws: int = 30
    """forward passes per prediction"""

    def __post_init__(self) -> None:
        check_ranges(self, temperature=self.temperature >= 0, draws=self.draws >= 1)
        prior_of(self.prior)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model with random weights."""
        return convert(
            model,
            self.family,
            prior_of(self.prior),
            self.subset,
            local=self.local,
            flipout=self.flipout,
            rho=self.rho,
        )

    def fit(self, problem: Problem) -> Posterior:
        """Ascend the evidence lower bound."""
        return _fit("mean_field", self, problem)


@dataclass(frozen=True)
class ConcreteDropout:
    """Concrete dropout: dropout whose rate is learned at every linear layer and attention."""

    low: float = 0.1
    """smallest rate to start from"""
    high: float = 0.5
    """largest rate to start from"""
    relaxation: float = 0.1
    """temperature of the relaxed masks"""
    lengthscale: float = 1e-2
    """of the Gaussian prior that the regulariser stands for; larger pulls the weights harder to 0"""
    subset: str = "*"
    """name pattern of the modules with dropout"""
    attention: bool = True
    """whether attention weights are dropped too"""
    temperature: float = 1.0
    """weight of the regulariser; the library divides by N"""
    draws: int = 30
    """forward passes per prediction"""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            low=0 < self.low < 1,
            high=self.low <= self.high < 1,
            relaxation=self.relaxation > 0,
            lengthscale=self.lengthscale >= 0,
            temperature=self.temperature >= 0,
            draws=self.draws >= 1,
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model with its dropout sites."""
        return convert_concrete(
            model, (self.low, self.high), self.relaxation, self.lengthscale, self.subset, self.attention
        )

    def fit(self, problem: Problem) -> Posterior:
        """Train weights and rates together."""
        return _fit("concrete_dropout", self, problem)


def _fit(name: str, method: Any, problem: Problem) -> Posterior:
    task = task_of(
        problem,
        name,
        validation=None,  # a bound on the evidence needs no early stopping
        prepare=method.wrap,
        penalty=Penalty(method.temperature),
    )
    model, result = run(task, 1, problem)
    facts = facts_of(name, method, problem, result)
    return Posterior(model, problem.likelihood, Samples(result["theta"]), noisy_draws=method.draws, facts=facts)


@dataclass(frozen=True)
class Penalty:
    """What the random weights cost, in nats for all data; an object so that worker processes can have it."""

    temperature: float

    def __call__(self, model: nn.Module) -> Tensor:
        """Temperature times KL."""
        return self.temperature * kl_divergence(model)
