"""Log priors as functions of the vector θ of inferred weights, with their gradients written in place."""

from __future__ import annotations

from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from bayesformer.core.vectors import pieces
from bayesformer.laws import GaussianLaw
from bayesformer.model.space import Space
from bayesformer.priors.distributions import Distribution, has_heavy_tails, precision_at, write_score
from bayesformer.priors.prior import Prior

WRITTEN_DOWN = 2000  # weights of a block whose inverse is formed to read off its diagonal


class VectorPrior(Protocol):
    """log p(θ) for θ (P,), or for members in rows (L, P)."""

    def log_prob(self, theta: Tensor) -> Tensor:
        """() or (L,): log p(θ), differentiable."""
        ...

    def write(self, theta: Tensor, grad: Tensor, scale: float) -> Tensor:
        """Put scale · ∇ log p into `grad`, over whatever was there; returns scale · log p, () or (L,)."""
        ...

    def precision(self, theta: Tensor) -> Tensor:
        """(P,): the diagonal of a positive curvature of -log p at θ (P,); 0 where the prior is flat."""
        ...

    def precision_times(self, theta: Tensor, rows: Tensor) -> Tensor:
        """(..., P): rows times that curvature of -log p at θ (P,)."""
        ...

    def heavy(self, theta: Tensor) -> Tensor:
        """(P,), boolean: weights whose law has heavy tails."""
        ...


class FlatPrior:
    """No prior: a constant density, whose logarithm is taken as 0."""

    def log_prob(self, theta: Tensor) -> Tensor:
        """Zeros, one per member: () or (L,)."""
        return theta.new_zeros(theta.shape[:-1])

    def write(self, theta: Tensor, grad: Tensor, scale: float) -> Tensor:  # noqa: ARG002
        """Fills `grad` with zeros and returns zeros, () or (L,)."""
        grad.zero_()
        return self.log_prob(theta)

    def precision(self, theta: Tensor) -> Tensor:
        """(P,): zeros, for a constant density has no curvature."""
        return torch.zeros_like(theta)

    def precision_times(self, theta: Tensor, rows: Tensor) -> Tensor:  # noqa: ARG002
        """(..., P): zeros in the shape of the rows."""
        return torch.zeros_like(rows)

    def heavy(self, theta: Tensor) -> Tensor:
        """(P,): none, for a constant density has no tails."""
        return torch.zeros_like(theta, dtype=torch.bool)


class NamedPrior:
    """Independent weights with a law per parameter; neighbours of one law are one stretch of θ."""

    def __init__(self, prior: Prior, space: Space, known: tuple[str, ...] | None = None) -> None:
        laws = prior.assign(space.names, known)
        self.stretches: list[tuple[slice, Distribution | None]] = []
        start = 0
        sized = zip(space.names, space.sizes, strict=True)
        for law, group in groupby(sized, key=lambda item: laws[item[0]]):
            stop = start + sum(size for _, size in group)
            self.stretches.append((slice(start, stop), law))
            start = stop

    def log_prob(self, theta: Tensor) -> Tensor:
        """Sum of the log densities of all weights, () or (L,)."""
        terms = [law.log_prob(theta[..., place]).sum(-1) for place, law in self.stretches if law is not None]
        return torch.stack(terms).sum(0) if terms else theta.new_zeros(theta.shape[:-1])

    def write(self, theta: Tensor, grad: Tensor, scale: float) -> Tensor:
        """The gradient of each stretch, piece by piece."""
        value = theta.new_zeros(theta.shape[:-1])
        for place, law in self.stretches:
            if law is None:
                grad[..., place].zero_()
                continue
            for weights, slope in pieces(theta[..., place], grad[..., place]):
                value = value + write_score(law, weights, slope, scale)
        return scale * value

    def precision(self, theta: Tensor) -> Tensor:
        """(P,): of every weight, as `priors.distributions.precision_at` defines it; the constant 1/sd² of a normal."""
        found = torch.zeros_like(theta)
        for place, law in self.stretches:
            if law is not None:
                found[place] = precision_at(law, theta[place])
        return found

    def precision_times(self, theta: Tensor, rows: Tensor) -> Tensor:
        """(..., P): every entry times the precision of its weight."""
        return rows * self.precision(theta)

    def heavy(self, theta: Tensor) -> Tensor:
        """(P,): those of a Student's t or a Cauchy, see `has_heavy_tails`."""
        found = torch.zeros_like(theta, dtype=torch.bool)
        for place, law in self.stretches:
            found[place] = law is not None and has_heavy_tails(law)
        return found


class GaussianPrior:
    """An earlier posterior as the prior: -½ (θ - m)ᵀ Σ⁻¹ (θ - m), without its constant; flat outside its blocks."""

    def __init__(self, law: GaussianLaw) -> None:
        self.law = law

    def log_prob(self, theta: Tensor) -> Tensor:
        """Minus half the squared distance to the earlier mean, () or (L,)."""
        if theta.dim() == 1:
            return -0.5 * self.law.distance(theta)
        return torch.stack([-0.5 * self.law.distance(row) for row in theta])

    def write(self, theta: Tensor, grad: Tensor, scale: float) -> Tensor:
        """-Σ⁻¹ (θ - m) at the places of every block, 0 elsewhere."""
        grad.zero_()
        value = theta.new_zeros(theta.shape[:-1])
        for place, block in zip(self.law.places, self.law.blocks, strict=True):
            deviation = theta[..., place] - self.law.mean[place]
            slope = block.precision_times(deviation)
            grad[..., place] = -scale * slope
            value = value - 0.5 * scale * (deviation * slope).sum(-1)
        return value

    def precision(self, theta: Tensor) -> Tensor:
        """(P,): the diagonal of Σ⁻¹; of a block too large to be written down, one over its variances."""
        found = torch.zeros_like(theta)
        for place, block in zip(self.law.places, self.law.blocks, strict=True):
            if block.size <= WRITTEN_DOWN:
                eye = torch.eye(block.size, dtype=theta.dtype, device=theta.device)
                found[place] = block.precision_times(eye).diagonal()
            else:
                found[place] = block.diagonal().reciprocal()
        return found

    def precision_times(self, theta: Tensor, rows: Tensor) -> Tensor:  # noqa: ARG002
        """(..., P): rows times Σ⁻¹, 0 outside its blocks."""
        found = torch.zeros_like(rows)
        for place, block in zip(self.law.places, self.law.blocks, strict=True):
            found[..., place] = block.precision_times(rows[..., place])
        return found

    def heavy(self, theta: Tensor) -> Tensor:
        """(P,): none, for it is a Gaussian."""
        return torch.zeros_like(theta, dtype=torch.bool)
