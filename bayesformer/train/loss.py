"""The objective as a loss for a training loop of one's own, or for a Trainer."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from bayesformer.core.errors import unknown_name
from bayesformer.core.rules import check_num_data
from bayesformer.core.types import Batch, Inputs
from bayesformer.layers import has_random_parts
from bayesformer.likelihoods import Likelihood, as_likelihood
from bayesformer.likelihoods.language import decoder_inputs, is_causal_language_model, regression_targets, unwrapped
from bayesformer.model.calling import apply
from bayesformer.model.space import Space
from bayesformer.priors.prior import PriorLike, as_prior
from bayesformer.train.objective import bound, check_batch
from bayesformer.train.vector_prior import NamedPrior

Per = Literal["example", "token"]


def loss(
    model: nn.Module,
    inputs: Inputs,
    targets: Tensor,
    *,
    likelihood: Likelihood | str,
    num_data: int,
    mask: Tensor | None = None,
    prior: PriorLike | None = None,
    temperature: float = 1.0,
    per: Per = "example",
) -> Tensor:
    """(): minus the objective that `fit` ascends, in nats, from one forward pass of a model in its present mode.

        loss = - 1/B Σ_n log p(y_n | x_n) + κ 1/B Σ_n KL_n(attention) + (κ KL(weights) - log p(θ)) / N

    An example's positions are summed: for token losses that is T times a mean token loss. With `per="token"` the whole
    is divided by the mean number of positions per example that count in this batch, (Σ_n T_n) / B. The first term then
    is the mean over all counted tokens, as torch and transformers have it, and what is random costs its share of that:

        loss = [- Σ_n log p(y_n | x_n) + κ Σ_n KL_n(attention)] / Σ_n T_n + (κ KL(weights) - log p(θ)) / N · B / Σ_n T_n

    Adding `kl_divergence(model).mean()` to a mean token loss instead would weigh the KL by T_n too much. In a loop:

        for inputs, targets in loader:
            bayesformer.loss(model, inputs, targets, likelihood="categorical", num_data=N).backward()
            optimizer.step()
            optimizer.zero_grad()

    With the Trainer of transformers, for token classification or language models; the total is its own mean token loss
    plus the KL of a batch divided by its tokens:

        class BayesianTrainer(transformers.Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                self.model_accepts_loss_kwargs = False  # this loss is a mean of its batch, not of accumulated ones
                labels = inputs.pop("labels")
                return bayesformer.loss(
                    model, inputs, labels, likelihood=NextToken(), num_data=len(self.train_dataset), per="token"
                )

    Args:
        model: called once; it may have stochastic attention, random weights or concrete dropout, or none of these.
        inputs: what the model is called with: a tensor, a tuple of positional or a dict of keyword arguments.
        targets: (B, ...), as the likelihood wants them.
        likelihood: a name or an object; a causal language model needs `NextToken()` or `Categorical(aligned=True)`.
        num_data: N, the number of training examples, sequences and not tokens.
        mask: which targets count; those equal to an ignore_index do not in any case.
        prior: log p(θ) over all weights that require a gradient, such as "normal(0, 1)"; None leaves them free.
        temperature: κ, the weight of the KL terms.
        per: "example" or "token", see above.
    """
    if per not in get_args(Per):
        raise unknown_name("per", per, get_args(Per))
    check_num_data(num_data)
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0; got {temperature}.")
    known = _checked(likelihood, model, targets)
    targets = regression_targets(model, targets, known)
    batch = Batch(decoder_inputs(model, inputs, targets), targets, mask)
    kappa = temperature if has_random_parts(model) else None
    log_prior = None if prior is None else _log_prior(model, prior)
    outputs = apply(model, batch.inputs)
    check_batch(known, outputs.detach(), batch)
    value, _ = bound(outputs, model, batch, known, num_data, kappa, log_prior)
    return -value if per == "example" else -value / _positions(known, batch)


def _positions(likelihood: Likelihood, batch: Batch) -> Tensor:
    """(): the mean number of counted positions per example."""
    counted = likelihood.counted_positions(batch.targets, batch.mask).sum()
    if not bool(counted):
        raise ValueError(f"at least one of the targets must count; got {batch.targets.numel()} of which none does.")
    return counted / len(batch.targets)


def _log_prior(model: nn.Module, prior: PriorLike) -> Tensor:
    """(): log p(θ) of all weights that require a gradient, differentiable."""
    space, weights = Space.of(model), dict(model.named_parameters(remove_duplicate=False))
    theta = torch.cat([weights[name].flatten().to(space.dtype) for name in space.names])  # (P,)
    return NamedPrior(as_prior(prior), space).log_prob(theta)


def _checked(likelihood: Likelihood | str, model: nn.Module, targets: Tensor) -> Likelihood:
    known = as_likelihood(likelihood)
    if known.next_token is not None and targets.dim() == 2 and is_causal_language_model(unwrapped(model)):
        raise ValueError(
            f"likelihood must say how labels and logits of a causal language model ({type(unwrapped(model)).__name__}) "
            f"line up; got {known.name!r}. Use NextToken() if logits at position t are of the label at t + 1, as in "
            "transformers' own loss, or Categorical(aligned=True) if they are of the label at t."
        )
    return known
