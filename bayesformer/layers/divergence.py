"""The KL divergence of what is random in a model, its weights and its attention, from their priors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesformer.attention import attention_kl, families
from bayesformer.core.rules import check_num_data
from bayesformer.core.types import Params
from bayesformer.layers.concrete import ConcreteSite, regularisers
from bayesformer.layers.variational import Variational


def kl_divergence(model: nn.Module, params: Params | None = None, num_data: int | None = None) -> Tensor:
    """The KL divergence of a model's random weights and attention from their priors, in nats; differentiable.

    Random weights are one draw for all data, attention weights are latent variables of each example:

        ELBO / N = mean_n [log p(y_n | x_n) - KL_n(attention)] - KL(weights) / N

    With `num_data` = N it returns what to subtract from the log-likelihood of each example,
    KL_n(attention) + KL(weights) / N, of shape (B,), or () if attention is not random. `bayesformer.loss` adds it to a
    loss, also to one per token. Without `num_data` it returns KL_n(attention), (B,), or the whole KL(weights), (); a
    model with both raises ValueError.

    The KL of weights counts variational weights and the regularisers of concrete dropout; where it has no closed form
    it is estimated from the draw of the latest forward pass. That of attention is of the latest forward pass, in
    training and evaluation, and 0 in mean mode; under `torch.vmap` ask inside the mapped function.

    Args:
        model: has random weights or stochastic attention, and has been called.
        params: those given to `functional_call(model, params, ...)`; None uses the model's own.
        num_data: the number of training examples.
    """
    if params is not None:
        own = {f"model.{name}": value for name, value in params.items()}
        return functional_call(_KlOf(model, num_data), own, ())
    if num_data is not None:
        check_num_data(num_data)
    terms = [module.kl() for module in model.modules() if isinstance(module, Variational)]
    terms += regularisers(model)
    attention = attention_kl(model) if families(model) else None
    if not terms:
        if attention is None:
            raise ValueError(
                f"model must have variational weights, concrete dropout or stochastic attention; "
                f"{type(model).__name__} has none. Make it so with convert, convert_concrete or attention.install."
            )
        return attention
    weights = torch.stack(terms).sum()
    if attention is None:
        return weights if num_data is None else weights / num_data
    if num_data is None:
        raise ValueError(
            "num_data must be given for a model with random weights and stochastic attention: the KL of weights is "
            "shared by all examples, that of attention is each one's own; got None."
        )
    return attention + weights / num_data


def has_random_parts(model: nn.Module) -> bool:
    """Whether `kl_divergence` has something to say of a model."""
    return bool(families(model)) or any(isinstance(m, Variational | ConcreteSite) for m in model.modules())


class _KlOf(nn.Module):
    """A module whose forward is the KL of another, so that functional_call can give that other parameters."""

    def __init__(self, model: nn.Module, num_data: int | None) -> None:
        super().__init__()
        self.model, self.num_data = model, num_data

    def forward(self) -> Tensor:
        return kl_divergence(self.model, num_data=self.num_data)
