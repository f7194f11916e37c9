"""Methods whose network is itself random: mean-field variational weights and concrete dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bayesformer.layers import Variational, convert, convert_concrete, kl_divergence
from bayesformer.methods.members import facts_of, prior_of, run, task_of
from bayesformer.methods.problem import Problem
from bayesformer.methods.ranges import above, at_least, between, check_ranges, one_of, whole, within
from bayesformer.network import FlatModel, Layout
from bayesformer.posterior import WAYS, Posterior, Way
from bayesformer.settings import LATER
from bayesformer.weights import GaussianWeights, Samples


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
    predictive: Way = field(default="sampled", metadata=LATER)
    """from weights to outputs: sampled; or, of a Gaussian, linearised or streamlined (moments in one forward pass)"""

    AFTER_TRAINING: ClassVar = ("draws", "predictive")

    def __post_init__(self) -> None:
        check_ranges(self, temperature=at_least(0), draws=whole(1), predictive=one_of(WAYS))
        prior_of(self.prior)
        if self.predictive != "sampled" and self.family != "gaussian":
            raise ValueError(
                f"meanfield.predictive must be 'sampled' unless family is 'gaussian'; got {self.predictive!r} with "
                f"family={self.family!r}."
            )

    def random(self, model: nn.Module) -> Variational:
        """The model with random weights, which is trained."""
        return convert(
            model,
            self.family,
            prior_of(self.prior),
            self.subset,
            local=self.local,
            flipout=self.flipout,
            rho=self.rho,
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model of the posterior: with random weights if they are drawn inside, else as it is."""
        return self.random(model) if self.predictive == "sampled" else model

    def fit(self, problem: Problem) -> Posterior:
        """Ascend the evidence lower bound."""
        posterior = _fit("mean_field", self, problem, self.random)
        return posterior if self.predictive == "sampled" else self._gaussian(posterior)

    def _gaussian(self, posterior: Posterior) -> Posterior:
        """The same law as a Gaussian over the weights of the plain model."""
        trained = FlatModel(posterior.model)
        trained.load(posterior.theta[0])
        random = trained.module
        assert isinstance(random, Variational)
        model, scales = random.point(), random.scales()
        model.zero_grad(set_to_none=True)
        layout, own = Layout.of(model), dict(model.named_parameters())
        sd = layout.pack({name: scales.get(name, torch.zeros_like(value)) for name, value in own.items()})
        law = GaussianWeights(layout.pack(own), sd.detach())
        way: dict[str, Any] = {"default_draws": self.draws, "predictive": self.predictive}
        return Posterior(model, posterior.likelihood, law, facts=posterior.facts, **way)


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
            low=between(0, 1),
            high=within(self.low, 1),
            relaxation=above(0),
            lengthscale=at_least(0),
            temperature=at_least(0),
            draws=whole(1),
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model with its dropout sites."""
        return convert_concrete(
            model, (self.low, self.high), self.relaxation, self.lengthscale, self.subset, self.attention
        )

    def fit(self, problem: Problem) -> Posterior:
        """Train weights and rates together."""
        return _fit("concrete_dropout", self, problem, self.wrap)


def _fit(name: str, method: Any, problem: Problem, prepare: Callable[[nn.Module], nn.Module]) -> Posterior:
    task = task_of(
        problem,
        name,
        validation=None,  # a bound on the evidence needs no early stopping
        prepare=prepare,
        penalty=Penalty(method.temperature, len(problem.data)),
    )
    model, result = run(task, 1, problem)
    facts = facts_of(name, method, problem, result)
    return Posterior(model, problem.likelihood, Samples(result["theta"]), noisy_draws=method.draws, facts=facts)


@dataclass(frozen=True)
class Penalty:
    """What the random weights cost, in nats for all data; an object so that worker processes can have it."""

    temperature: float
    num_data: int

    def __call__(self, model: nn.Module) -> Tensor:
        """Temperature times KL; attention's, if it is stochastic, as the mean of the batch for every example."""
        return self.temperature * self.num_data * kl_divergence(model, num_data=self.num_data).mean()
