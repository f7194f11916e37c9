"""Posteriors over low-rank adapters of a frozen model: BLoB trains them, TFB finds them for trained adapters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bayesformer.core.ambient_autocast import without_autocast
from bayesformer.core.doubts import warn_of
from bayesformer.core.progress import bars
from bayesformer.core.rules import above, check_ranges, either, one_of, whole
from bayesformer.core.types import LogJoint, Transform
from bayesformer.data import as_batches
from bayesformer.inference import blob, schedules
from bayesformer.laws import Diagonal, GaussianLaw
from bayesformer.layers.blob_linear import FLIPOUTS, active_lora
from bayesformer.layers.preparation import Preparation
from bayesformer.likelihoods import Likelihood, as_likelihood
from bayesformer.likelihoods.predictive import CategoricalPredictive
from bayesformer.model.modes import check_eval
from bayesformer.model.space import Choice, Space
from bayesformer.posterior import Posterior
from bayesformer.train.members import Fitted, Stage, facts_of, fit_stage
from bayesformer.train.mode_doubts import with_training
from bayesformer.train.problem import Problem, settings_of
from bayesformer.train.prototype import Prototype, Start
from bayesformer.train.recipe import find_modes, posterior_of, refuse_earlier
from bayesformer.train.training import Training

A_WEIGHTS, ROOTS = "*lora_A*.weight", "*lora_A*.rho"
WARM_UP = 0.06  # share of the steps over which the rate of the KL rises


@dataclass(frozen=True)
class Blob:
    """Bayesian low-rank adaptation: a Gaussian over A of every LoRA layer, trained; B and heads stay points.

    Needs a PEFT model. Prediction draws A once for all examples and positions of a draw.
    """

    flipout: Literal["token", "example", "none"] = "token"
    """signs that make the noise of one draw differ within a batch in training: per token, per example, or not at all"""
    prior_sd: float = 0.2
    """standard deviation of A under the prior"""
    kl_lr: float = 0.01
    """step size of the KL, and of the standard deviations, whose rule is plain gradient descent"""
    epsilon: float | Literal["auto"] = "auto"
    """G, the root of the standard deviations, starts between ε/√2 and ε; auto is the published .05 at width 4096, and
    grows with the spread that A starts with at smaller widths"""
    cycle: int | Literal["auto"] = "auto"
    """steps in which the KL counts once; auto is 100 N^(π/8) / batch size, as published"""
    rising: bool = True
    """whether the weight of the KL doubles from step to step of a cycle, as published; else it is the same in all"""
    draws: int = 10
    """draws per prediction"""

    AFTER_TRAINING: ClassVar = ("draws",)

    def __post_init__(self) -> None:
        check_ranges(
            self,
            flipout=one_of(FLIPOUTS),
            prior_sd=above(0),
            kl_lr=above(0),
            epsilon=either(above(0), one_of(("auto",))),
            cycle=either(whole(1), one_of(("auto",))),
            draws=whole(1),
        )

    @property
    def preparation(self) -> Preparation:
        """A random A in the place of that of every adapter."""
        epsilon = None if self.epsilon == "auto" else self.epsilon
        return Preparation().then("blob", flipout=self.flipout, epsilon=epsilon)

    def fit(self, problem: Problem) -> Posterior:
        """Train means, standard deviations and all point weights together."""
        refuse_earlier(problem, "blob")
        prototype = Prototype(problem, self.preparation)
        fitted = fit_stage(self.stage(prototype), 1)
        law = _law(prototype, fitted, prototype.space.select(A_WEIGHTS))
        facts = with_training(facts_of("blob", self, prototype, fitted))
        return Posterior(
            model=prototype.model,
            likelihood=prototype.likelihood,
            law=law,
            space=prototype.chosen,
            preparation=problem.preparation,
            frozen=prototype.own_frozen,
            default_draws=self.draws,
            facts=facts,
        )

    def stage(self, prototype: Prototype) -> Stage:
        """The training of a prototype that has a random A in every adapter."""
        means, roots = (
            _index(prototype.space, prototype.space.select(pattern), prototype.skeleton.device)
            for pattern in (A_WEIGHTS, ROOTS)
        )
        build = partial(self.build, means=means, roots=roots)
        identity = {"settings": repr(replace(self, draws=1))}
        return Stage(prototype, "blob", prototype.problem.training, build=build, identity=identity)

    def build(
        self, log_joint: LogJoint, training: Training, steps: int, num_data: int, means: Tensor, roots: Tensor
    ) -> Transform:
        """The two optimisers of BLoB (inference.blob.build)."""
        published = max(1, int(100 * num_data ** (math.pi / 8) / training.batch_size))
        return blob.build(
            log_joint,
            means,
            roots,
            rule=training.adam(steps),
            kl_rate=schedules.warmup_linear(self.kl_lr, max(1, round(WARM_UP * steps)), steps),
            prior_sd=self.prior_sd,
            cycle=published if self.cycle == "auto" else self.cycle,
            rising=self.rising,
            clip=training.clip,
        )


def _index(whole: Space, part: Space, device: torch.device) -> Tensor:
    """(Q,): places of a part of the weights in the whole vector."""
    return torch.arange(whole.size, device=device)[whole.places(part, device)]


def _law(prototype: Prototype, fitted: Fitted, means: Space) -> GaussianLaw:
    """The Gaussian over the weights of the plain model: A has the spread G², the others are points."""
    values, plain = prototype.space.views(fitted.theta[0]), prototype.chosen
    mean = plain.pack({name: values[name] for name in plain.names})
    variance = means.pack({name: values[name.removesuffix("weight") + "rho"] for name in means.names}) ** 4
    place = plain.places(plain.select(means.names), mean.device)
    inner = GaussianLaw(mean[place], (slice(0, len(variance)),), (Diagonal(variance),), {})
    return replace(inner.at(mean, place), buffers={name: value[:1] for name, value in fitted.buffers.items()})


@dataclass(frozen=True)
class Tfb:
    """Training-free Bayesian adaptation: the widest isotropic noise on trained LoRA adapters that predictions bear.

    Needs a PEFT model. The adapters are trained first (`bf.tfb` takes them as they are).
    """

    tolerance: float = 0.1
    """largest relative rise of the negative log-likelihood of the network's own answers under the noise"""
    largest: float = 1.0
    """largest standard deviation of the noise that is tried"""
    anchors: int = 500
    """training examples on which it is tried, at most; their labels are not used"""
    samples: int = 10
    """draws of the noise per trial, the same in all trials"""
    iterations: int = 14
    """halvings of the search, on a logarithmic scale"""
    draws: int = 10
    """draws per prediction"""

    AFTER_TRAINING: ClassVar = ("tolerance", "largest", "anchors", "samples", "iterations", "draws")

    def __post_init__(self) -> None:
        check_ranges(
            self,
            tolerance=above(0),
            largest=above(0),
            anchors=whole(1),
            samples=whole(1),
            iterations=whole(1),
            draws=whole(1),
        )

    def fit(self, problem: Problem) -> Posterior:
        """Train the adapters, then find the noise."""
        refuse_earlier(problem, "tfb")
        prototype = Prototype(problem)
        adapters_in(prototype)
        modes = find_modes(prototype, "tfb", None, 1.0)
        assert modes.stage is not None
        return self.around(prototype, modes.start(0), with_training(facts_of("tfb", self, prototype, modes.stage)))

    def around(self, prototype: Prototype, mode: Start, facts: dict[str, Any]) -> Posterior:
        """The posterior around trained adapters.

            B = U diag(d) Vᵀ,   B' = U diag(d),  A' = Vᵀ A,   A'_ij ~ N(mean, (σ / d_i)²)

        so that c B'A' has the spread c σ in every direction of the span of U: one number for the whole network. σ is
        the largest whose draws raise the negative log-likelihood of the network's own answers on the anchors by at most
        `tolerance`. Shi et al. (2025), algorithm 1; they return the smallest σ that was refused and divide the rise by
        the number of anchors once more.
        """
        mean, inverse = _rotated(prototype, mode.theta)
        index = inverse.nonzero().squeeze(1)
        buffers = {name: value[None] for name, value in mode.buffers.items()}

        def posterior(sigma: float, found: dict[str, Any]) -> Posterior:
            variance = (sigma * inverse[index]).square()
            law = GaussianLaw(mean, (index,), (Diagonal(variance),), buffers)
            return posterior_of(prototype, law, {**facts, **found}, default_draws=self.draws)

        anchors = prototype.data.first(self.anchors).inputs
        plain = posterior(0.0, {})
        answers, base = _own_answers(plain, anchors)
        low, high = self.largest * 2.0**-self.iterations, self.largest
        rise = lambda sigma: _loss(posterior(sigma, {}), anchors, answers, self.samples) / base - 1  # noqa: E731
        if rise(high) > self.tolerance:
            for _ in range(self.iterations):
                middle = math.sqrt(low * high)
                low, high = (middle, high) if rise(middle) <= self.tolerance else (low, middle)
        else:
            low = high
        return posterior(low, {"sigma": low, "rise": rise(low), "own_loss": base})


