"""Five time series whose law is known, and the oracle: the exact conditional of every next value.

A sequence starts with `order` values from N(0, 1); then the process runs. The model sees every value and is
scored on the process steps only, so that for every scored target the best possible log-likelihood is known.

Letters: N sequences, T positions, K components of a mixture.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.data import Data
from bayesformer.likelihoods.predictive import bisect, check_targets_shape


@dataclass(frozen=True)
class GaussianMixture:
    """A mixture of K Gaussians for every question; answers as a predictive does.

    It is the truth, so that its whole variance is aleatoric.
    """

    weights: Tensor  # (K,), summing to 1
    means: Tensor  # (K, N, ..., 1)
    variances: Tensor  # as the means

    @property
    def shape(self) -> torch.Size:
        """(N, ...): one entry per question that is asked."""
        return self.means.shape[1:-1]

    @cached_property
    def mean(self) -> Tensor:
        """(N, ..., 1): the mean Σ w_k m_k of the mixture."""
        return self._average(self.means)

    @cached_property
    def variance(self) -> Tensor:
        """(N, ..., 1): the variance Σ w_k (v_k + (m_k - mean)²) of the mixture."""
        return self._average(self.variances + (self.means - self.mean).square())

    @property
    def total(self) -> Tensor:
        """(N, ...): total uncertainty, the variance of the truth."""
        return self.variance.squeeze(-1)

    @property
    def aleatoric(self) -> Tensor:
        """(N, ...): aleatoric uncertainty, all of the variance: the truth is known."""
        return self.total

    @property
    def epistemic(self) -> Tensor:
        """(N, ...): epistemic uncertainty, 0 since the truth is known."""
        return torch.zeros_like(self.total)

    def log_prob(self, targets: Tensor) -> Tensor:
        """(N, ...): log density of each target."""
        check_targets_shape(targets, self.means.shape[1:])
        z = (targets - self.means).square() / self.variances + (2 * math.pi * self.variances).log()
        return (self._weights.log() - 0.5 * z).logsumexp(0).squeeze(-1)

    def cdf(self, targets: Tensor) -> Tensor:
        """(N, ..., 1): probability of a value at or below each target."""
        return self._average(torch.special.ndtr((targets - self.means) / self.variances.sqrt()))

    def quantile(self, level: float) -> Tensor:
        """(N, ..., 1): the value that a draw stays below with probability `level`."""
        z = torch.special.ndtri(torch.tensor(level, dtype=torch.float64)).item()
        own = self.means + z * self.variances.sqrt()
        return bisect(self.cdf, own.amin(0), own.amax(0), level)

    def sample(self, generator: torch.Generator) -> Tensor:
        """(N, ..., 1): one draw per question."""
        like, device = self.means[0], generator.device
        noise = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=device)
        part = torch.rand(like.shape, generator=generator, dtype=like.dtype, device=device)
        mean, variance = self._pick(self.means, part), self._pick(self.variances, part)
        return mean + variance.sqrt() * noise.to(like.device)

    def select(self, mask: Tensor) -> GaussianMixture:
        """The M questions where `mask` is True, as (K, M, 1)."""
        return GaussianMixture(self.weights, self.means[:, mask], self.variances[:, mask])

    @property
    def _weights(self) -> Tensor:
        return self.weights.view(-1, *[1] * (self.means.dim() - 1))

    def _average(self, values: Tensor) -> Tensor:
        return (self._weights * values).sum(0)

    def _pick(self, values: Tensor, uniform: Tensor) -> Tensor:
        return _pick(self.weights, values, uniform.to(values.device))


@dataclass(frozen=True)
class Series:
    """A process X' = f_k(X_t, ..., X_{t-order+1}, X_0) + s ε, where component k has probability w_k."""

    name: str
    description: str
    order: int  # values of the past that the next one needs, and that a sequence starts with
    noise: float  # s², variance of the noise
    means: Callable[[Tensor, Tensor], Tensor]  # window (..., order), latest first, and X_0 (...) -> (K, ...)
    weights: tuple[float, ...] = (1.0,)

    def conditional(self, inputs: Tensor) -> GaussianMixture:
        """The exact law of the value after each position, given the inputs (N, T, 1) up to it.

        Before the process starts the next value is N(0, 1).
        """
        if inputs.dim() != 3 or inputs.shape[-1] != 1:
            raise ValueError(f"inputs must have shape (N, T, 1); got {tuple(inputs.shape)}.")
        values = inputs.squeeze(-1)  # (N, T)
        windows = F.pad(values, (self.order - 1, 0)).unfold(-1, self.order, 1).flip(-1)  # (N, T, order)
        means = self.means(windows, values[:, :1].expand_as(values))  # (K, N, T)
        running = torch.arange(values.shape[1], device=inputs.device) >= self.order - 1  # (T,)
        variances = torch.where(running, self.noise, 1.0).to(means)
        return GaussianMixture(
            means.new_tensor(self.weights),
            torch.where(running, means, 0.0).unsqueeze(-1),
            variances.expand_as(means).unsqueeze(-1),
        )

    def log_likelihood(self, data: Data) -> Tensor:
        """(N,): log density of each sequence's process steps under the truth; no model can expect more."""
        if not isinstance(data.inputs, Tensor) or data.mask is None:
            raise ValueError("data must be what `generate` gives: one tensor of inputs, and a mask.")
        return (self.conditional(data.inputs).log_prob(data.targets) * data.mask).sum(-1)


