"""The log joint of a model as a pure function of its weights by name, for transforms of ours or of `posteriors`."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor, nn

from bayesformer.core.compat import transformed
from bayesformer.core.types import Batch, LogJoint, Params
from bayesformer.likelihoods import Likelihood, as_likelihood
from bayesformer.model.calling import call
from bayesformer.model.randomness import plain_attention
from bayesformer.model.skeleton import shadow
from bayesformer.priors.prior import PriorLike, as_prior


def log_joint(model: nn.Module, likelihood: Likelihood | str, prior: PriorLike | None, num_data: int) -> LogJoint:
    """`log_joint(params, batch) -> (value, outputs)`: the mean log-likelihood of a batch plus the log prior over N.

        value = 1/B Σ_n log p(y_n | x_n, θ)  +  log p(θ) / N

    `params` holds any of the model's parameters by name, the others stay as they are; the prior is over those given.
    The model itself is not touched: passes run on a private tree that shares its weights, in the mode it has now.

    Args:
        model: any module.
        likelihood: an object or its name.
        prior: a law of every weight, a table of laws by name pattern, or None.
        num_data: N, the number of training examples.
    """
    if num_data < 1:
        raise ValueError(f"num_data must be the number of training examples, at least 1; got {num_data}.")
    module, chosen = shadow(model), as_likelihood(likelihood)
    law = None if prior is None else as_prior(prior)

    def value(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        with plain_attention() if transformed() else nullcontext():
            outputs = call(module, params, batch.inputs)
        mean = chosen.log_prob(outputs, batch.targets, batch.mask).mean()
        if law is not None:
            mean = mean + law.log_prob(params) / num_data
        return mean, outputs.detach()

    return value