@without_autocast
def tfb(
    model: nn.Module,
    data: Any,
    *,
    likelihood: Likelihood | str,
    infer: Choice = None,
    seed: int = 0,
    progress: bool | None = None,
    **settings: Any,
) -> Posterior:
    """The training-free posterior around LoRA adapters that are trained already; the model is left as it is.

        posterior = bayesformer.tfb(peft_model.eval(), data, likelihood="categorical")

    Args:
        model: a PEFT model in eval mode.
        data: examples on which the noise is tried, such as the training data; labels are only checked.
        likelihood: as for `fit`.
        infer: which weights belong to the posterior, as for `fit`; by default those that require a gradient.
        seed: of the draws.
        progress: show progress bars; by default on a terminal.
        settings: of `Tfb`: tolerance, largest, anchors, samples, iterations, draws.
    """
    check_eval(model, "dropout would add noise of its own to the noise that is looked for")
    method = Tfb(**settings)
    with bars(progress) as reporter:
        known = as_batches(data, "data")
        problem = Problem(model, as_likelihood(likelihood), known, None, seed=seed, infer=infer, reporter=reporter)
        prototype = Prototype(problem)
        adapters_in(prototype)
        facts: dict[str, Any] = {
            "method": {"name": "tfb", **settings_of(method)},
            "seed": seed,
            "num_data": problem.num_data,
            "data": problem.data.fingerprint(),
            "epochs": [0],
            "best_epoch": [0],
            "seconds": 0.0,
            "init": "given",
        }
        posterior = method.around(prototype, prototype.start(0), facts)
    warn_of(posterior.doubts)
    return posterior


