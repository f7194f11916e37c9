"""The one call: a model, data, a likelihood and a method give a posterior."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from bayesformer.core.ambient_autocast import without_autocast
from bayesformer.core.doubts import each_said_once, warn_of
from bayesformer.core.progress import bars
from bayesformer.core.storage import check_folder
from bayesformer.core.strategy import Strategy
from bayesformer.core.types import ModelFactory
from bayesformer.data import as_batches
from bayesformer.likelihoods import Likelihood, as_likelihood
from bayesformer.methods import Method, Mle, Problem, build_method
from bayesformer.model.space import Choice
from bayesformer.posterior import Posterior
from bayesformer.train.training import Training


@without_autocast
def fit(
    model: nn.Module | ModelFactory,
    data: Any,
    *,
    likelihood: Likelihood | str,
    method: Method | str | None = None,
    infer: Choice = None,
    validation: Any = None,
    training: Training | None = None,
    seed: int = 0,
    init: Literal["given", "fresh", "head"] = "given",
    head: Choice = None,
    prior: Posterior | None = None,
    strategy: Strategy = "auto",
    workers: int | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> Posterior:
    """Fit a posterior over a model's weights.

    Args:
        model: any `nn.Module` (left unchanged; every member starts from its weights), or a function that builds one
            (every member starts from a new one).
        data: training data: a pair (inputs, targets), a dict with "labels", `Data`, a torch Dataset, IterableDataset
            (as `Stream(dataset, num_data=...)`) or DataLoader, a Hugging Face dataset, or a list of dicts with ragged
            sequences. Inputs are one tensor, a tuple (positional) or a dict (keyword arguments of the model).
        likelihood: "categorical", "gaussian", "bernoulli", "next_token", "poisson", one registered by
            `likelihoods.register`, or an object.
        method: a method object such as `Ensemble(members=5)`, or its name; maximum likelihood by default.
        infer: which weights are learned at all: a name pattern such as "*lora*", several, or a function
            (name, weight) -> bool; by default those that require a gradient. The others are frozen: shared with the
            model, never copied, never written.
        validation: data for early stopping; without it the last epoch is kept.
        training: how to train.
        seed: decides starts, data order and dropout; equal seeds give equal results on one machine with one number of
            torch threads.
        init: where members start: "given", the weights of the model (or of each model that is built); "fresh", new
            random weights everywhere; "head", new random weights where `head` says.
        head: the weights that init="head" draws anew, as for `infer`.
        prior: an earlier posterior that is a Gaussian over the same weights; it takes the place of the method's prior.
        strategy: how members run: "auto" (by the size of the problem), "looped", "batched" or "processes".
        workers: worker processes to use; none by default. Each has one torch thread: their results equal those of the
            loop bit for bit if the loop, too, runs on one thread (`torch.set_num_threads(1)`).
        checkpoint: a folder for checkpoints; an interrupted fit called again resumes from it, with the start it had
            then, and says so if the weights given now are others. One folder for one fit: another network, other data
            or other settings of the same method are refused.
        progress: show progress bars; by default on a terminal.
    """
    if isinstance(method, type):
        raise ValueError(
            f"method must be an object, not a class; got {method.__name__}. Did you mean {method.__name__}()?"
        )
    if not callable(model):  # a module is callable, too
        raise ValueError(f"model must be an nn.Module or a function that builds one; got {type(model).__name__}.")
    with each_said_once():
        with torch.inference_mode(False), torch.enable_grad(), bars(progress) as reporter:
            problem = Problem(
                model=model,
                likelihood=as_likelihood(likelihood),
                data=as_batches(data, "data"),
                validation=None if validation is None else as_batches(validation, "validation"),
                training=training or Training(),
                seed=seed,
                infer=infer,
                init=init,
                head=head,
                prior=prior,
                strategy=strategy,
                workers=workers,
                checkpoint=None if checkpoint is None else check_folder(checkpoint, "checkpoint"),
                reporter=reporter,
            )
            chosen = build_method(method) if isinstance(method, str) else method or Mle()
            posterior = chosen.fit(problem)
        warn_of(posterior.doubts)
    return posterior
