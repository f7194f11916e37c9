"""Real values with Gaussian noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.core.types import GaussianOutputs, Outputs
from bayesformer.likelihoods.base import Likelihood, diagonal_columns
from bayesformer.likelihoods.links import Link
from bayesformer.likelihoods.output_draws import as_draws, closed_form, promote, promoted_gaussian
from bayesformer.likelihoods.predictive import GaussianPredictive


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Real values (B, ..., D) with Gaussian noise, of known or predicted standard deviation.

    With `scale` given, outputs are the means (B, ..., D). With `scale=None`, outputs are (B, ..., 2D): the
    means, then the scales through softplus. `floor` bounds a predicted scale from below, since the density
    of a target the network can copy is otherwise unbounded.
    """

    name: ClassVar[str] = "gaussian"
    target_dims: ClassVar[int] = 1

    scale: float | None = None
    floor: float = 1e-3

    def __post_init__(self) -> None:
        known = isinstance(self.scale, int | float) and self.scale > 0 and math.isfinite(self.scale)
        if self.scale is not None and not known:
            raise ValueError(f"Gaussian.scale must be a positive finite number, or None; got {self.scale!r}.")
        if not self.floor > 0:
            raise ValueError(f"Gaussian.floor must be positive; got {self.floor}.")

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, each (..., D)."""
        outputs = promote(outputs)
        if self.scale is not None:
            return outputs, outputs.new_tensor(self.scale).expand_as(outputs)
        mean, raw = outputs.chunk(2, -1)
        return mean, F.softplus(raw) + self.floor

    def target_shape(self, outputs: Tensor) -> torch.Size:
        """(B, ..., D), the shape of the means."""
        width = outputs.shape[-1]
        return torch.Size([*outputs.shape[:-1], width if self.scale is not None else (width + 1) // 2])

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(B, ...): -½ z² - log(σ √2π), summed over the D values of a position."""
        mean, scale = self.split(outputs)
        z = (targets - mean) / scale
        return (-0.5 * z * z - scale.log() - 0.5 * math.log(2 * math.pi)).sum(-1)

    def hessian(self, outputs: Tensor) -> Tensor:
        """(B, ..., K, K): the diagonal matrix of `hessian_diagonal`."""
        return torch.diag_embed(self.hessian_diagonal(outputs))

    def hessian_diagonal(self, outputs: Tensor) -> Tensor:
        """(B, ..., K): 1/σ² for a mean; 2 (dσ/draw)² / σ² for a predicted scale."""
        _, scale = self.split(outputs)
        precision = scale.square().reciprocal()
        if self.scale is not None:
            return precision
        slope = torch.sigmoid(promote(outputs).chunk(2, -1)[1])
        return torch.cat([precision, 2 * slope.square() * precision], -1)

    def position_roots(self, outputs: Tensor) -> Callable[[int], Iterator[Tensor]]:
        """From a position to the K columns (B, K) of a root that is diagonal."""
        scale = self.positions(self.hessian_diagonal(outputs)).sqrt()
        return lambda t: diagonal_columns(scale[:, t])

    def predictive(
        self, outputs: Outputs, link: Link | None = None, draws: int | None = None, seed: int = 0
    ) -> GaussianPredictive:
        """One Gaussian per draw; closed form where a Gaussian over means meets a known scale."""
        closed_form(outputs, link, self.links)
        if isinstance(outputs, GaussianOutputs) and self.scale is not None:
            outputs = promoted_gaussian(outputs)
            noise = torch.full_like(outputs.mean, self.scale**2)
            return GaussianPredictive(outputs.mean[None], noise[None], outputs.variance[None])
        mean, scale = self.split(as_draws(outputs, draws, seed))
        return GaussianPredictive(mean, scale.square())

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """(B, ..., D): values drawn from N(mean, scale²)."""
        mean, scale = self.split(outputs)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device="cpu")
        return mean + scale * noise.to(mean.device)

    def check(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """Shapes agree and every counted target is finite."""
        if self.scale is None and outputs.shape[-1] % 2:
            raise ValueError(
                "a gaussian likelihood with scale=None needs an even number of outputs, means then scales; "
                f"got {outputs.shape[-1]} (outputs {tuple(outputs.shape)}). Give a fixed scale instead?"
            )
        super().check(outputs, targets, mask)
        bad = ~torch.isfinite(targets[self.kept(targets, mask)])
        if bad.any():
            raise ValueError(f"targets must be finite where they count; got {int(bad.sum())} NaN or infinite.")

    @property
    def noise_scale(self) -> float | None:
        """The known standard deviation, or None where the network predicts it."""
        return self.scale

    def with_noise_scale(self, scale: float) -> Likelihood:
        """The same with another known standard deviation."""
        if self.scale is None:
            return super().with_noise_scale(scale)
        return replace(self, scale=scale)
