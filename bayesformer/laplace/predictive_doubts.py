"""What a Laplace posterior says of its own predictions: far worse than the network's, or without any width."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bayesformer.core.doubts import Doubt
from bayesformer.data.in_memory import batch_to
from bayesformer.laplace.choosing import EXPONENTS, Tuned
from bayesformer.posterior import Posterior
from bayesformer.predict.self_check import below_the_mean
from bayesformer.train.prototype import Prototype

if TYPE_CHECKING:
    from bayesformer.laplace.method import Laplace

FEWEST, MOST, SHARE = 8, 64, 16  # examples that are predicted: one in 16, within these bounds
COLUMNS = 128  # outputs of an example beyond which that would take long


def of_predictions(posterior: Posterior, prototype: Prototype) -> list[Doubt]:
    """A doubt where linearised predictions of some training examples score far below the network at the mode."""
    trial = prototype.trial(prototype.skeleton.shell(gradients=False), prototype.trial_batch)
    if posterior.predictive not in {"linearised", "streamlined"} or trial[0].numel() > COLUMNS:
        return []
    problem = prototype.problem
    count = max(FEWEST, min(MOST, problem.num_data // SHARE))
    batch = next(iter(prototype.data.epoch(count, seed=problem.seed, member=0, epoch=0)))
    try:
        return below_the_mean(posterior, batch_to(batch, posterior.device), "linearised")
    finally:
        posterior.mean_passes.release()  # this posterior is asked once


def of_choice(method: Laplace, tuned: Tuned) -> list[Doubt]:
    """A doubt where validation data preferred the largest precision that was tried, which leaves no spread."""
    largest, chosen = 10.0 ** EXPONENTS[1], float(tuned.precisions[0])
    if method.prior_precision != "validation" or not math.isclose(chosen, largest):
        return []
    sentence = (
        f"Validation data chose the largest precision of the prior that was tried, {largest:.0e}: this posterior has "
        "hardly any width and predicts as the network at its mode. Where uncertainty is wanted use Ensemble(), Vi() or "
        "Sghmc(), or give a precision."
    )
    return [Doubt("prior", sentence, chosen, largest)]
