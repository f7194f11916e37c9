"""The contracts that hold the library together.

Letters everywhere: B batch, T positions, C classes, P parameters, L draws or members (always dim 0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

Params: TypeAlias = dict[str, Tensor]
"""Parameters by name. A subset of a model's weights is a dict with fewer names."""

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""What a model is called with: one tensor, positional tensors, or keyword tensors."""

ModelFactory: TypeAlias = Callable[[], nn.Module]
"""Builds a freshly initialised model from the global random stream."""


class Batch(NamedTuple):
    """Some examples. `mask` is True where a target counts; None means everywhere."""

    inputs: Inputs
    targets: Tensor
    mask: Tensor | None = None


class LogJoint(Protocol):
    """`log_joint(params, batch) -> (value, outputs)`.

        value = 1/B Σ_n log p(y_n | x_n, θ)  +  log p(θ) / N

    The mean log-likelihood per example (summed over an example's positions) plus the log prior over the
    number of examples N: an unbiased estimate of log p(θ, D) / N. At temperature 1/N a sampler of
    exp(value / temperature) targets the posterior; temperature 0 is optimisation.
    """

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Value and outputs."""
        ...


class WholeLogJoint(LogJoint, Protocol):
    """A log joint that also sees all N examples, for algorithms that need more than the gradient of a batch.

    Everything is in the units of the value, per example; parameters are one vector {"theta": (P,)}.
    """

    num_data: int
    """N"""

    def value_and_grad(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor, Params]:
        """Value, outputs and gradient on a batch; the gradient's memory may be reused by the next call."""
        ...

    def over_all(self, params: Params) -> tuple[Tensor, Params]:
        """Value and gradient over all N examples as one batch; the gradient's memory may be reused."""
        ...

    def curvature_times(self, params: Params, batch: Batch, vector: Tensor) -> Tensor:
        """(P,): (1/B Σ_n J_nᵀ Λ_n J_n - ∇² log p(θ) / N) v on a batch: the curvature of minus the value (Gauss-Newton).

        J is the Jacobian of the outputs in θ, Λ the Fisher information in the outputs.
        """
        ...

    def scores(self, params: Params, batch: Batch, count: int) -> Tensor:
        """(S, P): ∇ log p(y | x, θ) at `count` random examples x, or at those of the batch if no others can be had.

        Every y is drawn from the model, so that the mean of their outer products is the Fisher matrix per example.
        """
        ...


class Transform(NamedTuple):
    """An inference algorithm as two functions.

    `init(params) -> state` and `update(state, batch, inplace=False) -> (state, aux)`. A state is a
    NamedTuple of tensors with a `params` field; `update` is pure unless `inplace`, when it may reuse the
    old state's memory.
    """

    init: Callable[[Params], Any]
    update: Callable[..., tuple[Any, Any]]


class Draws(NamedTuple):
    """Network outputs under L posterior draws."""

    values: Tensor  # (L, B, ..., K)


class GaussianOutputs(NamedTuple):
    """A Gaussian over the K outputs of each example or position, covariance diag(diagonal) + factor factorᵀ.

    K may be a vocabulary: nothing here is K by K unless `covariance` is asked for.
    """

    mean: Tensor  # (B, ..., K)
    diagonal: Tensor  # (B, ..., K)
    factor: Tensor | None = None  # (B, ..., K, R)

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor) -> GaussianOutputs:
        """From a covariance (B, ..., K, K), which may be singular: the factor is its symmetric root."""
        return cls(mean, torch.zeros_like(mean), symmetric_root(covariance))

    @property
    def variance(self) -> Tensor:
        """(B, ..., K): the variance of every output."""
        return self.diagonal if self.factor is None else self.diagonal + self.factor.square().sum(-1)

    @property
    def covariance(self) -> Tensor:
        """(B, ..., K, K): the covariance of the outputs of each example or position."""
        spread = torch.diag_embed(self.diagonal)
        return spread if self.factor is None else spread + self.factor @ self.factor.mT

    def draw(self, draws: int, seed: int = 0) -> Tensor:
        """(L, B, ..., K): draws from the stream of `seed`, the same on every device.

        All inputs share the same standard normal numbers, so that what is said of an input does not depend on its place
        among others. Draws of different inputs are therefore not independent.
        """
        size, rank = self.mean.shape[-1], 0 if self.factor is None else self.factor.shape[-1]
        noise = matched_normals(draws, size + rank, torch.Generator("cpu").manual_seed(seed)).to(self.mean)
        every = noise[:, :size].reshape(draws, *(1,) * (self.mean.dim() - 1), size)
        values = self.mean + self.diagonal.sqrt() * every
        if self.factor is not None:
            values = values + (self.factor @ noise[:, size:].mT).movedim(-1, 0)
        return values


def symmetric_root(covariance: Tensor) -> Tensor:
    """(..., K, K): R with R R = covariance, which may be singular, as where softmax loses a direction.

    Signs of eigenvectors, and bases of equal eigenvalues, differ between machines and between batches; the symmetric
    root does not, so that draws made with it are the same.
    """
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT


def matched_normals(draws: int, size: int, source: torch.Generator) -> Tensor:
    """(draws, size), float64, on the CPU: standard normal numbers whose mean is 0 and covariance I, exactly.

    Pairs ±z have mean 0; the columns of the z are made orthogonal, of length √(draws/2), so that a number is that of a
    random point on a sphere: normal but for terms of order 1/draws. An odd number of draws, or one below twice the
    size, cannot have these moments: then they are independent draws.
    """
    half = draws // 2
    if draws % 2 or half < size:
        return torch.randn(draws, size, generator=source, dtype=torch.float64, device="cpu")
    columns, upper = torch.linalg.qr(torch.randn(half, size, generator=source, dtype=torch.float64, device="cpu"))
    z = columns * upper.diagonal().sign() * half**0.5  # without the sign, QR's choice would be no draw
    return torch.cat([z, -z])


Outputs: TypeAlias = Draws | GaussianOutputs
"""What a posterior says about a model's outputs; a likelihood turns it into a predictive."""


class Draw(NamedTuple):
    """What an attention family returns for a set of logits, `family(logits, mask)`, or `family(logits, mask, keys)`.

    The third form is for families that say `wants_keys`, whose prior is read off the keys (B, H, S, d).
    """

    weights: Tensor  # (B, H, T, S), rows sum to 1, masked entries exactly 0; (B, H, 1, E) along edges
    kl: Tensor  # (B,), summed over heads and unmasked entries; 0 for deterministic attention
