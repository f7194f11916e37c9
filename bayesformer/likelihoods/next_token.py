"""The next token of a causal language model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.core.types import Outputs
from bayesformer.likelihoods import links
from bayesformer.likelihoods.base import Likelihood
from bayesformer.likelihoods.categorical import Categorical, check_labels
from bayesformer.likelihoods.links import Link
from bayesformer.likelihoods.predictive import CategoricalPredictive


@dataclass(frozen=True)
class NextToken(Likelihood):
    """Logits (B, T, V) at position t are of the label at t + 1; labels are (B, T), usually the input ids themselves.

    Labels are shifted as the loss of transformers' causal language models does it: the first is predicted by nothing,
    the last logits have no label. Labels equal to `ignore_index` do not count; padding whose label is a pad token does,
    there as here.

    The predictive keeps the positions of the logits: row t is about the token after position t, the last row about the
    token that comes next. `counted` is about labels. Scores of `bayesformer.evaluate` that take a mask accept both as
    they are: `evaluate.classification(predictive, labels, likelihood.counted(labels))`; for others `pairs` gives
    predictions and labels side by side. `Posterior.predict` reduces the predictive to a `TokenPredictive` unless it is
    asked for all probabilities (`full=True`).
    """

    name: ClassVar[str] = "next_token"
    links: ClassVar[tuple[Link, ...]] = links.LINKS
    ahead: ClassVar[int] = 1
    reduces: ClassVar[bool] = True

    ignore_index: int = -100

    @property
    def _classes(self) -> Categorical:
        """The likelihood of labels that were shifted to the logits that answer them."""
        return Categorical(self.ignore_index, aligned=True)

    def log_prob(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B,): log-likelihood of the tokens of each sequence that are counted, given those before."""
        self.check_shapes(outputs, targets)
        if mask is not None:
            targets = targets.masked_fill(~super().kept(targets, mask), self.ignore_index)
        return self._classes.log_prob(outputs, self._shifted(targets))

    def _shifted(self, targets: Tensor) -> Tensor:
        return F.pad(targets[:, 1:], (0, 1), value=self.ignore_index)

    def identified(self, outputs: Tensor) -> Tensor:
        """(B, T, V): logits centred over the vocabulary."""
        return self._classes.identified(outputs)

    def hessian(self, outputs: Tensor) -> Tensor:
        """(B, T, V, V): diag(p) - p pᵀ of the logits at every position."""
        return self._classes.hessian(outputs)

    def hessian_diagonal(self, outputs: Tensor) -> Tensor:
        """(B, T, V): p (1 - p) of the logits at every position."""
        return self._classes.hessian_diagonal(outputs)

    def hessian_times(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        """(B, T, V): p u - p (pᵀ u) at every position, never a V by V matrix."""
        return self._classes.hessian_times(outputs, vectors)

    def position_roots(self, outputs: Tensor) -> Callable[[int], Iterator[Tensor]]:
        """From a position to V - 1 columns (B, V) of a root of diag(p) - p pᵀ, never a V by V matrix."""
        return self._classes.position_roots(outputs)

    def rank(self, outputs: Tensor) -> int:
        """V - 1: softmax does not see a shift that is common to all logits."""
        return self._classes.rank(outputs)

    def predictive(
        self, outputs: Outputs, link: Link | None = None, draws: int | None = None, seed: int = 0
    ) -> CategoricalPredictive:
        """Probabilities (L, B, T, V) in which row t is about the token after position t."""
        found = self._classes.predictive(outputs, link, draws, seed)
        if len(found.shape) != 2:
            raise ValueError(
                f"outputs of a next_token likelihood must be (B, T, V); got {tuple(found.log_probs.shape[1:])}."
            )
        return replace(found, ahead=self.ahead)

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """(B, T): labels whose entry t + 1 is drawn from the logits at t; entry 0 is `ignore_index`."""
        drawn = self._classes.sample(outputs, generator)
        return F.pad(drawn[:, :-1], (1, 0), value=self.ignore_index)

    def kept(self, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, T), boolean: labels after the first that lie in the mask and are not `ignore_index`."""
        later = torch.arange(targets.shape[-1], device=targets.device) > 0
        return self._classes.kept(targets, mask) & later

    def align(self, targets: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Labels moved one position to the left, to the logits that answer them, and which of them count."""
        kept = self.kept(targets, mask)
        return self._shifted(targets.masked_fill(~kept, self.ignore_index)), F.pad(kept[:, 1:], (0, 1), value=False)

    def check_shapes(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise ValueError unless outputs are (B, T, V) and targets (B, T)."""
        if outputs.dim() != 3:
            raise ValueError(f"outputs of a next_token likelihood must be (B, T, V); got {tuple(outputs.shape)}.")
        super().check_shapes(outputs, targets)

    def check(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """Shapes agree, every counted label is a token, and at least one after the first counts."""
        self.check_shapes(outputs, targets)
        check_labels(outputs.shape[-1], targets, self.kept(targets, mask), self.ignore_index, self.name)