def generate(series: Series, count: int, generator: torch.Generator, length: int = 24) -> Data:
    """`count` sequences of `series.order` starting values and `length` steps of the process.

    Inputs are all values but the last, targets all but the first, (N, order + length - 1, 1); the mask keeps
    the `length` targets that are process steps.
    """
    if count < 1 or length < 1:
        raise ValueError(f"count and length must be at least 1; got count={count}, length={length}.")
    order, device = series.order, generator.device
    noise = torch.randn(order + length, count, generator=generator, device=device)
    part = torch.rand(length, count, generator=generator, device=device)
    weights = noise.new_tensor(series.weights)
    values = list(noise[:order])  # each (N,)
    for step in range(length):
        means = series.means(torch.stack(values[: -order - 1 : -1], -1), values[0])  # (K, N)
        mean = _pick(weights, means, part[step])
        values.append(mean + math.sqrt(series.noise) * noise[order + step])
    x = torch.stack(values, 1).unsqueeze(-1)  # (N, order + length, 1)
    mask = torch.arange(1, order + length, device=device) >= order  # (T,)
    return Data(x[:, :-1], x[:, 1:], mask.repeat(count, 1))


def _pick(weights: Tensor, values: Tensor, uniform: Tensor) -> Tensor:
    """From (K, ...) values the component that a uniform number falls on."""
    component = torch.searchsorted(weights.cumsum(0), uniform, right=True).clamp_max(len(weights) - 1)
    return values.gather(0, component.unsqueeze(0)).squeeze(0)


def _m1(window: Tensor, first: Tensor) -> Tensor:  # noqa: ARG001
    return 0.8 * window[None, ..., 0]


def _m2(window: Tensor, first: Tensor) -> Tensor:  # noqa: ARG001
    return torch.stack([0.9 * window[..., 0], 0.54 * window[..., 0]])


def _m3(window: Tensor, first: Tensor) -> Tensor:  # noqa: ARG001
    n = torch.arange(5, device=window.device)
    return ((2 * math.pi / 5 * n * window + 1 / (n + 1)).cos() / 5).sum(-1)[None]


def _m4(window: Tensor, first: Tensor) -> Tensor:
    return (0.8 / 5 * window.sum(-1) + first / 5)[None]


def _m5(window: Tensor, first: Tensor) -> Tensor:  # noqa: ARG001
    j = torch.arange(2, device=window.device)
    return (0.5 * (4 * math.pi / 2 * j * window.unsqueeze(-1)).cos()).sum((-2, -1))[None]


SERIES: dict[str, Series] = {
    "m1": Series("m1", "linear in the last value", 1, 0.5, _m1),
    "m2": Series("m2", "one of two slopes on the last value: two modes", 1, 0.3, _m2, (0.7, 0.3)),
    "m3": Series("m3", "five cosines of the last value", 1, 0.5, _m3),
    "m4": Series("m4", "linear in the last five values and the first", 5, 0.5, _m4),
    "m5": Series("m5", "cosines of the last two values", 2, 0.5, _m5),
}
