"""The answer to a question: a predictive distribution, kept draw by draw.

A predictive is an equal mixture over L draws. Probabilities and densities are averaged, never logits or
log-probabilities, and the spread between draws is the epistemic part of the uncertainty.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from bayesformer.likelihoods.notebook_table import NotebookTable

P = TypeVar("P", bound="Predictive")
T = TypeVar("T")


class Predictive(Protocol):
    """What scores see. Uncertainties have the shape of the targets; positions are independent questions."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the questions: (B,) or (B, T)."""
        ...

    @property
    def total(self) -> Tensor:
        """Total uncertainty, aleatoric + epistemic."""
        ...

    @property
    def aleatoric(self) -> Tensor:
        """The part that stays when the weights are known."""
        ...

    @property
    def epistemic(self) -> Tensor:
        """The part that comes from not knowing the weights."""
        ...

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log of the averaged probability or density of each target."""
        ...

    def select(self: P, mask: Tensor) -> P:
        """The questions where `mask` is True, flattened: how padding leaves every score."""
        ...


@runtime_checkable
class Temperable(Protocol):
    """A predictive that can be made wider or narrower by one number."""

    def tempered(self: T, temperature: float) -> T:
        """The same predictive at another temperature; 1 leaves it as it is."""
        ...


class Ahead(Protocol):
    """A predictive that may be about later positions than its own."""

    @property
    def ahead(self) -> int:
        """How many positions later the target stands."""
        ...


def log_mean_exp(values: Tensor, dim: int = 0) -> Tensor:
    """log of the mean of exp(values), without leaving log space."""
    return values.logsumexp(dim) - math.log(values.shape[dim])


def entropy(log_probs: Tensor) -> Tensor:
    """Entropy in nats over the last axis; a class of probability 0 adds 0, not NaN."""
    terms = log_probs.exp() * log_probs
    return -terms.masked_fill(log_probs == -math.inf, 0.0).sum(-1)  # a NaN stays NaN: it must not look certain


@dataclass(frozen=True)
class CategoricalPredictive(NotebookTable):
    """A mixture of L categorical distributions for every question.

    Total uncertainty is the entropy of the averaged probabilities, aleatoric the average entropy, epistemic
    their difference: the mutual information between the label and the draw.

    For next tokens `ahead` is 1: row t is about the label at position t + 1. `aligned` brings labels and rows together.
    """

    log_probs: Tensor  # (L, B, ..., C), each row normalised
    ahead: int = 0

    @property
    def shape(self) -> torch.Size:
        """Shape of the questions: (B,) or (B, T)."""
        return self.log_probs.shape[1:-1]

    @cached_property
    def log_mean(self) -> Tensor:
        """(B, ..., C): log of the averaged probabilities."""
        return log_mean_exp(self.log_probs)

    @cached_property
    def probs(self) -> Tensor:
        """(B, ..., C): the averaged probabilities."""
        return self.log_mean.exp()

    @cached_property
    def labels(self) -> Tensor:
        """(B, ...): the most probable class."""
        return self.log_mean.argmax(-1)

    @cached_property
    def total(self) -> Tensor:
        """Entropy of the averaged probabilities, in nats."""
        return entropy(self.log_mean)

    @cached_property
    def aleatoric(self) -> Tensor:
        """Average entropy of the draws, in nats."""
        return entropy(self.log_probs).mean(0)

    @cached_property
    def epistemic(self) -> Tensor:
        """Mutual information of label and draw, in nats; rounding below 0 is cut off (Jensen: it is >= 0)."""
        return (self.total - self.aleatoric).clamp_min(0)

    def log_prob(self, targets: Tensor) -> Tensor:
        """(B, ...): log averaged probability of the given classes."""
        check_not_ahead(self)
        check_targets_shape(targets, self.shape)
        classes = self.log_probs.shape[-1]
        if targets.numel() and not (int(targets.min()) >= 0 and int(targets.max()) < classes):
            raise ValueError(
                f"targets must lie in 0..{classes - 1}; got {int(targets.min())}..{int(targets.max())}. "
                "Drop padding first: predictive.select(mask)."
            )
        return self.log_mean.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)

    def tempered(self, temperature: float) -> CategoricalPredictive:
        """Every draw's probabilities to the power 1/T, normalised again: logits divided by T."""
        return CategoricalPredictive((self.log_probs / temperature).log_softmax(-1), self.ahead)

    def select(self, mask: Tensor) -> CategoricalPredictive:
        """The M questions where `mask` is True, as (L, M, C)."""
        return CategoricalPredictive(self.log_probs[:, mask])

    def notebook_columns(self) -> dict[str, Tensor]:
        """The most probable class and its probability."""
        return {"most probable": self.labels, "probability": self.probs.amax(-1)}

    def first_positions(self, count: int) -> CategoricalPredictive:
        """The first rows (L, B, count, C) of every example, to be compared with targets position by position."""
        return CategoricalPredictive(self.log_probs[:, :, :count])


