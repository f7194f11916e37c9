"""One of C classes, for an example or for each of its positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.core.compat import transformed
from bayesformer.core.types import Outputs
from bayesformer.likelihoods import links
from bayesformer.likelihoods.base import Likelihood, sum_positions
from bayesformer.likelihoods.links import Link
from bayesformer.likelihoods.output_draws import as_draws, closed_form, promote
from bayesformer.likelihoods.predictive import CategoricalPredictive
from bayesformer.likelihoods.wide_cross_entropy import WIDE, WideCrossEntropy


@dataclass(frozen=True)
class Categorical(Likelihood):
    """One of C classes; outputs are logits (B, ..., C), targets class numbers (B, ...).

    Targets equal to `ignore_index` are padding, as in Hugging Face label tensors. `aligned=True` says that the label
    at position t belongs to the logits at t although the model is a causal language model; without it such a model is
    given `NextToken` where labels are its inputs, and refused otherwise.
    """

    name: ClassVar[str] = "categorical"
    links: ClassVar[tuple[Link, ...]] = links.LINKS

    ignore_index: int = -100
    aligned: bool | None = None

    def __post_init__(self) -> None:
        if self.aligned is not None and self.aligned is not True:
            raise ValueError(
                f"Categorical.aligned must be True or None; got {self.aligned!r}. For labels that the logits of the "
                "position before answer, use NextToken()."
            )

    def log_prob(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B,): minus the cross-entropy, summed over counted positions."""
        self.check_shapes(outputs, targets)
        if mask is not None:
            targets = targets.masked_fill(~super().kept(targets, mask), self.ignore_index)
        rows, labels = promote(outputs).flatten(0, -2), targets.flatten().long()
        if rows.shape[-1] >= WIDE and rows.requires_grad and len(rows) and not transformed():
            loss = WideCrossEntropy.apply(rows, labels, self.ignore_index)
        else:
            loss = F.cross_entropy(rows, labels, ignore_index=self.ignore_index, reduction="none")
        return -sum_positions(loss.view(targets.shape))

    def identified(self, outputs: Tensor) -> Tensor:
        """(B, ..., C): logits centred over the classes, since softmax does not see a shift common to all."""
        return centred(outputs)

    def hessian(self, outputs: Tensor) -> Tensor:
        """(B, ..., C, C): diag(p) - p pᵀ."""
        probs = promote(outputs).softmax(-1)
        return torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)

    def hessian_diagonal(self, outputs: Tensor) -> Tensor:
        """(B, ..., C): p (1 - p), p = softmax(outputs)."""
        probs = promote(outputs).softmax(-1)
        return probs * (1 - probs)

    def hessian_times(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        """(B, ..., C): p u - p (pᵀ u), never a C by C matrix."""
        probs = promote(outputs).softmax(-1)
        return probs * (vectors - (probs * vectors).sum(-1, keepdim=True))

    def position_roots(self, outputs: Tensor) -> Callable[[int], Iterator[Tensor]]:
        """From a position to C - 1 columns (B, C) of a root of diag(p) - p pᵀ, never a C by C matrix."""
        flat = self.positions(outputs)
        return lambda t: softmax_columns(promote(flat[:, t]))

    def rank(self, outputs: Tensor) -> int:
        """C - 1: softmax does not see a shift that is common to all logits."""
        return outputs.shape[-1] - 1

    def predictive(
        self, outputs: Outputs, link: Link | None = None, draws: int | None = None, seed: int = 0
    ) -> CategoricalPredictive:
        """Softmax of every draw, or one component by a closed form."""
        closed = closed_form(outputs, link, self.links)
        if closed is not None:
            return CategoricalPredictive(links.log_probs(closed, link or "mc")[None])
        return CategoricalPredictive(as_draws(outputs, draws, seed).log_softmax(-1))

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """(B, ...): class numbers drawn from softmax(outputs)."""
        probs = promote(outputs).softmax(-1)
        drawn = torch.multinomial(probs.flatten(0, -2).cpu(), 1, generator=generator)
        return drawn.to(outputs.device).view(probs.shape[:-1])

    def kept(self, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, ...), boolean: labels in the mask that are not `ignore_index`."""
        kept = targets != self.ignore_index
        return kept if mask is None else kept & super().kept(targets, mask)

    def check(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """Shapes agree, every counted label is a class, and at least one counts."""
        self.check_shapes(outputs, targets)
        if outputs.shape[-1] < 2:
            raise ValueError(
                f"a {self.name} likelihood needs at least two outputs, one for each class; the model has one. For two "
                "classes and one output use likelihood='bernoulli'."
            )
        check_labels(outputs.shape[-1], targets, self.kept(targets, mask), self.ignore_index, self.name)

    @property
    def next_token(self) -> Likelihood | None:
        """A NextToken likelihood with the same `ignore_index`, for causal language models; None if `aligned`."""
        from bayesformer.likelihoods.next_token import NextToken

        return None if self.aligned else NextToken(self.ignore_index)


def centred(logits: Tensor) -> Tensor:
    """(B, ..., C): logits minus their mean over the classes."""
    return logits - logits.mean(-1, keepdim=True)


def softmax_columns(logits: Tensor) -> Iterator[Tensor]:
    """The C - 1 columns (B, C) of a root S of diag(p) - p pᵀ, p = softmax(logits).

    With v = √p and the Householder reflection H that takes v to the last axis, S = diag(v) H without its last column.
    """
    v = logits.softmax(-1).sqrt()
    last = v.shape[-1] - 1
    mirror = v.clone()
    mirror[..., last] += 1  # v + e: never small, since v >= 0
    for k in range(last):
        column = -mirror * (v[..., k] / (1 + v[..., last])).unsqueeze(-1)
        column[..., k] += 1
        yield v * column


def check_labels(classes: int, targets: Tensor, kept: Tensor, ignore_index: int, name: str) -> None:
    """Raise ValueError unless targets are integers, some are counted, and those are class numbers."""
    if targets.dtype == torch.bool:
        raise ValueError(
            f"targets of a {name} likelihood must be integers; got torch.bool, which looks like a mask. "
            "A mask comes third, (inputs, targets, mask); call .long() if these are labels."
        )
    if targets.is_floating_point():
        raise ValueError(f"targets of a {name} likelihood must be integers; got {targets.dtype}.")
    labels = targets[kept]
    if not len(labels):
        raise ValueError(
            f"at least one label must count; all {targets.numel()} equal ignore_index={ignore_index}, lie outside the "
            "mask, or have no output that answers them."
        )
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise ValueError(
            f"targets must lie in 0..{classes - 1} (the model has {classes} outputs) or equal "
            f"ignore_index={ignore_index}; got {int(wrong[0])}."
        )
