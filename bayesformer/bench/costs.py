"""What a posterior costs: the time of a prediction, the numbers it stores, and the memory its training took."""

from __future__ import annotations

from functools import partial
from typing import Any

from bayesformer.bench.timing import best_seconds
from bayesformer.data import Data
from bayesformer.data.inputs import first_tensor
from bayesformer.posterior import Posterior

TIMED, TIMES, PATIENCE = 128, 5, 2.0
"""Examples whose prediction is timed, how often, and after how many seconds no further prediction begins."""


def cost_of(posterior: Posterior, test: Data, peak_mib: float | None) -> dict[str, Any]:
    """Seconds of training, milliseconds of prediction per example, stored numbers, and peak memory in MiB.

    Stored numbers are those of the law over the weights; buffers, which every model has, are not counted.
    """
    law = {name: tensor for name, tensor in posterior.law.tensors().items() if not name.startswith("buffer.")}
    return {
        "fit_seconds": round(float(posterior.facts["seconds"]), 3),
        "predict_ms": round(prediction_ms(posterior, test), 4),
        "parameters": sum(tensor.numel() for tensor in law.values()),
        "peak_mib": peak_mib,
    }


def prediction_ms(posterior: Posterior, test: Data) -> float:
    """Milliseconds per example, in this process alone.

    The fastest of a few predictions of the same examples, after one that warms up and chooses a strategy: other
    programs only ever add to a time.
    """
    few = test.take(slice(0, TIMED)).inputs
    predict = partial(posterior.predict, few)
    return best_seconds(predict, TIMES, PATIENCE) / len(first_tensor(few)) * 1e3
