"""Methods whose network is itself random: mean-field variational weights and concrete dropout."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from bayesformer.core.rules import above, at_least, between, check_ranges, one_of, whole, within
from bayesformer.core.settings import LATER
from bayesformer.laws import Samples
from bayesformer.layers import Variational
from bayesformer.layers.preparation import Preparation
from bayesformer.layers.weight_law import weight_law
from bayesformer.posterior import Posterior
from bayesformer.predict.ways import WAYS, Way
from bayesformer.priors.setting import PriorSetting, prior_of
from bayesformer.train.members import Fitted, Stage, facts_of, fit_stage
from bayesformer.train.mode_doubts import with_training
from bayesformer.train.objective import Constant
from bayesformer.train.problem import Problem, settings_of
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import posterior_of, refuse_earlier


@dataclass(frozen=True)
class MeanField:
    """Mean-field variational weights of five families, with local reparameterisation where it exists.

    Training may draw outputs in the place of weights (`local`, `flipout`), for gradients of less variance. Prediction
    draws the weights themselves, once for all examples and positions of a draw, in evaluation mode.
    """

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
    """from weights to outputs: sampled; or, of a Gaussian, linearised, streamlined (a few passes) or one_pass"""
    samples: int = field(default=1, metadata=LATER)
    """forward passes per step, each with draws of its own"""
    predict_local: bool = field(default=False, metadata=LATER)
    """predict with the noise of training, own for every example and position, in place of draws of the weights"""

    AFTER_TRAINING: ClassVar = ("draws", "predictive", "predict_local")

    def __post_init__(self) -> None:
        check_ranges(self, temperature=at_least(0), draws=whole(1), samples=whole(1), predictive=one_of(WAYS))
        prior_of(self.prior)
        if self.predictive != "sampled" and self.family != "gaussian":
            raise ValueError(
                f"mean_field.predictive must be 'sampled' unless family is 'gaussian'; got {self.predictive!r} with "
                f"family={self.family!r}."
            )
        if self.predict_local and self.predictive != "sampled":
            raise ValueError(
                f"mean_field.predictive must be 'sampled' with predict_local, whose noise is drawn inside the network; "
                f"got {self.predictive!r}."
            )

    @property
    def preparation(self) -> Preparation:
        """Random weights in the model's place."""
        names = ("family", "prior", "local", "flipout", "rho")
        return Preparation().then("variational", subset=self.subset, **{name: getattr(self, name) for name in names})

    def fit(self, problem: Problem) -> Posterior:
        """Ascend the evidence lower bound."""
        prototype, fitted = _train("mean_field", self, problem)
        random = _random_network("mean_field", self, prototype, fitted)
        if self.predict_local:
            return random
        assert isinstance(prototype.prepared, Variational)
        values = prototype.space.views(fitted.theta[0])
        space, law = weight_law(prototype.prepared, values, fitted.buffers)
        return replace(
            random,
            law=law,
            space=space,
            preparation=problem.preparation,
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
        return _random_network("concrete_dropout", self, *_train("concrete_dropout", self, problem))


def _train(name: str, method: MeanField | ConcreteDropout, problem: Problem) -> tuple[Prototype, Fitted]:
    refuse_earlier(problem, name)
    prototype = Prototype(problem, method.preparation)
    after = getattr(type(method), "AFTER_TRAINING", ())
    settings = {name: repr(value) for name, value in settings_of(method).items() if name not in after}
    stage = Stage(
        prototype,
        name,
        problem.training,
        kl_weight=Constant(method.temperature),
        samples=method.samples,
        identity={"settings": settings},
    )  # no validation data: a bound on the evidence needs no early stopping
    return prototype, fit_stage(stage, 1)


def _random_network(name: str, method: MeanField | ConcreteDropout, prototype: Prototype, fitted: Fitted) -> Posterior:
    """The posterior whose draws are noisy passes of the trained network."""
    facts = with_training(facts_of(name, method, prototype, fitted))
    return posterior_of(prototype, Samples(fitted.theta, fitted.buffers), facts, noisy_draws=method.draws)
