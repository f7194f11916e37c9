"""Distributions of a single weight: Normal, StudentT, LaplaceDistribution, Cauchy, Logistic.

Small frozen objects rather than `torch.distributions`: a prior is evaluated at every step on every weight,
and the argument checks and broadcasting there cost more than the density.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bayesformer.core.draws import normal_like
from bayesformer.core.standard_noise import cauchy_like, laplace_like, logistic_like, student_like


class Distribution(Protocol):
    """A law of one weight, applied elementwise."""

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density at `x`, elementwise."""
        ...

    def score(self, x: Tensor) -> Tensor:
        """Derivative of the log density at `x`, elementwise."""
        ...

    def sample(self, like: Tensor) -> Tensor:
        """Independent draws in the shape, dtype and device of `like`."""
        ...


def write_score(law: Distribution, x: Tensor, out: Tensor, weight: float) -> Tensor:
    """Put weight · score into `out`; returns the log density of each row, (...,) from (..., P)."""
    if isinstance(law, Normal):  # the usual prior of millions of weights: two passes instead of eight
        z = x if law.loc == 0 else x - law.loc
        torch.mul(z, -weight / law.scale**2, out=out)
        constant = x.shape[-1] * math.log(law.scale * math.sqrt(2 * math.pi))
        return torch.linalg.vecdot(z, z).mul(-0.5 / law.scale**2).sub(constant)
    torch.mul(law.score(x), weight, out=out)
    return law.log_prob(x).sum(-1)


def precision_at(law: Distribution, x: Tensor) -> Tensor:
    """A positive curvature of -log p at `x`, elementwise: -score(x) / (x - loc), at most 4 / scale².

    That is 1/scale² for a normal everywhere. For laws with heavier tails, whose log density is not concave, it is the
    curvature of the parabola that touches the log density at `x` and has its maximum at the centre.
    """
    loc, scale = getattr(law, "loc", 0.0), getattr(law, "scale", 1.0)
    if isinstance(law, Normal):
        return torch.full_like(x, scale**-2)
    away = x - loc
    tiny = 1e-3 * scale
    away = torch.where(away.abs() < tiny, tiny, away)
    return (-law.score(loc + away) / away).clamp(0, 4 / scale**2)


def has_heavy_tails(law: Distribution) -> bool:
    """Whether the pull towards the centre is weaker at 3 scales than at 2: of a Cauchy, a Student's t with df below 6.

    Where such a prior decides, the posterior is no Gaussian, and its curvature at the mode does not know its width.
    """
    loc, scale = getattr(law, "loc", 0.0), getattr(law, "scale", 1.0)
    near, far = law.score(loc + scale * torch.tensor([2.0, 3.0], dtype=torch.float64, device="cpu")).abs().tolist()
    return bool(far < near)


def _check_scale(name: str, scale: float) -> None:
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"{name}.scale must be positive and finite; got {scale}.")


@dataclass(frozen=True)
class Normal:
    """The normal distribution N(loc, scale²) of one weight."""

    loc: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_scale("Normal", self.scale)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density -½ z² - log(scale √2π), z = (x - loc) / scale."""
        z = (x - self.loc) / self.scale
        return -0.5 * z * z - math.log(self.scale * math.sqrt(2 * math.pi))

    def score(self, x: Tensor) -> Tensor:
        """Derivative of the log density, -z / scale."""
        return (self.loc - x) / self.scale**2

    def sample(self, like: Tensor) -> Tensor:
        """Independent draws: location plus scaled standard normals."""
        return self.loc + self.scale * normal_like(like)


@dataclass(frozen=True)
class StudentT:
    """Student's t with `df` degrees of freedom, shifted by `loc` and stretched by `scale`."""

    df: float
    loc: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_scale("StudentT", self.scale)
        if not self.df > 0:
            raise ValueError(f"StudentT.df must be positive; got {self.df}.")

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density -½(ν+1) log(1 + z²/ν) plus its constant, z = (x - loc) / scale."""
        z = (x - self.loc) / self.scale
        half = 0.5 * (self.df + 1)
        constant = (
            math.lgamma(half) - math.lgamma(0.5 * self.df) - 0.5 * math.log(self.df * math.pi) - math.log(self.scale)
        )
        return constant - half * torch.log1p(z * z / self.df)

    def score(self, x: Tensor) -> Tensor:
        """Derivative of the log density, -(ν+1) z / (ν + z²) / scale."""
        z = (x - self.loc) / self.scale
        return -(self.df + 1) / self.scale * z / (self.df + z * z)

    def sample(self, like: Tensor) -> Tensor:
        """Independent draws: a normal over the root of a Gamma, shifted and scaled."""
        return self.loc + self.scale * student_like(like, torch.full_like(like, self.df))


@dataclass(frozen=True)
class LaplaceDistribution:
    """The double exponential of density exp(-|z|) / (2 scale), z = (x - loc) / scale; as text, "laplace(0, 1)"."""

    loc: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_scale("LaplaceDistribution", self.scale)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density -|z| - log(2 scale), z = (x - loc) / scale."""
        return -((x - self.loc) / self.scale).abs() - math.log(2 * self.scale)

    def score(self, x: Tensor) -> Tensor:
        """Derivative of the log density, -sign(z) / scale; 0 at the kink."""
        return -(x - self.loc).sign() / self.scale

    def sample(self, like: Tensor) -> Tensor:
        """Independent draws: the inverse CDF of uniform numbers."""
        return self.loc + self.scale * laplace_like(like)


@dataclass(frozen=True)
class Cauchy:
    """The Cauchy distribution. It has neither mean nor variance: averages of draws do not settle."""

    loc: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_scale("Cauchy", self.scale)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density -log(π scale (1 + z²)), z = (x - loc) / scale."""
        z = (x - self.loc) / self.scale
        return -torch.log1p(z * z) - math.log(math.pi * self.scale)

    def score(self, x: Tensor) -> Tensor:
        """Derivative of the log density, -2 z / (1 + z²) / scale."""
        z = (x - self.loc) / self.scale
        return -2 / self.scale * z / (1 + z * z)

    def sample(self, like: Tensor) -> Tensor:
        """Independent draws: the inverse CDF of uniform numbers."""
        return self.loc + self.scale * cauchy_like(like)


@dataclass(frozen=True)
class Logistic:
    """The logistic distribution, whose CDF is the sigmoid of (x - loc) / scale."""

    loc: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_scale("Logistic", self.scale)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density -z - 2 softplus(-z) - log scale, z = (x - loc) / scale."""
        z = (x - self.loc) / self.scale
        return -z - 2 * softplus(-z) - math.log(self.scale)

    def score(self, x: Tensor) -> Tensor:
        """Derivative of the log density, -tanh(z/2) / scale."""
        return -torch.tanh((x - self.loc) / (2 * self.scale)) / self.scale

    def sample(self, like: Tensor) -> Tensor:
        """Independent draws: logits of uniform numbers, shifted and scaled."""
        return self.loc + self.scale * logistic_like(like)


FAMILIES: dict[str, type[Distribution]] = {
    "normal": Normal,
    "student_t": StudentT,
    "laplace": LaplaceDistribution,
    "cauchy": Cauchy,
    "logistic": Logistic,
}
