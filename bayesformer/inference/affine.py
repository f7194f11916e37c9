"""Algorithms in affine coordinates: θ = c + R φ, so that a problem that is stretched in θ is round in φ.

    coordinates = affine(log_joint, center, root)
    transform = sgld.build(coordinates, lr, temperature)          # any algorithm, none knows of it
    state = transform.init({"theta": coordinates.origin()})
    ...
    law = coordinates.to_theta(vi_diag.law(state))                # results come back in θ

A Langevin step in φ is one in θ preconditioned by R Rᵀ, whose noise has the covariance R Rᵀ as well. R may be the root
of a Laplace or an earlier posterior (whitening), or the scale of every weight.
"""

from __future__ import annotations

from typing import Protocol, overload

import torch
from torch import Tensor

from bayesformer.core.types import Batch, LogJoint, Params
from bayesformer.core.vectors import THETA, value_and_grad
from bayesformer.laws import Dense, Diagonal, GaussianLaw, Samples
from bayesformer.laws.roots import StackedRoot


class Root(Protocol):
    """A linear map R from φ (Q,) to deviations of θ (P,); every block of `laws` is one."""

    def colour(self, noise: Tensor) -> Tensor:
        """(..., Q) -> (..., P): R φ for every row φ."""
        ...

    def times_root(self, rows: Tensor) -> Tensor:
        """(..., P) -> (..., Q): Rᵀ g for every row g."""
        ...


class AffineMap:
    """θ = c + R φ: points and laws over φ (Q,) as those over θ (P,)."""

    def __init__(self, center: Tensor, root: Root, scale: Tensor | None = None) -> None:
        self.center, self.root = center, root
        self.scale = scale  # (P,), where R is diagonal
        self.size = root.times_root(torch.zeros_like(center)).shape[-1]  # Q

    def origin(self, members: int | None = None) -> Tensor:
        """(Q,), or (L, Q): the φ of θ = c."""
        return self.center.new_zeros((self.size,) if members is None else (members, self.size))

    def in_phi(self, log_joint: LogJoint) -> AffineLogJoint:
        """A log joint over θ as a function of φ."""
        return AffineLogJoint(log_joint, self.center, self.root, self.scale)

    @overload
    def to_theta(self, found: Tensor) -> Tensor: ...
    @overload
    def to_theta(self, found: Samples) -> Samples: ...
    @overload
    def to_theta(self, found: GaussianLaw) -> GaussianLaw: ...

    def to_theta(self, found: Tensor | Samples | GaussianLaw) -> Tensor | Samples | GaussianLaw:
        """Points (..., Q), samples or a Gaussian over φ as those over θ; exact for Gaussians.

        A diagonal R keeps every block in its form (but a Kronecker one, which becomes dense). Roots side by side keep
        theirs for a diagonal Gaussian over φ. Any other R gives one dense block over all weights, (P, P).
        """
        if isinstance(found, Tensor):
            return self.center + self.root.colour(found)
        if isinstance(found, Samples):
            return Samples(self.to_theta(found.theta), found.buffers)
        mean = self.to_theta(found.mean)
        if self.scale is not None:
            scale = self.scale
            blocks = tuple(b.scaled(scale[p]) for p, b in zip(found.places, found.blocks, strict=True))
            return GaussianLaw(mean, found.places, blocks, found.buffers)
        if isinstance(self.root, StackedRoot) and all(isinstance(block, Diagonal) for block in found.blocks):
            places, variance = self.root.places, found.variance()
            stretched = (block.stretched(variance[p]) for p, block in zip(places, self.root.blocks, strict=True))
            return GaussianLaw(mean, places, tuple(stretched), found.buffers)
        roots = []
        for place, block in zip(found.places, found.blocks, strict=True):
            eye = torch.eye(block.size, dtype=mean.dtype, device=mean.device)
            own = block.times_root(eye)  # (p, q), Σ of the block = own ownᵀ
            rows = mean.new_zeros(own.shape[1], self.size)
            rows[:, place] = own.mT
            roots.append(self.root.colour(rows).mT)
        wide = torch.cat(roots, 1) if roots else mean.new_zeros(len(mean), 0)
        missing = max(0, len(mean) - wide.shape[1])
        padded = torch.nn.functional.pad(wide, (0, missing))
        return GaussianLaw(mean, (slice(0, len(mean)),), (Dense.of_root(padded),), found.buffers)


class AffineLogJoint(AffineMap):
    """A log joint as a function of φ (Q,), or (L, Q) for members in rows, where θ = c + R φ.

    Densities are those over θ: the constant log |det R| is left out, as log joints may.
    """

    def __init__(self, log_joint: LogJoint, center: Tensor, root: Root, scale: Tensor | None = None) -> None:
        super().__init__(center, root, scale)
        self.log_joint = log_joint

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Value and outputs at φ, purely."""
        return self.log_joint({THETA: self.to_theta(params[THETA])}, batch)

    def value_and_grad(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor, Params]:
        """Value, outputs and the gradient with respect to φ, Rᵀ ∇."""
        value, outputs, grads = value_and_grad(self.log_joint)({THETA: self.to_theta(params[THETA])}, batch)
        return value, outputs, {THETA: self.root.times_root(grads[THETA])}


def affine(log_joint: LogJoint, center: Tensor, root: Tensor | Root) -> AffineLogJoint:
    """A log joint over θ = {"theta": (P,)} as one over φ, θ = center + root φ.

    Args:
        log_joint: over the one vector, for example `train.objective.Objective`.
        center: (P,).
        root: a positive scale per weight (P,), a lower triangular matrix (P, P), or anything with `colour` and
            `times_root`, such as a block of a law: then φ is that block's noise, (P,) or longer.
    """
    if not isinstance(root, Tensor):
        return AffineLogJoint(log_joint, center, root)
    size = len(center)
    if root.shape == (size,):
        if not bool((root > 0).all()):
            raise ValueError(f"root must be positive where it is a scale per weight; got {root.min().item()}.")
        return AffineLogJoint(log_joint, center, Diagonal(root.square()), root)
    if root.shape != (size, size) or not torch.equal(root, root.tril()):
        raise ValueError(
            f"root must be a scale per weight ({size},), a lower triangular matrix ({size}, {size}) or a block; "
            f"got {tuple(root.shape)}{'' if root.shape != (size, size) else ', not lower triangular'}."
        )
    return AffineLogJoint(log_joint, center, Dense(root))