@dataclass(frozen=True)
class GaussianPredictive(NotebookTable):
    """A mixture of L Gaussians for every question, D values wide.

    `spreads` is the variance of the component's own mean, where a posterior over outputs is itself Gaussian:
    it is epistemic, although it lies inside one component. By the law of total variance

        total = E[variance] + Var[mean],   aleatoric = E[variance],   epistemic = Var[mean].
    """

    means: Tensor  # (L, B, ..., D)
    variances: Tensor  # (L, B, ..., D), of the observation noise
    spreads: Tensor | None = None  # (L, B, ..., D), of the mean itself

    @property
    def shape(self) -> torch.Size:
        """Shape of the questions: (B,) or (B, T)."""
        return self.means.shape[1:-1]

    @cached_property
    def widths(self) -> Tensor:
        """(L, B, ..., D): variance of each component as a density."""
        return self.variances if self.spreads is None else self.variances + self.spreads

    @cached_property
    def mean(self) -> Tensor:
        """(B, ..., D): mean of the mixture."""
        return self.means.mean(0)

    @cached_property
    def variance(self) -> Tensor:
        """(B, ..., D): variance of the mixture."""
        return self.widths.mean(0) + self.means.var(0, correction=0)

    @cached_property
    def total(self) -> Tensor:
        """Total variance, summed over the D values of a question."""
        return self.aleatoric + self.epistemic

    @cached_property
    def aleatoric(self) -> Tensor:
        """Average noise variance, summed over the D values."""
        return self.variances.mean(0).sum(-1)

    @cached_property
    def epistemic(self) -> Tensor:
        """Variance of the mean, summed over the D values."""
        between = self.means.var(0, correction=0)
        within = 0.0 if self.spreads is None else self.spreads.mean(0)
        return (between + within).sum(-1)

    def log_prob(self, targets: Tensor) -> Tensor:
        """(B, ...): log averaged density; the D values of a question are one joint observation."""
        values = value_targets(targets, self.mean.shape)
        z = (values - self.means).square() / self.widths + (2 * math.pi * self.widths).log()
        return log_mean_exp(-0.5 * z.sum(-1))

    def cdf(self, targets: Tensor) -> Tensor:
        """(B, ..., D): probability of a value at or below each target."""
        return torch.special.ndtr((_with_axis(targets, self.mean.shape) - self.means) / self.widths.sqrt()).mean(0)

    def quantile(self, level: float) -> Tensor:
        """(B, ..., D): the mixture's quantile, by bisection between the components' own quantiles."""
        if not 0 < level < 1:
            raise ValueError(f"level must lie strictly between 0 and 1; got {level}.")
        z = torch.special.ndtri(torch.tensor(level, dtype=torch.float64, device="cpu")).item()
        own = self.means + z * self.widths.sqrt()
        return bisect(self.cdf, own.amin(0), own.amax(0), level)

    def tempered(self, temperature: float) -> GaussianPredictive:
        """All variances times T, around the same mean: the noise's, and that between the draws."""
        means = self.mean + math.sqrt(temperature) * (self.means - self.mean)
        spreads = None if self.spreads is None else temperature * self.spreads
        return GaussianPredictive(means, temperature * self.variances, spreads)

    def select(self, mask: Tensor) -> GaussianPredictive:
        """The M questions where `mask` is True, as (L, M, D)."""
        spreads = None if self.spreads is None else self.spreads[:, mask]
        return GaussianPredictive(self.means[:, mask], self.variances[:, mask], spreads)

    def notebook_columns(self) -> dict[str, Tensor]:
        """Mean and standard deviation of the first values of a question."""
        mean, sd = self.mean, self.variance.sqrt()
        names = [""] if mean.shape[-1] == 1 else [f" {d}" for d in range(min(3, mean.shape[-1]))]
        pairs = [{f"mean{name}": mean[..., d], f"sd{name}": sd[..., d]} for d, name in enumerate(names)]
        return {name: value for pair in pairs for name, value in pair.items()}


