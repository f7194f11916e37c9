"""The five variational families of a weight, and their KL to a prior.

    w = loc + scale z,    scale = softplus(rho),    z standard noise of the family

Every family here is elementwise over tensors of parameters. Noise is drawn apart from location and scale: with
fixed z a draw is differentiable in both, and log q(w) = log f(z) - log scale needs no w - loc, which would
cancel badly at small scales. Only Student's t has a z that depends on a parameter, its degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bayesformer.core import standard_noise
from bayesformer.core.draws import normal_like
from bayesformer.priors import distributions as priors
from bayesformer.priors.distributions import Distribution

T = TypeVar("T", bound="WeightFamily")


@dataclass(frozen=True, eq=False)
class WeightFamily:
    """A location-scale family over a vector of weights, each with parameters of its own."""

    loc: Tensor
    scale: Tensor

    raw: ClassVar[tuple[str, ...]] = ("rho",)
    """names of its unconstrained parameters besides the location"""

    @classmethod
    def of(cls: type[T], loc: Tensor, rho: Tensor) -> T:
        """The family at unconstrained parameters: scale = softplus(rho)."""
        return cls(loc, softplus(rho))

    def noise(self) -> Tensor:
        """Standard noise z, one number per weight."""
        raise NotImplementedError

    def log_noise(self, z: Tensor) -> Tensor:
        """Log density of the standard noise at z, elementwise."""
        raise NotImplementedError

    def rsample(self) -> Tensor:
        """A draw of every weight, differentiable in every parameter."""
        return torch.addcmul(self.loc, self.scale, self.noise())

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density of every weight at `x`."""
        return self.log_noise((x - self.loc) / self.scale) - self.scale.log()

    def __getitem__(self: T, part: slice) -> T:
        """The law of some of the weights."""
        return type(self)(*(getattr(self, field.name)[part] for field in fields(self)))


class GaussianWeights(WeightFamily):
    """Weights of law N(loc, scale²), independent of each other."""

    def noise(self) -> Tensor:
        """Standard normal numbers, one per weight."""
        return normal_like(self.loc)

    def log_noise(self, z: Tensor) -> Tensor:
        """Log density -½ z² - ½ log 2π of the noise."""
        return priors.Normal().log_prob(z)


class CauchyWeights(WeightFamily):
    """Cauchy weights. They have no mean: average probabilities under them, never logits."""

    def noise(self) -> Tensor:
        """Standard Cauchy numbers tan π(u - ½), one per weight."""
        return standard_noise.cauchy_like(self.loc)

    def log_noise(self, z: Tensor) -> Tensor:
        """Log density -log π(1 + z²) of the noise."""
        return priors.Cauchy().log_prob(z)


class LaplaceWeights(WeightFamily):
    """Weights of density exp(-|z|) / (2 scale), z = (w - loc) / scale."""

    def noise(self) -> Tensor:
        """Numbers of density exp(-|z|) / 2, one per weight."""
        return standard_noise.laplace_like(self.loc)

    def log_noise(self, z: Tensor) -> Tensor:
        """Log density -|z| - log 2 of the noise."""
        return priors.LaplaceDistribution().log_prob(z)


class LogisticWeights(WeightFamily):
    """Weights whose CDF is the sigmoid of (w - loc) / scale."""

    def noise(self) -> Tensor:
        """Standard logistic numbers log u/(1 - u), one per weight."""
        return standard_noise.logistic_like(self.loc)

    def log_noise(self, z: Tensor) -> Tensor:
        """Log density -z - 2 softplus(-z) of the noise."""
        return priors.Logistic().log_prob(z)


@dataclass(frozen=True, eq=False)
class StudentTWeights(WeightFamily):
    """Student-t weights with learned degrees of freedom, ν = 2 + softplus(raw_df): the variance is finite.

    See `standard_noise.student_like` for z. (Cinquin et al. (2021) write z = λ ε, which is not Student's t.)
    """

    df: Tensor

    raw: ClassVar[tuple[str, ...]] = ("rho", "raw_df")

    @classmethod
    def of(cls, loc: Tensor, rho: Tensor, raw_df: Tensor) -> StudentTWeights:  # type: ignore[override]
        """The family at unconstrained parameters: scale = softplus(rho), ν = 2 + softplus(raw_df)."""
        return cls(loc, softplus(rho), 2 + softplus(raw_df))

    def noise(self) -> Tensor:
        """Standard Student-t numbers with ν = `df`, one per weight, differentiable in ν."""
        return standard_noise.student_like(self.loc, self.df)

    def log_noise(self, z: Tensor) -> Tensor:
        """Log density -½(ν + 1) log(1 + z²/ν) + log Γ((ν + 1)/2) - log Γ(ν/2) - ½ log νπ of the noise."""
        half = 0.5 * (self.df + 1)
        constant = torch.lgamma(half) - torch.lgamma(0.5 * self.df) - 0.5 * (self.df * math.pi).log()
        return constant - half * torch.log1p(z * z / self.df)


FAMILIES: dict[str, type[WeightFamily]] = {
    "gaussian": GaussianWeights,
    "cauchy": CauchyWeights,
    "laplace": LaplaceWeights,
    "logistic": LogisticWeights,
    "student_t": StudentTWeights,
}


# KL(q ‖ p) = -H(q) - E_q log p where the expectation is known. d is the distance of the locations, r the
# ratio of the scales where both are of one family; those forms are exactly 0 at equality.


def _gaussian_normal(q: GaussianWeights, p: priors.Normal) -> Tensor:
    r, d = q.scale / p.scale, (q.loc - p.loc) / p.scale
    return 0.5 * (r * r + d * d - 1) - r.log()


