"""The five variational families of a weight, and their KL to a prior.

    w = loc + scale z,    scale = softplus(rho),    z standard noise of the family

Every law here is elementwise over tensors of parameters. Noise is drawn apart from location and scale: with
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

from bayesformer.core.draws import gamma_of, normal_like
from bayesformer.priors import distributions as laws
from bayesformer.priors.distributions import Distribution

T = TypeVar("T", bound="Family")


@dataclass(frozen=True, eq=False)
class Family:
    """A location-scale family over one vector of weights."""

    loc: Tensor
    scale: Tensor

    raw: ClassVar[tuple[str, ...]] = ("rho",)
    """names of its unconstrained parameters besides the location"""

    @classmethod
    def of(cls: type[T], loc: Tensor, rho: Tensor) -> T:
        """The law of unconstrained parameters."""
        return cls(loc, softplus(rho))

    @classmethod
    def noise_of(cls, rho: Tensor) -> Tensor:
        """Standard noise for unconstrained parameters, without their scales."""
        return cls(rho, rho).noise()

    def noise(self) -> Tensor:
        """Standard noise z, one per weight."""
        raise NotImplementedError

    def log_noise(self, z: Tensor) -> Tensor:
        """Log density of z."""
        raise NotImplementedError

    def rsample(self) -> Tensor:
        """A draw, differentiable in every parameter."""
        return self.loc + self.scale * self.noise()

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density at `x`."""
        return self.log_noise((x - self.loc) / self.scale) - self.scale.log()

    def __getitem__(self: T, part: slice) -> T:
        """The law of some of the weights."""
        return type(self)(*(getattr(self, field.name)[part] for field in fields(self)))


class Gaussian(Family):
    """N(loc, scale²)."""

    def noise(self) -> Tensor:
        """Standard normal."""
        return normal_like(self.loc)

    def log_noise(self, z: Tensor) -> Tensor:
        """-½ z² - ½ log 2π."""
        return laws.Normal().log_prob(z)


class Cauchy(Family):
    """No mean: average probabilities under it, never logits."""

    def noise(self) -> Tensor:
        """tan π(u - ½)."""
        return laws.Cauchy().sample(self.loc)

    def log_noise(self, z: Tensor) -> Tensor:
        """-log π(1 + z²)."""
        return laws.Cauchy().log_prob(z)


class Laplace(Family):
    """Density exp(-|z|) / 2."""

    def noise(self) -> Tensor:
        """-sign(u - ½) log(1 - 2|u - ½|)."""
        return laws.Laplace().sample(self.loc)

    def log_noise(self, z: Tensor) -> Tensor:
        """-|z| - log 2."""
        return laws.Laplace().log_prob(z)


class Logistic(Family):
    """The law whose CDF is the sigmoid."""

    def noise(self) -> Tensor:
        """log u/(1 - u)."""
        return laws.Logistic().sample(self.loc)

    def log_noise(self, z: Tensor) -> Tensor:
        """-z - 2 softplus(-z)."""
        return laws.Logistic().log_prob(z)


@dataclass(frozen=True, eq=False)
class StudentT(Family):
    """Student's t with learned degrees of freedom, ν = 2 + softplus(raw_df): the variance is finite.

        z = ε / √λ,    ε ~ N(0, 1),    λ ~ Gamma(ν/2, rate ν/2)

    The gradient in ν goes through λ by implicit reparameterisation, dλ/dν = -(∂F/∂ν) / f(λ), Figurnov et al.
    (2018). (The seed writes z = λ ε, which is not a t.)
    """

    df: Tensor

    raw: ClassVar[tuple[str, ...]] = ("rho", "raw_df")

    @classmethod
    def of(cls, loc: Tensor, rho: Tensor, raw_df: Tensor) -> StudentT:  # type: ignore[override]
        """The law of unconstrained parameters."""
        return cls(loc, softplus(rho), 2 + softplus(raw_df))

    @classmethod
    def noise_of(cls, rho: Tensor, raw_df: Tensor) -> Tensor:  # type: ignore[override]
        """Standard noise for unconstrained parameters, without their scales."""
        return cls(rho, rho, 2 + softplus(raw_df)).noise()

    def noise(self) -> Tensor:
        """ε / √λ."""
        half = 0.5 * self.df
        precision = gamma_of(half) / half
        return normal_like(self.loc) * precision.rsqrt()

    def log_noise(self, z: Tensor) -> Tensor:
        """-½(ν + 1) log(1 + z²/ν) + log Γ((ν + 1)/2) - log Γ(ν/2) - ½ log νπ."""
        half = 0.5 * (self.df + 1)
        constant = torch.lgamma(half) - torch.lgamma(0.5 * self.df) - 0.5 * (self.df * math.pi).log()
        return constant - half * torch.log1p(z * z / self.df)


FAMILIES: dict[str, type[Family]] = {
    "gaussian": Gaussian,
    "cauchy": Cauchy,
    "laplace": Laplace,
    "logistic": Logistic,
    "student_t": StudentT,
}