def adapters_in(prototype: Prototype) -> list[tuple[str, str]]:
    """Names of (A, B) of all LoRA adapters that are inferred; an error if there are none."""
    found = []
    inferred = set(prototype.space.names)
    for path, layer in prototype.prepared.named_modules():
        for adapter in active_lora(layer):
            pair = f"{path}.lora_A.{adapter}.weight", f"{path}.lora_B.{adapter}.weight"
            if inferred.issuperset(pair):
                found.append(pair)
    if not found:
        raise ValueError(
            "model must have LoRA adapters that are inferred, for Tfb puts its noise on their A; got none. "
            "Use peft.get_peft_model(model, LoraConfig(...))."
        )
    return found


def _rotated(prototype: Prototype, theta: Tensor) -> tuple[Tensor, Tensor]:
    """(P,), (P,): weights with B' and A' in the place of B and A, and 1 / d_i at the entries of A', 0 elsewhere."""
    mean, inverse = theta.clone(), torch.zeros_like(theta)
    means, inverses = prototype.space.views(mean), prototype.space.views(inverse)
    if all(not bool(means[b].any()) for _, b in adapters_in(prototype)):
        raise ValueError(
            "adapters must be trained, for noise on A shows through B alone; every B is 0. Train them first."
        )
    for a, b in adapters_in(prototype):
        u, d, vt = torch.linalg.svd(means[b].double(), full_matrices=False)
        means[a].copy_(vt @ means[a].double())
        means[b].copy_(u * d)
        inverses[a].copy_((1 / (d + 1e-6)).unsqueeze(1).expand_as(means[a]))
    return mean, inverse


def _own_answers(plain: Posterior, inputs: Any) -> tuple[Tensor, float]:
    """The network's own answers on the anchors, and the mean of their negative log-likelihood without noise."""
    answers, losses = [], []
    for part in plain.predict_batches(inputs, draws=1, predictive="sampled", full=True):
        own = part.labels if isinstance(part, CategoricalPredictive) else part.mean  # type: ignore[attr-defined]
        answers.append(own)
        losses.append(-_log_prob(part, own))
    return torch.cat(answers), float(torch.cat([x.flatten() for x in losses]).double().mean())


def _loss(posterior: Posterior, inputs: Any, answers: Tensor, samples: int) -> float:
    """The mean negative log-likelihood of the answers; more draws come in smaller parts of the anchors."""
    losses, seen = [], 0
    for part in posterior.predict_batches(inputs, draws=samples, predictive="sampled", full=True):
        own = answers[seen : seen + part.shape[0]]
        losses.append(-_log_prob(part, own).flatten().double())
        seen += part.shape[0]
    return float(torch.cat(losses).mean())


def _log_prob(predictive: Any, answers: Tensor) -> Tensor:
    """Log averaged probability of answers at the positions of the predictions themselves."""
    if isinstance(predictive, CategoricalPredictive):
        return predictive.log_mean.gather(-1, answers.unsqueeze(-1)).squeeze(-1)
    found: Tensor = predictive.log_prob(answers)
    return found
