"""What is left of a predictive over a vocabulary when the probabilities of all its tokens are not kept."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from bayesformer.likelihoods.notebook_table import NotebookTable
from bayesformer.likelihoods.predictive import check_not_ahead, check_targets_shape

ASK = "Use predict(..., full=True) for all of them."


@dataclass(frozen=True)
class TokenPredictive(NotebookTable):
    """Next tokens by what is mostly asked of them: uncertainties, the most probable tokens, the labels' probabilities.

    Everything is of the probabilities averaged over draws, in nats. Row t is about the token at position t + 1, as
    `ahead` says. `log_prob` and `Likelihood.pairs` take the labels that were given with the inputs, and no others.
    """

    total: Tensor  # (B, T), entropy of the averaged probabilities
    aleatoric: Tensor  # (B, T), average entropy of the draws
    epistemic: Tensor  # (B, T), their difference: mutual information of token and draw; exactly 0 for one draw
    top_tokens: Tensor  # (B, T, k), the most probable first; -1 beyond the length of a batch
    top_probs: Tensor  # (B, T, k)
    targets: Tensor | None = None  # (B, T), the labels that the rows answer; -100 where none counts
    target_log_prob: Tensor | None = None  # (B, T), log averaged probability of these; 0 where none counts
    ahead: int = 0

    @property
    def shape(self) -> torch.Size:
        """Shape of the questions: (B, T)."""
        return self.total.shape

    @property
    def labels(self) -> Tensor:
        """(B, T): the most probable token."""
        return self.top_tokens[..., 0]

    @property
    def counted(self) -> Tensor | None:
        """(B, T), boolean: rows whose label was given and counts; None where no labels were given."""
        return None if self.targets is None else self.targets != -100

    def log_prob(self, targets: Tensor) -> Tensor:
        """(B, T): log averaged probability of the labels that were given to `predict`."""
        if self.targets is None or self.target_log_prob is None:
            raise ValueError(
                "predictive has no probabilities of labels, since inputs had none: give them to predict as 'labels' "
                f"beside input_ids. {ASK}"
            )
        check_not_ahead(self)
        check_targets_shape(targets, self.shape)
        if not bool((targets == self.targets).all()):
            raise ValueError(f"targets must be the labels that were given to predict; others were. {ASK}")
        return self.target_log_prob

    def select(self, mask: Tensor) -> TokenPredictive:
        """The M questions where `mask` is True, flattened."""
        return self._each(lambda value: value[mask])

    def first_positions(self, count: int) -> TokenPredictive:
        """The first rows of every example, to be compared with targets position by position."""
        return self._each(lambda value: value[:, :count])

    def notebook_columns(self) -> dict[str, Tensor]:
        """The most probable token and its probability, and the log-probability of the label where one was given."""
        found = {"most probable": self.labels, "probability": self.top_probs[..., 0]}
        if self.target_log_prob is not None and self.counted is not None:
            found["log p(label)"] = self.target_log_prob.masked_fill(~self.counted, torch.nan)
        return found

    def _each(self, change: Any) -> TokenPredictive:
        """Every tensor changed alike; what is left answers its own targets."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{n: change(v) for n, v in own.items() if isinstance(v, Tensor)}, ahead=0)

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("probs", "log_probs", "log_mean"):
            raise AttributeError(
                f"predictive has no {name}: that of a language model is reduced to uncertainties, the top tokens and "
                f"the labels' log-probabilities. {ASK}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def join_tokens(parts: list[TokenPredictive]) -> TokenPredictive:
    """Parts end to end; rows beyond the length of a part are NaN, and tokens and labels there are missing."""
    length = max(part.shape[1] for part in parts)

    def joined(name: str, missing: float) -> Tensor | None:
        values = [getattr(part, name) for part in parts]
        if any(value is None for value in values):
            return None
        return torch.cat([_lengthened(value, length, missing) for value in values])

    missing = {"top_tokens": -1, "targets": -100, "target_log_prob": 0.0}
    names = [field.name for field in fields(TokenPredictive) if field.name != "ahead"]
    return replace(parts[0], **{name: joined(name, missing.get(name, torch.nan)) for name in names})  # type: ignore[arg-type]


def _lengthened(value: Tensor, length: int, missing: float) -> Tensor:
    if value.shape[1] == length:
        return value
    grown = value.new_full((len(value), length, *value.shape[2:]), missing)
    grown[:, : value.shape[1]] = value
    return grown
