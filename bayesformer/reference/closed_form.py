"""The posterior of a model that is linear in its weights, with Gaussian noise and N(0, 1) priors: in closed form."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.core.types import GaussianOutputs


class LinearPosterior(NamedTuple):
    """N(mean, covariance) of the weights, float64."""

    mean: Tensor  # (P,)
    covariance: Tensor  # (P, P)

    def outputs(self, features: Tensor) -> GaussianOutputs:
        """The law of Φ w at the rows of features (B, P), as outputs (B, 1)."""
        rows = features.double()
        variance = ((rows @ self.covariance) * rows).sum(-1, keepdim=True)
        return GaussianOutputs((rows @ self.mean)[:, None], variance)


def weight_space(features: Tensor, targets: Tensor, noise: float) -> LinearPosterior:
    """From features (N, P) and targets (N, 1): covariance (I + ΦᵀΦ/σ²)⁻¹, mean covariance Φᵀy/σ².

    Bishop (2006), eq. 3.50 and 3.51.
    """
    rows, values = features.double(), targets.double()
    precision = torch.eye(rows.shape[1], dtype=torch.float64, device=rows.device) + rows.T @ rows / noise**2
    root = torch.linalg.cholesky(precision)
    mean = torch.cholesky_solve(rows.T @ values / noise**2, root)[:, 0]
    return LinearPosterior(mean, torch.cholesky_inverse(root))


def function_space(
    cross: Tensor, within: Tensor, prior: Tensor, targets: Tensor, noise: float
) -> tuple[Tensor, Tensor]:
    """Mean (B, 1) and variance (B, 1) of a Gaussian process at B inputs, given N targets (N, 1) with noise σ.

    Args:
        cross: (B, N), the kernel between the inputs and the data.
        within: (N, N), the kernel among the data.
        prior: (B,), the kernel of each input with itself.
        targets: (N, 1).
        noise: σ.

    Rasmussen & Williams (2006), eq. 2.25 and 2.26.
    """
    noisy = within.double() + noise**2 * torch.eye(len(within), dtype=torch.float64, device=within.device)
    root = torch.linalg.cholesky(noisy)
    mean = cross.double() @ torch.cholesky_solve(targets.double(), root)
    half = torch.linalg.solve_triangular(root, cross.double().T, upper=False)  # (N, B)
    return mean, (prior.double() - half.square().sum(0))[:, None]