# KL(q ‖ p) = -H(q) - E_q log p where the expectation is known. d is the distance of the locations, r the
# ratio of the scales where both are of one family; those forms are exactly 0 at equality.


def _gaussian_normal(q: Gaussian, p: laws.Normal) -> Tensor:
    r, d = q.scale / p.scale, (q.loc - p.loc) / p.scale
    return 0.5 * (r * r + d * d - 1) - r.log()


def _laplace_laplace(q: Laplace, p: laws.Laplace) -> Tensor:
    r, d = q.scale / p.scale, (q.loc - p.loc).abs()
    return r * torch.exp(-d / q.scale) + d / p.scale - 1 - r.log()


def _cauchy_cauchy(q: Cauchy, p: laws.Cauchy) -> Tensor:
    """Chyzak & Nielsen (2019): log[((s + s₀)² + d²) / 4 s s₀]."""
    gap = (q.scale - p.scale).square() + (q.loc - p.loc).square()
    return torch.log1p(gap / (4 * p.scale * q.scale))


def _normal_prior(q: Family, variance: Tensor, negentropy: Tensor, p: laws.Normal) -> Tensor:
    second = variance + (q.loc - p.loc).square()
    return negentropy + 0.5 * second / p.scale**2 + math.log(p.scale * math.sqrt(2 * math.pi))


def _laplace_normal(q: Laplace, p: laws.Normal) -> Tensor:
    return _normal_prior(q, 2 * q.scale.square(), -1 - (2 * q.scale).log(), p)


def _logistic_normal(q: Logistic, p: laws.Normal) -> Tensor:
    return _normal_prior(q, math.pi**2 / 3 * q.scale.square(), -2 - q.scale.log(), p)


def _student_normal(q: StudentT, p: laws.Normal) -> Tensor:
    """Variance s² ν/(ν - 2); H = (ν+1)/2 [ψ((ν+1)/2) - ψ(ν/2)] + log √ν B(ν/2, ½) + log s."""
    half = 0.5 * q.df
    log_beta = torch.lgamma(half) + 0.5 * math.log(math.pi) - torch.lgamma(half + 0.5)
    digammas = torch.digamma(half + 0.5) - torch.digamma(half)
    entropy = (half + 0.5) * digammas + 0.5 * q.df.log() + log_beta + q.scale.log()
    return _normal_prior(q, q.scale.square() * q.df / (q.df - 2), -entropy, p)


def _gaussian_laplace(q: Gaussian, p: laws.Laplace) -> Tensor:
    """E|x - m| of a Gaussian is the mean of a folded normal."""
    d = (q.loc - p.loc) / q.scale
    absolute = q.scale * (math.sqrt(2 / math.pi) * torch.exp(-0.5 * d * d) + d * torch.erf(d / math.sqrt(2)))
    return absolute / p.scale + math.log(2 * p.scale) - 0.5 * math.log(2 * math.pi * math.e) - q.scale.log()


def _logistic_laplace(q: Logistic, p: laws.Laplace) -> Tensor:
    """E|x - m| of a logistic is 2 s log(2 cosh(d / 2s))."""
    d = (q.loc - p.loc) / q.scale
    absolute = q.scale * (d + 2 * softplus(-d))
    return absolute / p.scale + math.log(2 * p.scale) - 2 - q.scale.log()


CLOSED: dict[tuple[type[Family], type[Any]], Callable[[Any, Any], Tensor]] = {
    (Gaussian, laws.Normal): _gaussian_normal,
    (Laplace, laws.Laplace): _laplace_laplace,
    (Cauchy, laws.Cauchy): _cauchy_cauchy,
    (Laplace, laws.Normal): _laplace_normal,
    (Logistic, laws.Normal): _logistic_normal,
    (StudentT, laws.Normal): _student_normal,
    (Gaussian, laws.Laplace): _gaussian_laplace,
    (Logistic, laws.Laplace): _logistic_laplace,
}

INFINITE = {(Cauchy, prior) for prior in (laws.Normal, laws.Laplace, laws.Logistic)}
"""Pairs whose KL is infinite: the prior's log density has no mean under a Cauchy."""


def closed_kl(q: Family, prior: Distribution) -> Tensor | None:
    """KL(q ‖ prior) of every weight, or None where no closed form is known here."""
    form = CLOSED.get((type(q), type(prior)))
    return None if form is None else form(q, prior)


def sampled_kl(q: Family, prior: Distribution, z: Tensor) -> Tensor:
    """log q(w) - log p(w) of every weight at the draw w = loc + scale z: unbiased for the KL."""
    return q.log_noise(z) - q.scale.log() - prior.log_prob(q.loc + q.scale * z)


def is_closed(family: type[Family], prior: Distribution) -> bool:
    """Whether their KL has a closed form here."""
    return (family, type(prior)) in CLOSED


def kl_terms(q: Family, prior: Distribution, z: Tensor | None) -> Tensor:
    """KL(q ‖ prior) of every weight: closed where known, else from the draw with noise `z`."""
    value = closed_kl(q, prior)
    if value is not None:
        return value
    assert z is not None
    return sampled_kl(q, prior, z)
