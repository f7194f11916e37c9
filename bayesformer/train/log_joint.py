"""The log joint of a model as a pure function of its weights by name, for transforms of ours or of `posteriors`."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor, nn
from torch.func import functional_call

from bayesformer.core.compat import transformed
from bayesformer.core.rules import check_num_data
from bayesformer.core.types import Batch, LogJoint, Params
from bayesformer.layers import has_random_parts
from bayesformer.likelihoods import Likelihood, as_likelihood
from bayesformer.model.calling import apply
from bayesformer.model.randomness import plain_attention
from bayesformer.model.skeleton import shadow
from bayesformer.priors.prior import Prior, PriorLike, as_prior
from bayesformer.train.objective import bound


def log_joint(model: nn.Module, likelihood: Likelihood | str, prior: PriorLike | None, num_data: int) -> LogJoint:
    """`log_joint(params, batch) -> (value, outputs)`: the mean log-likelihood of a batch plus the log prior over N.

        value = 1/B Σ_n log p(y_n | x_n, θ)  +  (log p(θ) - KL(weights)) / N  -  1/B Σ_n KL_n(attention)

    It is minus `loss` with the same prior: the KL terms are there for a model with random weights, concrete dropout or
    stochastic attention, and 0 for any other. `params` holds any of the model's parameters by name, the others stay as
    they are; the prior is over those given. The model itself is not touched: passes run on a private tree that shares
    its weights, in the mode it has now.

    Args:
        model: any module.
        likelihood: an object or its name.
        prior: a law of every weight, a table of laws by name pattern, or None.
        num_data: N, the number of training examples.
    """
    check_num_data(num_data)
    passed = _JointPass(shadow(model), as_likelihood(likelihood), None if prior is None else as_prior(prior), num_data)

    known = {name for name, _ in passed.module.named_parameters(remove_duplicate=False)}

    def value(params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        batch = Batch(*batch)  # a plain pair (inputs, targets) will do
        unknown = next((name for name in params if name not in known), None)
        if unknown is not None:
            raise ValueError(f"params must be weights of the model by name; it has no {unknown!r}.")
        own = {f"module.{name}": weight for name, weight in params.items()}
        with plain_attention() if transformed() else nullcontext():
            found, outputs = functional_call(passed, own, (params, batch))
        return found, outputs.detach()

    return value


class _JointPass(nn.Module):
    """A module whose forward is the log joint of a batch, so that functional_call gives other weights to its KL too."""

    def __init__(self, module: nn.Module, likelihood: Likelihood, prior: Prior | None, num_data: int) -> None:
        super().__init__()
        self.module, self.likelihood, self.prior, self.num_data = module, likelihood, prior, num_data
        self.kappa = 1.0 if has_random_parts(module) else None

    def forward(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """The value (), with the log prior of `params`, and the outputs of the module."""
        outputs = apply(self.module, batch.inputs)
        log_prior = None if self.prior is None else self.prior.log_prob(params)
        value, _ = bound(outputs, self.module, batch, self.likelihood, self.num_data, self.kappa, log_prior)
        return value, outputs
