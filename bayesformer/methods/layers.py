"""Methods whose network is itself random: mean-field variational weights and concrete dropout."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch

from bayesformer.core.rules import above, at_least, between, check_ranges, one_of, whole, within
from bayesformer.core.settings import LATER
from bayesformer.laws import Samples, buffers_of, gaussian
from bayesformer.layers import Variational
from bayesformer.layers.preparation import Preparation
from bayesformer.model.space import Space
from bayesformer.posterior import Posterior
from bayesformer.predict.ways import WAYS, Way
from bayesformer.priors.setting import PriorSetting, prior_of
from bayesformer.train.members import Stage, facts_of, fit_stage
from bayesformer.train.objective import Constant
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import posterior_of, refuse_earlier


@dataclass(frozen=True)
class MeanField:
    """Mean-field variational weights of five families, with local reparameterisation where it exists."""

    family: Literal["gaussian", "cauchy", "laplace", "logistic", "student_t"] = "gaussian"
    """law of every weight under the posterior"""
    prior: PriorSetting = "normal(0, 1)"
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
    samples: int = field(default=1, metadata=LATER)
    """forward passes per step, each with draws of its own"""

    AFTER_TRAINING: ClassVar = ("draws", "predictive")

    def __post_init__(self) -> None:
        check_ranges(self, temperature=at_least(0), draws=whole(1), samples=whole(1), predictive=one_of(WAYS))
        prior_of(self.prior)
        if self.predictive != "sampled" and self.family != "gaussian":
            raise ValueError(
                f"meanfield.predictive must be 'sampled' unless family is 'gaussian'; got {self.predictive!r} with "
                f"family={self.family!r}."
            )

    @property
    def preparation(self) -> Preparation:
        """Random weights in the model's place."""
        names = ("family", "prior", "local", "flipout", "rho")
        return Preparation().then("variational", names=self.subset, **{name: getattr(self, name) for name in names})

    def fit(self, problem: Problem) -> Posterior:
        """Ascend the evidence lower bound."""
        posterior = _fit("mean_field", self, problem)
        return posterior if self.predictive == "sampled" else self._gaussian(posterior)

    def _gaussian(self, posterior: Posterior) -> Posterior:
        """The same law as a Gaussian over the weights of the plain model."""
        random = posterior.skeleton.plain(posterior.theta[0], buffers_of(posterior.law, 0))
        assert isinstance(random, Variational)
        space, scales = Space.of(posterior.model, posterior.infer), random.scales()
        own = dict(random.model.named_parameters(remove_duplicate=False))
        sd = space.pack({name: scales.get(name, torch.zeros_like(own[name])) for name in space.names})
        buffers = {k.removeprefix("model."): v for k, v in posterior.law.buffers.items() if k.startswith("model.")}
        law = gaussian(space.pack(own), sd, buffers=buffers)
        return replace(
            posterior,
            law=law,
            space=space,
            preparation=Preparation(),
            noisy_draws=0,
            held=(),
            default_draws=self.draws,
            predictive=self.predictive,
        )


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
    samples: int = field(default=1, metadata=LATER)
    """forward passes per step, each with draws of its own"""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            low=between(0, 1),
            high=within(self.low, 1),
            relaxation=above(0),
            lengthscale=at_least(0),
            temperature=at_least(0),
            draws=whole(1),
            samples=whole(1),
        )

    @property
    def preparation(self) -> Preparation:
        """A site before every linear layer."""
        return Preparation().then(
            "concrete_dropout",
            rate=[self.low, self.high],
            temperature=self.relaxation,
            lengthscale=self.lengthscale,
            names=self.subset,
            attention=self.attention,
        )

    def fit(self, problem: Problem) -> Posterior:
        """Train weights and rates together."""
        return _fit("concrete_dropout", self, problem)


def _fit(name: str, method: MeanField | ConcreteDropout, problem: Problem) -> Posterior:
    refuse_earlier(problem, name)
    prototype = Prototype(problem, method.preparation)
    stage = Stage(
        prototype,
        name,
        problem.training,
        kl_weight=Constant(method.temperature),
        samples=method.samples,
        identity={"settings": repr(method)},
    )  # no validation data: a bound on the evidence needs no early stopping
    fitted = fit_stage(stage, 1)
    facts = facts_of(name, method, prototype, fitted)
    return posterior_of(prototype, Samples(fitted.theta, fitted.buffers), facts, noisy_draws=method.draws)