def _laplace_laplace(q: LaplaceWeights, p: priors.LaplaceDistribution) -> Tensor:
    r, d = q.scale / p.scale, (q.loc - p.loc).abs()
    return r * torch.exp(-d / q.scale) + d / p.scale - 1 - r.log()


def _cauchy_cauchy(q: CauchyWeights, p: priors.Cauchy) -> Tensor:
    """Chyzak & Nielsen (2019): log[((s + s₀)² + d²) / 4 s s₀]."""
    gap = (q.scale - p.scale).square() + (q.loc - p.loc).square()
    return torch.log1p(gap / (4 * p.scale * q.scale))


def _normal_prior(q: WeightFamily, variance: Tensor, negentropy: Tensor, p: priors.Normal) -> Tensor:
    second = variance + (q.loc - p.loc).square()
    return negentropy + 0.5 * second / p.scale**2 + math.log(p.scale * math.sqrt(2 * math.pi))


def _laplace_normal(q: LaplaceWeights, p: priors.Normal) -> Tensor:
    return _normal_prior(q, 2 * q.scale.square(), -1 - (2 * q.scale).log(), p)


def _logistic_normal(q: LogisticWeights, p: priors.Normal) -> Tensor:
    return _normal_prior(q, math.pi**2 / 3 * q.scale.square(), -2 - q.scale.log(), p)


def _student_normal(q: StudentTWeights, p: priors.Normal) -> Tensor:
    """Variance s² ν/(ν - 2); H = (ν+1)/2 [ψ((ν+1)/2) - ψ(ν/2)] + log √ν B(ν/2, ½) + log s."""
    half = 0.5 * q.df
    log_beta = torch.lgamma(half) + 0.5 * math.log(math.pi) - torch.lgamma(half + 0.5)
    digammas = torch.digamma(half + 0.5) - torch.digamma(half)
    entropy = (half + 0.5) * digammas + 0.5 * q.df.log() + log_beta + q.scale.log()
    return _normal_prior(q, q.scale.square() * q.df / (q.df - 2), -entropy, p)


def _gaussian_laplace(q: GaussianWeights, p: priors.LaplaceDistribution) -> Tensor:
    """E|x - m| of a Gaussian is the mean of a folded normal."""
    d = (q.loc - p.loc) / q.scale
    absolute = q.scale * (math.sqrt(2 / math.pi) * torch.exp(-0.5 * d * d) + d * torch.erf(d / math.sqrt(2)))
    return absolute / p.scale + math.log(2 * p.scale) - 0.5 * math.log(2 * math.pi * math.e) - q.scale.log()


def _logistic_laplace(q: LogisticWeights, p: priors.LaplaceDistribution) -> Tensor:
    """E|x - m| of a logistic is 2 s log(2 cosh(d / 2s))."""
    d = (q.loc - p.loc) / q.scale
    absolute = q.scale * (d + 2 * softplus(-d))
    return absolute / p.scale + math.log(2 * p.scale) - 2 - q.scale.log()


CLOSED: dict[tuple[type[WeightFamily], type[Any]], Callable[[Any, Any], Tensor]] = {
    (GaussianWeights, priors.Normal): _gaussian_normal,
    (LaplaceWeights, priors.LaplaceDistribution): _laplace_laplace,
    (CauchyWeights, priors.Cauchy): _cauchy_cauchy,
    (LaplaceWeights, priors.Normal): _laplace_normal,
    (LogisticWeights, priors.Normal): _logistic_normal,
    (StudentTWeights, priors.Normal): _student_normal,
    (GaussianWeights, priors.LaplaceDistribution): _gaussian_laplace,
    (LogisticWeights, priors.LaplaceDistribution): _logistic_laplace,
}

INFINITE = {(CauchyWeights, prior) for prior in (priors.Normal, priors.LaplaceDistribution, priors.Logistic)}
"""Pairs whose KL is infinite: the prior's log density has no mean under a Cauchy."""


def closed_kl(q: WeightFamily, prior: Distribution) -> Tensor | None:
    """KL(q ‖ prior) of every weight, or None where no closed form is known here."""
    form = CLOSED.get((type(q), type(prior)))
    return None if form is None else form(q, prior)


def sampled_kl(q: WeightFamily, prior: Distribution, z: Tensor) -> Tensor:
    """log q(w) - log p(w) of every weight at the draw w = loc + scale z: unbiased for the KL."""
    return q.log_noise(z) - q.scale.log() - prior.log_prob(q.loc + q.scale * z)


def total_kl(q: WeightFamily, prior: Distribution) -> Tensor:
    """(): KL(q ‖ prior) over all weights; where no closed form is known, an unbiased estimate from a new draw."""
    if isinstance(q, GaussianWeights) and isinstance(prior, priors.Normal):
        return _total_gaussian_normal(q, prior)
    closed = closed_kl(q, prior)
    return (sampled_kl(q, prior, q.noise()) if closed is None else closed).sum()


def _total_gaussian_normal(q: GaussianWeights, p: priors.Normal) -> Tensor:
    """½ (|s|² + |m - m₀|²) / s₀² - Σ log(s / s₀) - P / 2: inner products need no temporary per operation."""
    scale, distance = q.scale.reshape(-1), (q.loc if p.loc == 0 else q.loc - p.loc).reshape(-1)
    squares = torch.dot(scale, scale) + torch.dot(distance, distance)
    return 0.5 * squares / p.scale**2 - q.scale.log().sum() + q.loc.numel() * (math.log(p.scale) - 0.5)
