"""One network whose predictive is tempered on validation data: the baseline that any posterior has to beat."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bayesformer.methods.points import Mle
from bayesformer.posterior import Posterior
from bayesformer.train.problem import Problem


@dataclass(frozen=True)
class TemperatureScaling:
    """Temperature scaling: one network, the temperature of its predictive chosen on validation data (Guo et al. 2017).

    The network is that of `Mle`; the validation data are those that stop its training.
    """

    def fit(self, problem: Problem) -> Posterior:
        """Train one network, then choose the temperature by the likelihood of the validation data."""
        if problem.validation is None:
            raise ValueError("temperature_scaling needs validation data to choose the temperature on; got none.")
        found = Mle().fit(problem).calibrate(problem.validation)
        return replace(found, facts={**found.facts, "method": {"name": "temperature_scaling"}})
