"""What a language model wrote, and how unsure it was of every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

QUANTITIES = ("total", "aleatoric", "epistemic", "log_prob", "self_certainty")


class Alternatives(NamedTuple):
    """The most probable tokens at every step."""

    ids: Tensor  # (..., T_new, k)
    probs: Tensor  # (..., T_new, k), in descending order


@dataclass(frozen=True)
class Generation:
    """Sequences drawn from the averaged probabilities of L draws, with the uncertainty of every new token in nats.

    Uncertainties are those of the averaged predictive before temperature and top-p, which only say what is chosen.
    Entries after the end of a sequence are 0 and do not count.
    """

    sequences: Tensor  # (B, T + T_new), prompt and new tokens; the pad token after the end
    tokens: Tensor  # (B, T_new)
    counted: Tensor  # (B, T_new), boolean: up to and with the token that ended the sequence
    total: Tensor  # (B, T_new), entropy of the averaged probabilities
    aleatoric: Tensor  # (B, T_new), average entropy of the draws
    epistemic: Tensor  # (B, T_new), their difference: mutual information of token and draw; exactly 0 for one draw
    log_prob: Tensor  # (B, T_new), log of the averaged probability of the token that was chosen
    self_certainty: Tensor  # (B, T_new), KL from the uniform distribution to the averaged one (Kang et al. 2025)
    averaged: Alternatives  # (B, T_new, k), of the averaged probabilities
    by_draw: Alternatives  # (L, B, T_new, k), of each draw
    text: tuple[str, ...] | None = None  # of the new tokens, where a tokenizer was given
    prompts: tuple[str, ...] | None = None
    pieces: tuple[tuple[str, ...], ...] | None = None  # the text of each new token
    names: dict[int, str] | None = None  # the text of every token among the alternatives

    @property
    def draws(self) -> int:
        """L, the draws of the weights that were averaged."""
        return len(self.by_draw.ids)

    @property
    def lengths(self) -> Tensor:
        """(B,): new tokens of each sequence."""
        return self.counted.sum(1)

    def sum(self, quantity: str) -> Tensor:
        """(B,): total, aleatoric, epistemic, log_prob or self_certainty, summed over a sequence's new tokens."""
        return self._values(quantity).sum(1)

    def mean(self, quantity: str) -> Tensor:
        """(B,): the same per new token, so that long answers are not uncertain for their length."""
        return self.sum(quantity) / self.lengths.clamp_min(1)

    def _values(self, quantity: str) -> Tensor:
        if quantity not in QUANTITIES:
            from bayesformer.core.errors import unknown_name

            raise unknown_name("quantity", quantity, QUANTITIES)
        values: Tensor = getattr(self, quantity)
        return values

    def __repr__(self) -> str:
        said = "" if self.text is None else f", {self.text[0][:60]!r}"
        epistemic = self.mean("epistemic").mean().item()
        return (
            f"Generation({len(self.tokens)} sequences of up to {self.tokens.shape[1]} new tokens, {self.draws} draws, "
            f"epistemic {epistemic:.4f} nats per token{said})"
        )

    def _repr_html_(self) -> str:
        from bayesformer.generation.token_page import fragment

        return fragment(self)
