"""More data for a Gaussian posterior: it becomes the prior, N(m, P⁻¹), of what comes after."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

from bayesformer.core.ambient_autocast import without_autocast
from bayesformer.data import as_batches
from bayesformer.laplace.earlier import newton_mode, posterior_after, trained_mode
from bayesformer.laplace.method import Laplace
from bayesformer.laws import GaussianLaw
from bayesformer.posterior import Posterior
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from bayesformer.train.training import Training


@without_autocast
def laplace_update(
    posterior: Posterior,
    data: Any,
    *,
    method: Laplace | None = None,
    training: Training | None = None,
    seed: int = 0,
) -> Posterior:
    """The posterior after further data, with an earlier posterior as the prior; the earlier one is left as it is.

    `bf.fit(model, data, method=Laplace(...), prior=posterior)` is the same with training.

    Args:
        posterior: from `Laplace` or `laplace`, or from this function; with `method`, any Gaussian over the weights.
        data: the new data alone, in any form that `fit` takes. The old data are needed no more.
        method: how the curvature of the new data is taken; by default as that of the old.
        training: how the next mode is found, the old posterior standing for the old data. None takes one Gauss-Newton
            step from the old mean, which is exact for a model that is linear in its weights.
        seed: decides the order of data in training, and labels drawn for the curvature.

    The log evidence in the facts becomes that of all data so far. Kronecker factors of old and new data are merged:
    sums add up, averages are averaged, so that one pair remains.
    """
    started = time.perf_counter()
    method = _method_of(posterior) if method is None else method
    problem = Problem(
        posterior.model,
        posterior.likelihood,
        as_batches(data, "data"),
        training=training or Training(),
        seed=seed,
        infer=posterior.infer,
        preparation=posterior.preparation,
        prior=posterior,
    )
    prototype = Prototype(problem)
    mode = newton_mode(method, prototype, seed) if training is None else trained_mode(method, prototype)[0]
    seconds = float(posterior.facts.get("seconds", 0.0)) + time.perf_counter() - started
    facts = {**posterior.facts, "data": problem.data.fingerprint(), "seconds": seconds}
    return posterior_after(method, prototype, mode, seed, facts)


def _method_of(posterior: Posterior) -> Laplace:
    known = posterior.facts.get("method", {})
    if known.get("name") != "laplace" or not isinstance(posterior.law, GaussianLaw):
        raise ValueError(
            "posterior must come from the laplace method to be updated without a method; it comes from "
            f"{known.get('name')!r}. Give method=Laplace(...)."
        )
    return Laplace(**{field.name: known[field.name] for field in fields(Laplace) if field.name in known})
