"""A posterior with a guarantee: sets, intervals and refusals calibrated on data that training has not seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from bayesformer.core.errors import unknown_name
from bayesformer.core.seeds import generator
from bayesformer.data import as_batches
from bayesformer.evaluate.conformal import (
    FREE,
    PENALTY,
    answer_threshold,
    class_scores,
    conformal_quantile,
    rank_of_quantile,
    residual_scores,
)
from bayesformer.likelihoods.language import batches_for
from bayesformer.likelihoods.predictive import CategoricalPredictive, GaussianPredictive, Predictive

if TYPE_CHECKING:
    from bayesformer.posterior import Posterior

PASS = 256  # calibration examples per prediction
UNCERTAINTIES = ("total", "epistemic", "aleatoric")


class Answers(NamedTuple):
    """Labels of new questions, and which of them should be given."""

    labels: Tensor  # (B, ...), the most probable classes
    answered: Tensor  # (B, ...), boolean: False is "I do not know"
    uncertainty: Tensor  # (B, ...)


@dataclass(frozen=True)
class SelectiveAnswers:
    """Answers only where uncertainty is below a threshold that conformal risk control has chosen."""

    posterior: Posterior
    threshold: float
    uncertainty: str

    def answers(self, inputs: Any, **options: Any) -> Answers:
        """Labels, whether to give them, and the uncertainty that decided; options as for `Posterior.predict`."""
        predictive: Any = self.posterior.predict(inputs, **options)
        values = getattr(predictive, self.uncertainty)
        return Answers(predictive.labels, values < self.threshold, values)


@dataclass(frozen=True)
class Conformal:
    """A posterior and what calibration examples said of it; made by `Posterior.conformal`.

    Each position that counts is one calibration example. The guarantee is for examples that are exchangeable with
    those: new rows of the same source, not other tokens of one text.
    """

    posterior: Posterior
    level: float
    seed: int
    scores: Tensor  # (n,) of classes, or (n, D) of values
    uncertainties: dict[str, Tensor]  # each (n,)
    wrong: Tensor | None  # (n,), boolean, for classes
    penalty: float = PENALTY
    free: int = FREE

    @property
    def threshold(self) -> Tensor:
        """The conformal quantile of the calibration scores: () for classes, (D,) for values."""
        return conformal_quantile(self.scores, self.level)

    def sets(self, inputs: Any, **options: Any) -> Tensor:
        """(B, ..., C), boolean: classes that together hold the true one with probability `level`.

        A random number per question, from the seed, makes that probability exact; a set may be empty where the
        network is surer than it is right. Options as for `Posterior.predict`.
        """
        if self.wrong is None:
            raise ValueError("sets are of classes; this posterior predicts values: use intervals.")
        predictive = self.posterior.predict(inputs, **{**options, "full": True})
        assert isinstance(predictive, CategoricalPredictive)
        probs = predictive.probs.flatten(0, -2)
        found = class_scores(probs, uniforms(self.seed, "sets", len(probs), probs.device), self.penalty, self.free)
        return (found <= self.threshold.to(found.device)).view(predictive.probs.shape)

    def intervals(self, inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Lower and upper ends (B, ..., D): each value lies between them with probability `level`.

        They are mean ± q sd of the predictive, q the conformal quantile of |y - mean| / sd (Lei et al. 2018).
        Options as for `Posterior.predict`.
        """
        if self.wrong is not None:
            raise ValueError("intervals are of values; this posterior predicts classes: use sets.")
        predictive = self.posterior.predict(inputs, **options)
        assert isinstance(predictive, GaussianPredictive)
        half = self.threshold.to(predictive.mean) * predictive.variance.sqrt()
        return predictive.mean - half, predictive.mean + half

    def risk(
        self, limit: float = 0.1, uncertainty: Literal["total", "epistemic", "aleatoric"] = "total"
    ) -> SelectiveAnswers:
        """Answers only where it is certain enough: at most a share `limit` of all questions is answered wrongly."""
        if self.wrong is None:
            raise ValueError("risk is of right and wrong classes; this posterior predicts values: use intervals.")
        if uncertainty not in UNCERTAINTIES:
            raise unknown_name("uncertainty", uncertainty, UNCERTAINTIES)
        threshold = answer_threshold(self.uncertainties[uncertainty], self.wrong, limit)
        return SelectiveAnswers(self.posterior, threshold, uncertainty)


def uniforms(seed: int, purpose: str, count: int, device: torch.device) -> Tensor:
    """(count,), float64 in (0, 1): the random numbers of as many questions, the same on every device."""
    source = generator(seed, "conformal", purpose, device="cpu")
    return torch.rand(count, dtype=torch.float64, generator=source, device="cpu").to(device)


def paired_predictions(posterior: Posterior, data: Any, name: str) -> list[tuple[Predictive, Tensor]]:
    """Predictions for labelled data in any form, and their targets, where they count; a pair per pass."""
    found, labelled = [], batches_for(posterior.model, as_batches(data, name), posterior.likelihood)
    for batch in labelled.in_order(PASS, posterior.device):
        predictive = posterior.predict(batch.inputs, full=True)
        found.append(posterior.likelihood.pairs(predictive, batch.targets, batch.mask))
    return found


def conformal(posterior: Posterior, data: Any, level: float, seed: int) -> Conformal:
    """The calibration scores of every example that counts."""
    pairs = paired_predictions(posterior, data, "calibration_data")
    if all(isinstance(p, CategoricalPredictive) for p, _ in pairs):
        return _of_classes(posterior, pairs, level, seed)
    if all(isinstance(p, GaussianPredictive) for p, _ in pairs):
        scores = torch.cat([residual_scores(p.mean, p.variance, y) for p, y in pairs])  # type: ignore[attr-defined]
        rank_of_quantile(len(scores), level)  # refuses too few now
        return Conformal(posterior, level, seed, scores, _uncertainties(pairs), None)
    kind = type(pairs[0][0]).__name__
    raise ValueError(f"conformal needs a posterior that predicts classes or Gaussian values; got {kind}.")


def _of_classes(posterior: Posterior, pairs: list[Any], level: float, seed: int) -> Conformal:
    probs = torch.cat([p.probs for p, _ in pairs])  # (n, C)
    targets = torch.cat([y for _, y in pairs]).long()
    rank_of_quantile(len(targets), level)
    every = class_scores(probs, uniforms(seed, "calibration", len(probs), probs.device))
    scores = every.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return Conformal(posterior, level, seed, scores, _uncertainties(pairs), probs.argmax(-1) != targets)


def _uncertainties(pairs: list[Any]) -> dict[str, Tensor]:
    return {name: torch.cat([getattr(p, name) for p, _ in pairs]) for name in UNCERTAINTIES}
