"""What a network's outputs say about data: log p(y | outputs), its curvature, and the predictive.

One example may have many positions (tokens, time steps); its log-likelihood is their sum, so that one
example is one datum wherever the library divides by N. Positions outside the mask count nothing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.core.errors import unknown_name
from bayesformer.core.types import Draws, GaussianOutputs, Outputs
from bayesformer.likelihoods import links
from bayesformer.likelihoods.links import Link
from bayesformer.likelihoods.predictive import CategoricalPredictive, GaussianPredictive, Predictive

LINK_DRAWS = 512  # draws of a Gaussian over outputs where the predictive has no closed form


class Likelihood(Protocol):
    """log p(y | outputs) and what follows from it."""

    def log_prob(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B,): log-likelihood of each example, summed over its counted positions."""
        ...

    def hessian(self, outputs: Tensor) -> Tensor:
        """(B, ..., K, K): expected second derivative of -log p in the K outputs (the Fisher information)."""
        ...

    def predictive(
        self, outputs: Outputs, link: Link | None = None, draws: int | None = None, seed: int = 0
    ) -> Predictive:
        """The predictive distribution over targets.

        From a Gaussian over outputs by `link` (see `likelihoods.links`; None is the likelihood's own way), with
        `draws` of the outputs from the stream of `seed` where it has no closed form. Draws need no link.
        """
        ...

    def counted(self, targets: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """The positions that count, or None for all."""
        ...

    def check(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """Raise ValueError unless these outputs and targets fit this likelihood."""
        ...


@dataclass(frozen=True)
class Categorical:
    """One of C classes; outputs are logits (B, ..., C), targets class numbers (B, ...).

    Targets equal to `ignore_index` are padding, as in Hugging Face label tensors.
    """

    ignore_index: int = -100

    def log_prob(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """Minus the cross-entropy, summed over positions."""
        _check_shapes("categorical", outputs.shape[:-1], targets.shape)
        if mask is not None:
            targets = targets.masked_fill(~mask, self.ignore_index)
        loss = F.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(), ignore_index=self.ignore_index, reduction="none"
        )
        return -_sum_positions(loss.view(targets.shape))

    def hessian(self, outputs: Tensor) -> Tensor:
        """diag(p) - p pᵀ."""
        probs = outputs.softmax(-1)
        return torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)

    def predictive(
        self, outputs: Outputs, link: Link | None = None, draws: int | None = None, seed: int = 0
    ) -> CategoricalPredictive:
        """Softmax of every draw, or one component by a closed form."""
        closed = _closed_form(outputs, link)
        if closed is not None:
            return CategoricalPredictive(links.log_probs(closed, link or "mc")[None])
        return CategoricalPredictive(as_draws(outputs, draws, seed).log_softmax(-1))

    def counted(self, targets: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Positions in the mask whose label is not `ignore_index`."""
        kept = targets != self.ignore_index
        if mask is not None:
            kept = kept & mask
        return None if bool(kept.all()) else kept

    def check(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """Shapes agree and every counted label is a class."""
        _check_shapes("categorical", outputs.shape[:-1], targets.shape)
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise ValueError(f"targets of a categorical likelihood must be integers; got {targets.dtype}.")
        classes = outputs.shape[-1]
        kept = self.counted(targets, mask)
        labels = targets if kept is None else targets[kept]
        wrong = labels[(labels < 0) | (labels >= classes)]
        if len(wrong):
            raise ValueError(
                f"targets must lie in 0..{classes - 1} (the model has {classes} outputs) or equal "
                f"ignore_index={self.ignore_index}; got {int(wrong[0])}."
            )


@dataclass(frozen=True)
class Gaussian:
    """Real values (B, ..., D) with Gaussian noise, of known or predicted standard deviation.

    With `scale` given, outputs are the means (B, ..., D). With `scale=None`, outputs are (B, ..., 2D): the
    means, then the scales through softplus. `floor` bounds a predicted scale from below, since the density
    of a target the network can copy is otherwise unbounded.
    """

    scale: float | None = None
    floor: float = 1e-3

    def __post_init__(self) -> None:
        if self.scale is not None and not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(f"Gaussian.scale must be positive and finite, or None; got {self.scale}.")
        if not self.floor > 0:
            raise ValueError(f"Gaussian.floor must be positive; got {self.floor}.")

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, each (..., D)."""
        if self.scale is not None:
            return outputs, outputs.new_tensor(self.scale).expand_as(outputs)
        mean, raw = outputs.chunk(2, -1)
        return mean, F.softplus(raw) + self.floor

    def log_prob(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """-½ z² - log(σ √2π), summed over values and positions."""
        mean, scale = self.split(outputs)
        _check_shapes("gaussian", mean.shape, targets.shape)
        if mask is not None:
            targets = _blank(targets, mask.unsqueeze(-1))
        z = (targets - mean) / scale
        values = (-0.5 * z * z - scale.log() - 0.5 * math.log(2 * math.pi)).sum(-1)
        return _sum_positions(values if mask is None else values * mask)

    def hessian(self, outputs: Tensor) -> Tensor:
        """1/σ² for a mean; 2 (dσ/draw)² / σ² for a predicted scale."""
        _, scale = self.split(outputs)
        precision = scale.square().reciprocal()
        if self.scale is not None:
            return torch.diag_embed(precision)
        slope = torch.sigmoid(outputs.chunk(2, -1)[1])
        return torch.diag_embed(torch.cat([precision, 2 * slope.square() * precision], -1))

    def predictive(
        self, outputs: Outputs, link: Link | None = None, draws: int | None = None, seed: int = 0
    ) -> GaussianPredictive:
        """One Gaussian per draw; closed form where a Gaussian over means meets a known scale."""
        _closed_form(outputs, link, ("mc",))
        if isinstance(outputs, GaussianOutputs) and self.scale is not None:
            noise = torch.full_like(outputs.mean, self.scale**2)
            return GaussianPredictive(outputs.mean[None], noise[None], outputs.variance[None])
        mean, scale = self.split(as_draws(outputs, draws, seed))
        return GaussianPredictive(mean, scale.square())

    def counted(self, targets: Tensor, mask: Tensor | None = None) -> Tensor | None:  # noqa: ARG002
        """The mask."""
        return mask

    def check(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """Shapes agree and every counted target is finite."""
        if self.scale is None and outputs.shape[-1] % 2:
            raise ValueError(
                "a gaussian likelihood with scale=None needs an even number of outputs, means then scales; "
                f"got {outputs.shape[-1]} (outputs {tuple(outputs.shape)}). Give a fixed scale instead?"
            )
        _check_shapes("gaussian", self.split(outputs)[0].shape, targets.shape)
        _check_finite_targets(targets, mask)


@dataclass(frozen=True)
class Bernoulli:
    """Yes or no: outputs are logits in the shape of the targets, targets 0 or 1.

    The predictive is categorical with two classes. Several labels of one example are its positions.
    """

    def log_prob(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """Minus the binary cross-entropy, summed over positions."""
        _check_shapes("bernoulli", outputs.shape, targets.shape)
        if mask is not None:
            targets = _blank(targets, mask)
        loss = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")
        return -_sum_positions(loss if mask is None else loss * mask)

    def hessian(self, outputs: Tensor) -> Tensor:
        """p (1 - p), each logit on its own."""
        probs = torch.sigmoid(outputs)
        return torch.diag_embed(probs * (1 - probs))

    def predictive(
        self, outputs: Outputs, link: Link | None = None, draws: int | None = None, seed: int = 0
    ) -> CategoricalPredictive:
        """Two classes from one logit."""
        closed = _closed_form(outputs, link, ("mc", "probit"))
        if closed is not None:
            return CategoricalPredictive(links.binary_probit(closed)[None])
        logits = as_draws(outputs, draws, seed)
        return CategoricalPredictive(torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], -1))

    def counted(self, targets: Tensor, mask: Tensor | None = None) -> Tensor | None:  # noqa: ARG002
        """The mask."""
        return mask

    def check(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """Shapes agree and every counted target is 0 or 1."""
        _check_shapes("bernoulli", outputs.shape, targets.shape)
        kept = targets if mask is None else targets[mask]
        wrong = kept[(kept != 0) & (kept != 1)]
        if len(wrong):
            raise ValueError(f"targets of a bernoulli likelihood must be 0 or 1; got {wrong[0].item()}.")


LIKELIHOODS: dict[str, type[Any]] = {
    "categorical": Categorical,
    "gaussian": Gaussian,
    "bernoulli": Bernoulli,
}


def as_likelihood(likelihood: Likelihood | str) -> Likelihood:
    """A likelihood by name, or itself."""
    if not isinstance(likelihood, str):
        return likelihood
    if likelihood not in LIKELIHOODS:
        raise unknown_name("likelihood", likelihood, LIKELIHOODS)
    return LIKELIHOODS[likelihood]()


def to_json(likelihood: Likelihood) -> dict[str, Any]:
    """Name and settings, for a saved posterior."""
    for name, kind in LIKELIHOODS.items():
        if type(likelihood) is kind:
            return {"name": name, **asdict(likelihood)}  # type: ignore[call-overload]
    raise ValueError(
        f"likelihood must be one of {', '.join(LIKELIHOODS)} to be saved; got {type(likelihood).__name__}."
    )


def from_json(saved: dict[str, Any]) -> Likelihood:
    """The likelihood that `to_json` described."""
    settings = dict(saved)
    name = settings.pop("name")
    if name not in LIKELIHOODS:
        raise unknown_name("likelihood", name, LIKELIHOODS)
    return LIKELIHOODS[name](**settings)


def as_draws(outputs: Outputs, draws: int | None = None, seed: int = 0) -> Tensor:
    """(L, B, ..., K): the draws, or draws of a Gaussian over outputs, with noise of its own for every input."""
    if isinstance(outputs, Draws):
        return outputs.values
    if draws is not None and draws < 1:
        raise ValueError(f"draws must be at least 1; got {draws}.")
    return outputs.draw(draws or LINK_DRAWS, seed)


def _closed_form(outputs: Outputs, link: str | None, allowed: tuple[Link, ...] = links.LINKS) -> GaussianOutputs | None:
    """The Gaussian to put through a link in closed form, or None where outputs are drawn."""
    links.check_link(link, allowed)
    if isinstance(outputs, GaussianOutputs):
        return None if link in {None, "mc"} else outputs
    if link is not None:
        raise ValueError(f"link must be none for outputs that are draws of the weights; got {link!r}.")
    return None


def _sum_positions(values: Tensor) -> Tensor:
    return values.flatten(1).sum(1) if values.dim() > 1 else values


def _blank(targets: Tensor, mask: Tensor) -> Tensor:
    """Targets with padding set to 0: a NaN there would survive multiplication by 0, in the gradient too."""
    return targets.masked_fill(~mask, 0)


def _check_shapes(name: str, predicted: torch.Size, targets: torch.Size) -> None:
    if predicted != targets:
        raise ValueError(
            f"targets of a {name} likelihood must have shape {tuple(predicted)} for these model outputs; "
            f"got {tuple(targets)}."
        )


def _check_finite_targets(targets: Tensor, mask: Tensor | None) -> None:
    kept = targets if mask is None else targets[mask]
    bad = ~torch.isfinite(kept)
    if bad.any():
        raise ValueError(f"targets must be finite where they count; got {int(bad.sum())} NaN or infinite.")
