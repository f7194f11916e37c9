"""Location-scale families for weights: Normal, StudentT, Laplace, Cauchy, Logistic.

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

from bayesformer.core.draws import gamma_of, normal_like, uniform_like


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


def _check_scale(name: str, scale: float) -> None:
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"{name}.scale must be positive and finite; got {scale}.")


@dataclass(frozen=True)
class Normal:
    """N(loc, scale²)."""

    loc: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_scale("Normal", self.scale)

    def log_prob(self, x: Tensor) -> Tensor:
        """-½ z² - log(scale √2π)."""
        z = (x - self.loc) / self.scale
        return -0.5 * z * z - math.log(self.scale * math.sqrt(2 * math.pi))

    def score(self, x: Tensor) -> Tensor:
        """-z / scale."""
        return (self.loc - x) / self.scale**2

    def sample(self, like: Tensor) -> Tensor:
        """Location plus scaled standard normals."""
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
        """-½(ν+1) log(1 + z²/ν) plus its constant."""
        z = (x - self.loc) / self.scale
        half = 0.5 * (self.df + 1)
        constant = (
            math.lgamma(half) - math.lgamma(0.5 * self.df) - 0.5 * math.log(self.df * math.pi) - math.log(self.scale)
        )
        return constant - half * torch.log1p(z * z / self.df)

    def score(self, x: Tensor) -> Tensor:
        """-(ν+1) z / (ν + z²) / scale."""
        z = (x - self.loc) / self.scale
        return -(self.df + 1) / self.scale * z / (self.df + z * z)

    def sample(self, like: Tensor) -> Tensor:
        """z / √λ with λ ~ Gamma(ν/2, rate ν/2)."""
        shape = torch.full_like(like, 0.5 * self.df)
        precision = gamma_of(shape) / (0.5 * self.df)
        return self.loc + self.scale * normal_like(like) * precision.rsqrt()


@dataclass(frozen=True)
class Laplace:
    """Density exp(-|z|) / (2 scale)."""

    loc: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_scale("Laplace", self.scale)

    def log_prob(self, x: Tensor) -> Tensor:
        """-|z| - log(2 scale)."""
        return -((x - self.loc) / self.scale).abs() - math.log(2 * self.scale)

    def score(self, x: Tensor) -> Tensor:
        """-sign(z) / scale; 0 at the kink."""
        return -(x - self.loc).sign() / self.scale

    def sample(self, like: Tensor) -> Tensor:
        """Inverse CDF of a uniform."""
        u = uniform_like(like) - 0.5
        return self.loc - self.scale * u.sign() * torch.log1p(-2 * u.abs())


@dataclass(frozen=True)
class Cauchy:
    """No mean and no variance: averages of draws do not settle."""

    loc: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_scale("Cauchy", self.scale)

    def log_prob(self, x: Tensor) -> Tensor:
        """-log(π scale (1 + z²))."""
        z = (x - self.loc) / self.scale
        return -torch.log1p(z * z) - math.log(math.pi * self.scale)

    def score(self, x: Tensor) -> Tensor:
        """-2 z / (1 + z²) / scale."""
        z = (x - self.loc) / self.scale
        return -2 / self.scale * z / (1 + z * z)

    def sample(self, like: Tensor) -> Tensor:
        """Inverse CDF of a uniform."""
        return self.loc + self.scale * torch.tan(math.pi * (uniform_like(like) - 0.5))


@dataclass(frozen=True)
class Logistic:
    """The law whose CDF is the sigmoid."""

    loc: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_scale("Logistic", self.scale)

    def log_prob(self, x: Tensor) -> Tensor:
        """-z - 2 softplus(-z) - log scale."""
        z = (x - self.loc) / self.scale
        return -z - 2 * softplus(-z) - math.log(self.scale)

    def score(self, x: Tensor) -> Tensor:
        """-tanh(z/2) / scale."""
        return -torch.tanh((x - self.loc) / (2 * self.scale)) / self.scale

    def sample(self, like: Tensor) -> Tensor:
        """Inverse CDF of a uniform: its logit."""
        return self.loc + self.scale * torch.logit(uniform_like(like))


FAMILIES: dict[str, type[Distribution]] = {
    "normal": Normal,
    "student_t": StudentT,
    "laplace": Laplace,
    "cauchy": Cauchy,
    "logistic": Logistic,
}
