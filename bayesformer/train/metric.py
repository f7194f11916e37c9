"""Metrics from the curvature of U at some weights: H in full, and roots W with WᵀHW near the identity."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesformer.laplace.structures import DenseCurvature, KroneckerCurvature
from bayesformer.laws import Dense, Kronecker
from bayesformer.laws.roots import KroneckerRoot, StackedRoot
from bayesformer.train.full_batch import FullBatch

JITTER = 1e-6  # of the mean diagonal, added where a flat prior leaves directions without curvature
FLAT = 1e-8  # of the mean curvature: the least precision of a weight, where the prior is flat


def precision_at(batch: FullBatch, theta: Tensor) -> Tensor:
    """(P, P): H = the Gauss-Newton matrix plus the prior's precision, in float64, positive definite."""
    block = batch.curvature(theta, "full").structures[0]
    assert isinstance(block, DenseCurvature)
    eye = torch.eye(batch.size, dtype=theta.dtype, device=theta.device)
    matrix = block.matrix.double() + batch.prior.precision_times(theta, eye).double()
    matrix = (matrix + matrix.mT) / 2
    matrix.diagonal().add_(JITTER**2 * matrix.diagonal().mean())
    if torch.linalg.cholesky_ex(matrix)[1]:
        matrix.diagonal().add_(JITTER * matrix.diagonal().mean())
    return matrix


def covariance_root(precision: Tensor, like: Tensor) -> Dense:
    """L with L Lᵀ = H⁻¹ from H (P, P), in the precision of `like`."""
    covariance = torch.cholesky_inverse(torch.linalg.cholesky(precision))
    return Dense(torch.linalg.cholesky((covariance + covariance.mT) / 2).to(like))


def kronecker_root(batch: FullBatch, theta: Tensor) -> StackedRoot:
    """Per matrix the eigenbasis of its weighted Kronecker factors, with the prior's precision added there."""
    found, own = batch.curvature(theta, "kron"), batch.prior.precision(theta)
    least = FLAT * max(float(block.diagonal().mean()) for block in found.structures)
    own, roots = own.clamp_min(least), []
    for place, block in zip(found.places, found.structures, strict=True):
        one = isinstance(block, KroneckerCurvature)
        made = block.posterior(own[place].mean() if one else own[place])
        roots.append(KroneckerRoot(made) if isinstance(made, Kronecker) and made.complete else made)
    return StackedRoot(found.places, tuple(roots))