@dataclass(frozen=True)
class PoissonPredictive(NotebookTable):
    """A mixture of L Poisson distributions for every question, one count each.

    By the law of total variance, with rate λ: total = E[λ] + Var[λ], aleatoric = E[λ], epistemic = Var[λ].
    """

    log_rates: Tensor  # (L, B, ...)

    @property
    def shape(self) -> torch.Size:
        """Shape of the questions: (B,) or (B, T)."""
        return self.log_rates.shape[1:]

    @cached_property
    def mean(self) -> Tensor:
        """(B, ...): mean of the mixture."""
        return self.log_rates.exp().mean(0)

    @cached_property
    def variance(self) -> Tensor:
        """(B, ...): variance of the mixture, which is the total uncertainty."""
        return self.aleatoric + self.epistemic

    @property
    def total(self) -> Tensor:
        """(B, ...): total variance of the count."""
        return self.variance

    @property
    def aleatoric(self) -> Tensor:
        """(B, ...): average variance of the count given the rate, which is the average rate."""
        return self.mean

    @cached_property
    def epistemic(self) -> Tensor:
        """(B, ...): variance of the rate between draws."""
        return self.log_rates.exp().var(0, correction=0)

    def log_prob(self, targets: Tensor) -> Tensor:
        """(B, ...): log averaged probability of each count."""
        check_targets_shape(targets, self.shape)
        counts = targets.to(self.log_rates.dtype)
        return log_mean_exp(counts * self.log_rates - self.log_rates.exp() - torch.lgamma(counts + 1))

    def select(self, mask: Tensor) -> PoissonPredictive:
        """The M questions where `mask` is True, as (L, M)."""
        return PoissonPredictive(self.log_rates[:, mask])

    def notebook_columns(self) -> dict[str, Tensor]:
        """Mean and standard deviation of the count."""
        return {"mean": self.mean, "sd": self.variance.sqrt()}


def aligned(predictive: P, targets: Tensor, mask: Tensor | None = None) -> tuple[P, Tensor, Tensor | None]:
    """Predictions, targets and mask such that prediction i is about target i.

    They are that already, unless the predictive is about later positions: then the last predictions and the first
    targets, which have no partner, are left out, and (B, T) becomes (B, T - ahead).
    """
    ahead: int = getattr(predictive, "ahead", 0)
    if not ahead:
        return predictive, targets, mask
    check_targets_shape(targets, predictive.shape)
    rows = predictive.first_positions(targets.shape[1] - ahead)  # type: ignore[attr-defined]
    return rows, targets[:, ahead:], None if mask is None else mask[:, ahead:]


def check_not_ahead(predictive: Ahead) -> None:
    """Refuse to compare predictions of next tokens with the tokens at the same positions."""
    if predictive.ahead:
        raise ValueError(
            f"predictive answers about targets {predictive.ahead} position later and cannot be compared with targets "
            "position by position; use predictive, targets = likelihood.pairs(predictive, targets, mask) first."
        )


def bisect(cdf: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, level: float, steps: int = 60) -> Tensor:
    """Where an increasing function between `low` and `high` passes `level`, elementwise."""
    for _ in range(steps):
        middle = (low + high) / 2
        below = cdf(middle) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def value_targets(targets: Tensor, expected: torch.Size) -> Tensor:
    """Real targets in the shape (B, ..., D) of their means; of one value per question they may lack the last axis."""
    targets = _with_axis(targets, expected)
    check_targets_shape(targets, expected)
    return targets


def _with_axis(targets: Tensor, expected: torch.Size) -> Tensor:
    return targets.unsqueeze(-1) if expected[-1] == 1 and targets.shape == expected[:-1] else targets


def check_targets_shape(targets: Tensor, expected: torch.Size) -> None:
    """Refuse targets that would silently broadcast against the predictions."""
    if targets.shape != expected:
        raise ValueError(f"targets must have shape {tuple(expected)}; got {tuple(targets.shape)}.")
