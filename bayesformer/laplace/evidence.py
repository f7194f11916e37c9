"""The evidence: how probable the data are under a prior, when the log joint is a parabola around its maximum.

    log Z(d, σ) = log p(D | θ*) - ½ [log det P - log det P₀ + (θ* - μ₀)ᵀ P₀ (θ* - μ₀)],   P = H + P₀

with the prior N(μ₀, P₀⁻¹), P₀ = diag(d), and H the curvature of the data. The factors of 2π cancel. It is exact
for a linear network with Gaussian noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesformer.laplace.structures import CurvatureBlock
from bayesformer.laws import Block


@dataclass(frozen=True)
class Groups:
    """Which of G prior precisions each weight has: per structure one group, or one for every weight."""

    count: int
    members: tuple[int | Tensor, ...]

    def spread(self, precisions: Tensor) -> list[Tensor]:
        """(G,) -> per structure () or (p,), differentiable."""
        return [precisions[member] for member in self.members]


@dataclass(frozen=True)
class ObservationNoise:
    """Gaussian observation noise: its σ where the curvature was taken, and how many values were observed."""

    scale: float
    values: int


@dataclass(frozen=True)
class Quadratic:
    """A log joint to second order around θ*, as a function of the prior's precisions and the noise."""

    structures: tuple[CurvatureBlock, ...]
    deviations: tuple[Tensor, ...]
    """θ* - μ₀ of each structure's weights"""
    log_likelihood: float
    """of all data at θ*"""
    groups: Groups
    temperature: float = 1.0
    """the likelihood is taken to the power 1 / temperature"""
    noise: ObservationNoise | None = None
    """where the noise is known to the likelihood and may be changed"""

    def __post_init__(self) -> None:
        counts = {len(self.structures), len(self.deviations), len(self.groups.members)}
        if len(counts) != 1:
            raise ValueError(f"structures, deviations and groups must be equally many; got {sorted(counts)}.")
        if not math.isfinite(self.log_likelihood):
            raise ValueError(f"log_likelihood must be finite; got {self.log_likelihood}.")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive; got {self.temperature}.")

    def scale(self, sigma: Tensor | float | None = None) -> Tensor | float:
        """h, the factor of the data's curvature when the noise is `sigma` instead."""
        h = 1 / self.temperature
        return h if sigma is None or self.noise is None else h * self.noise.scale**2 / sigma**2

    def fit(self, sigma: Tensor | None = None) -> Tensor | float:
        """The log-likelihood at θ* when the noise is `sigma` instead."""
        if sigma is None or self.noise is None:
            return self.log_likelihood
        known, count = self.noise.scale, self.noise.values
        squares = -2 * known**2 * (self.log_likelihood + count * math.log(known * math.sqrt(2 * math.pi)))
        return -squares / (2 * sigma**2) - count * (sigma.log() + 0.5 * math.log(2 * math.pi))

    def log_evidence(self, precisions: Tensor, sigma: Tensor | None = None) -> Tensor:
        """log Z at G prior precisions (and at noise `sigma`), differentiable in both."""
        h = self.scale(sigma)
        posterior, prior, scatter = precisions.new_zeros(3)
        for structure, deviation, d in zip(
            self.structures, self.deviations, self.groups.spread(precisions), strict=True
        ):
            posterior = posterior + structure.log_det(d, h)
            prior = prior + d.log().expand(structure.size).sum()
            scatter = scatter + (d * deviation.square()).sum()
        return log_evidence(self.fit(sigma) / self.temperature, posterior, prior, scatter)

    def blocks(self, precisions: Tensor, sigma: Tensor | float | None = None) -> list[Block]:
        """The posterior's covariance, structure by structure."""
        spread = self.groups.spread(precisions)
        # Clones: blocks that are saved must not share memory.
        return [s.posterior(d.clone(), self.scale(sigma)) for s, d in zip(self.structures, spread, strict=True)]


def log_evidence(
    log_likelihood: Tensor | float, posterior_log_det: Tensor, prior_log_det: Tensor, scatter: Tensor
) -> Tensor:
    """log Z from the log-determinants of the two precisions and (θ* - μ₀)ᵀ P₀ (θ* - μ₀)."""
    return log_likelihood - 0.5 * (posterior_log_det - prior_log_det + scatter)


def check_curvature(structures: Sequence[CurvatureBlock], names: Sequence[str]) -> None:
    """Refuse curvature that is not finite or has a negative diagonal: no Gaussian has it."""
    for structure, name in zip(structures, names, strict=True):
        values = structure.diagonal()
        if not torch.isfinite(values).all():
            bad = int((~torch.isfinite(values)).sum())
            raise ValueError(
                f"curvature must be finite; {name} has {bad} NaN or infinite values of {values.numel()}. "
                "Are the model's outputs finite on the data?"
            )
        if (values < 0).any():
            raise ValueError(f"curvature must not be negative; {name} has {float(values.min()):.3g} on its diagonal.")
