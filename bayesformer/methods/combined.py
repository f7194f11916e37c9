"""Stochastic attention and a posterior over the weights of the same network."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from bayesformer.attention import build_family
from bayesformer.core.errors import unknown_name
from bayesformer.laplace.method import Laplace
from bayesformer.methods.averaging import Swag
from bayesformer.methods.layers import MeanField
from bayesformer.methods.points import Ensemble
from bayesformer.methods.sampling import Baoab, Sghmc
from bayesformer.methods.variational_weights import Ivon, Vi
from bayesformer.posterior import Posterior
from bayesformer.train.problem import Method, Problem

WEIGHTS: dict[str, type[Any]] = {
    "laplace": Laplace,
    "sghmc": Sghmc,
    "baoab": Baoab,
    "vi": Vi,
    "ivon": Ivon,
    "swag": Swag,
    "mean_field": MeanField,
    "ensemble": Ensemble,
}


@dataclass(frozen=True)
class Combined:
    """Stochastic attention with a posterior over the weights: each draw is of both."""

    family: Literal["gaussian", "dirichlet", "weibull", "lognormal"] = "weibull"
    """law of the attention weights"""
    attention: dict[str, Any] = field(default_factory=dict)
    """its settings, as those of the method attention that shape the law: spread, prior, prior_scale, ..."""
    weights: Literal["laplace", "sghmc", "baoab", "vi", "ivon", "swag", "mean_field", "ensemble"] = "sghmc"
    """what is inferred about the weights"""
    settings: dict[str, Any] = field(default_factory=dict)
    """of that method; laplace must predict by draws, the only way in which attention is random too"""

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise unknown_name("setting weights", self.weights, WEIGHTS)
        build_family(self.family, **self.attention)
        way = getattr(self.inner, "predictive", "sampled")
        if way != "sampled":
            raise ValueError(
                f"settings.predictive must be 'sampled' for {self.weights} with stochastic attention, whose draws go "
                f"through the network; got {way!r}."
            )

    @property
    def inner(self) -> Method:
        """The method that infers the weights, with its settings."""
        given = {"predictive": "sampled", **self.settings} if self.weights == "laplace" else self.settings
        return WEIGHTS[self.weights](**given)

    def fit(self, problem: Problem) -> Posterior:
        """The other method's posterior, on the model with stochastic attention; its KL is part of every objective."""
        preparation = problem.preparation.then("attention", family=self.family, **self.attention)
        posterior = self.inner.fit(replace(problem, preparation=preparation))
        return replace(posterior, facts={**posterior.facts, "method": {"name": "combined", **asdict(self)}})
