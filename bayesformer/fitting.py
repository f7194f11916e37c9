"""The one call: a model, data, a likelihood and a method give a posterior."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from bayesformer.core.strategy import Strategy
from bayesformer.dataset import DataLike, as_data
from bayesformer.likelihoods import Likelihood, as_likelihood
from bayesformer.methods import Method, Mle, Problem, build_method
from bayesformer.posterior import Posterior
from bayesformer.progress import bars
from bayesformer.train import Training
from bayesformer.types import ModelFactory


def fit(
    model: nn.Module | ModelFactory,
    data: DataLike,
    *,
    likelihood: Likelihood | str,
    method: Method | str | None = None,
    validation: DataLike | None = None,
    training: Training | None = None,
    seed: int = 0,
    strategy: Strategy = "auto",
    workers: int | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> Posterior:
    """Fit a posterior over a model's trainable weights.

    Args:
        model: any `nn.Module` (left unchanged; training starts from its weights), or a function that builds one.
            Frozen parameters stay as they are.
        data: training data: a pair (inputs, targets), a dict with "labels", a torch dataset, or `Data`. Inputs are
            one tensor, a tuple (positional) or a dict (keyword arguments of the model).
        likelihood: "categorical", "gaussian", "bernoulli", or an object from `bayesformer.likelihoods`.
        method: a method object such as `Ensemble(members=5)`, or its name; maximum likelihood by default.
        validation: data for early stopping; without it the last epoch is kept.
        training: how to train.
        seed: decides starts, data order and dropout; equal seeds give equal results on one machine.
        strategy: how members run: "auto" (by the size of the problem), "looped", "batched" or "processes".
        workers: processes for the members, used if there are two or more; starting them takes seconds.
        checkpoint: a folder for checkpoints; an interrupted fit called again resumes from it.
        progress: show progress bars; by default on a terminal.
    """
    with bars(progress) as reporter:
        problem = Problem(
            model=model,
            likelihood=as_likelihood(likelihood),
            data=as_data(data, "data"),
            validation=None if validation is None else as_data(validation, "validation"),
            training=training or Training(),
            seed=seed,
            strategy=strategy,
            workers=workers,
            checkpoint=None if checkpoint is None else Path(checkpoint),
            reporter=reporter,
        )
        chosen = build_method(method) if isinstance(method, str) else method or Mle()
        return chosen.fit(problem)
