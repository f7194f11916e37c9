"""Tokens of a language model whose labels stand where their logits are, as an encoder-decoder model has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bayesformer.likelihoods.categorical import Categorical


@dataclass(frozen=True)
class AlignedToken(Categorical):
    """`Categorical` over a vocabulary: logits (B, T, V) at position t are of the label at t.

    The likelihood is the same; predictions are reduced as those of `NextToken` are. `Categorical` becomes this on the
    language models of transformers.
    """

    name: ClassVar[str] = "aligned_token"
    reduces: ClassVar[bool] = True

    @property
    def next_token(self) -> None:
        """Labels are where their logits are."""
        return None

    @classmethod
    def of(cls, likelihood: Categorical) -> AlignedToken:
        """A categorical likelihood over a vocabulary as this one, with the same settings."""
        return cls(likelihood.ignore_index, likelihood.aligned)
