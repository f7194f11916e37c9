"""How the gradient of every single example is computed: all of a batch in one vmapped pass, or one after the other."""

from __future__ import annotations

import logging

import torch
from torch import nn

from bayesformer.core.errors import is_out_of_memory
from bayesformer.core.seeds import generator
from bayesformer.core.types import Params
from bayesformer.core.vectors import THETA
from bayesformer.inference.ekf_common import Scores, looped_scores, scores
from bayesformer.model.modes import set_training
from bayesformer.train.objective import Objective
from bayesformer.train.prototype import Prototype

MOST = 2**25  # numbers of a forward pass of a batch, 128 MiB in float32, that a vmapped backward pass may multiply
log = logging.getLogger("bayesformer")


def scores_for(prototype: Prototype, held: tuple[str, ...]) -> Scores:
    """`scores` if the model can be vmapped over examples and a batch fits in memory, else `looped_scores`.

    Decided by a trial on two examples and a shell of its own, thus by the model alone. torch.func keeps what its
    backward pass computes besides what the forward pass does, for all examples of a batch: a large model goes through
    one by one, each of its passes being work enough. A model that decides by the
    values of its inputs, or moves buffers, cannot be vmapped; neither can one whose noise needs the global streams.
    Recurrent layers have no batching rule: under vmap torch would run them one by one as well, with a warning.

    Args:
        prototype: the model, its data and its likelihood.
        held: modules in evaluation mode, as they will be.
    """
    batch_numbers = prototype.example_numbers * prototype.problem.training.batch_size
    recurrent = any(isinstance(module, nn.RNNBase) for module in prototype.prepared.modules())
    if recurrent or prototype.randomness.kind == "global" or batch_numbers > MOST:
        return looped_scores
    try:
        together = _tried(prototype, held, scores)
    except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise
        log.info("gradients of examples are computed one by one: the model cannot be vmapped (%s)", error)
        return looped_scores
    if prototype.randomness.kind == "none":
        alone = _tried(prototype, held, looped_scores)
        if not torch.allclose(together[THETA], alone[THETA], 1e-3, 1e-5):
            log.info("gradients of examples are computed one by one: those of a vmapped pass differ")
            return looped_scores
    return scores


def _tried(prototype: Prototype, held: tuple[str, ...], way: Scores) -> Params:
    """Gradients of the first examples, (B, P)."""
    shell = prototype.skeleton.shell()
    set_training(shell.module, held)
    objective = Objective(shell, prototype.likelihood, prototype.problem.num_data)
    noise = generator(0, "trial", device=shell.theta.device)
    with prototype.randomness.passing(noise, prototype.dropout_rate):
        return way(objective, {THETA: shell.theta}, prototype.trial_batch)[2]
