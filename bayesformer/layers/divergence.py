"""What a model owes for its random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesformer.layers.concrete import regularisers
from bayesformer.layers.variational import Variational
from bayesformer.types import Params


def kl_divergence(model: nn.Module, params: Params | None = None) -> Tensor:
    """(): the KL of all variational weights plus the regularisers of concrete dropout, in nats, not over N.

    Differentiable. Where a KL has no closed form it is estimated from the draw of the last forward pass. After
    `functional_call(model, params, ...)` give the same `params`: outside that call the model holds its own.
    A stochastic attention's KL is one of each example and no part of this.
    """
    if params is not None:
        return functional_call(_Owing(model), {f"model.{name}": value for name, value in params.items()}, ())
    terms = [module.kl() for module in model.modules() if isinstance(module, Variational)]
    terms += regularisers(model)
    if not terms:
        raise ValueError(
            f"model must have variational weights or concrete dropout; {type(model).__name__} has neither. "
            "Make it so with convert or convert_concrete."
        )
    return torch.stack(terms).sum()


class _Owing(nn.Module):
    """A module whose forward is the KL, so that functional_call can give it other parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Tensor:
        return kl_divergence(self.model)
