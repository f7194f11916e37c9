"""Temperature of a predictive, chosen on validation data by likelihood (Guo et al. 2017, for one network)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bayesformer.core.doubts import Doubt, doubts_in, recorded, warn_of
from bayesformer.likelihoods.predictive import Temperable
from bayesformer.predict.conformal_sets import paired_predictions

if TYPE_CHECKING:
    from bayesformer.posterior import Posterior

FEWEST = 10  # targets, below which a temperature would be chosen by chance
LOWEST, HIGHEST = 1e-2, 1e2  # temperatures that are tried
NEAR = 0.01  # of a bound, in log T: the search has ended there
CHECK = "calibrate"


def best_temperature(posterior: Posterior, validation: Any) -> tuple[float, dict[str, float]]:
    """The temperature at which the predictive gives validation targets the highest log-likelihood.

    Returns it with the mean log-likelihood per target before and after. A bounded scalar search over log T.
    """
    from scipy.optimize import minimize_scalar

    pairs = paired_predictions(posterior, validation, "validation")
    if not all(isinstance(p, Temperable) for p, _ in pairs):
        kind = type(pairs[0][0]).__name__
        raise ValueError(f"calibrate needs a posterior that predicts classes or Gaussian values; got {kind}.")
    count = sum(len(y) for _, y in pairs)
    if count < FEWEST:
        raise ValueError(f"validation must have at least {FEWEST} targets to choose a temperature by; got {count}.")

    def score(log_t: float) -> float:
        values = (p.tempered(math.exp(log_t)).log_prob(y) for p, y in pairs)  # type: ignore[attr-defined]
        return sum(float(v.double().sum()) for v in values) / count

    bounds = (math.log(LOWEST), math.log(HIGHEST))
    found = minimize_scalar(lambda t: -score(t), bounds=bounds, method="bounded")
    before, after = score(0.0), score(float(found.x))
    if after <= before:  # nothing gained: the search is only as exact as its tolerance
        return 1.0, {"before": before, "after": before}
    return math.exp(float(found.x)), {"before": before, "after": after}


def with_temperature(facts: Mapping[str, Any], found: float, gained: Mapping[str, float]) -> dict[str, Any]:
    """The facts of a posterior with a temperature, and with a doubt, of which is warned, at a bound of the search."""
    bound = next((b for b in (LOWEST, HIGHEST) if abs(math.log(found / b)) < NEAR), None)
    sentence = (
        f"calibrate: the temperature that fits validation data best is {found:.3g}, at the bound {bound} of its search "
        f"({LOWEST} to {HIGHEST}): the predictions say next to nothing about these targets, or all of them. Look at "
        "the labels of validation, and whether they are numbered as in training."
    )
    new = [] if bound is None else [Doubt(CHECK, sentence, found, bound)]
    warn_of(new)
    kept = [doubt for doubt in doubts_in(facts) if doubt.check != CHECK]
    return {**facts, "calibrated": {"temperature": found, **gained}, **recorded([*kept, *new])}
