"""Concrete dropout: dropout whose rate is learned, one per site. Gal, Hron & Kendall (2017).

    z = sigmoid((logit p + logit u) / t),    u ~ U(0, 1),    x ← x (1 - z) / (1 - p)

As a posterior, the rows of a layer's weight are M with probability 1 - p and 0 with probability p. Their eq. 3
gives its KL to N(0, 1/l²) up to a constant, l² (1 - p)/2 ‖M‖² - K H(p), K the input width and H the entropy of
a coin. There the mask is not divided by 1 - p. Here it is, so M = W / (1 - p) for the layer's own weight W and

    l² ‖W‖² / (2 (1 - p)) - K H(p)

is the same thing, and is what their code computes: weights push the rate down, the entropy pulls it to ½.
"""

from __future__ import annotations

import copy
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from bayesformer.attention.multi_head import Softmax
from bayesformer.core.errors import unknown_name
from bayesformer.layers.local import is_conv1d
from bayesformer.priors.distributions import Logistic

INPUTS = ("input", "x", "query", "key", "value")
"""Names under which the layers that get a site take what is dropped."""


class ConcreteDropout(nn.Module):
    """Relaxed dropout with a learned rate, in force in training mode.

    The relaxation moves the mean of the mask a little away from 1: by at most 0.2 % for p ≤ ½ at t = 0.1, not at
    all at p = ½.

    Args:
        rate: where p starts: a number, or a range it is drawn from uniformly.
        temperature: t, the distance from a coin; masks are 0 or 1 as t → 0.
        lengthscale: l, one over the standard deviation of the prior of a weight.
    """

    width: int
    """K, the last axis of what was dropped last; 0 before"""

    def __init__(
        self, rate: float | tuple[float, float] = (0.1, 0.5), temperature: float = 0.1, lengthscale: float = 1.0
    ) -> None:
        super().__init__()
        low, high = rate if isinstance(rate, tuple) else (rate, rate)
        if not 0 < low <= high < 1:
            raise ValueError(f"rate must lie strictly between 0 and 1, or be a range of such; got {rate}.")
        if not temperature > 0:
            raise ValueError(f"temperature must be positive; got {temperature}.")
        if not lengthscale > 0:
            raise ValueError(f"lengthscale must be positive; got {lengthscale}.")
        self.start, self.temperature, self.lengthscale, self.width = (low, high), temperature, lengthscale, 0
        self.logit = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A fresh rate from the range given."""
        with torch.no_grad():
            self.logit.uniform_(*self.start).logit_()

    @property
    def rate(self) -> Tensor:
        """(1,): p."""
        return self.logit.sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """`x` times a mask of its own for every entry."""
        self.width = x.shape[-1]
        if not self.training:
            return x
        kept = torch.sigmoid(-(self.logit + Logistic().sample(x)) / self.temperature)  # 1 - z
        return (x * kept * (1 + self.logit.exp())).to(x.dtype)  # 1 / (1 - p) = 1 + e^logit

    def regulariser(self, weight: Tensor | None = None, width: int | None = None) -> Tensor:
        """(): l² ‖W‖² / (2 (1 - p)) - K H(p). Without a weight only the entropy, K being the last width seen."""
        entropy = softplus(self.logit) - self.rate * self.logit
        value = -(self.width if width is None else width) * entropy
        if weight is not None:
            value = value + 0.5 * self.lengthscale**2 * (1 + self.logit.exp()) * weight.square().sum()
        return value.sum()

    def extra_repr(self) -> str:
        """Rate and temperature."""
        return f"rate={self.rate.item():.3g}, temperature={self.temperature:g}"


def convert_concrete(
    model: nn.Module,
    rate: float | tuple[float, float] = (0.1, 0.5),
    temperature: float = 0.1,
    lengthscale: float = 1.0,
    names: str = "*",
    attention: bool = True,
) -> nn.Module:
    """A copy of a model with a site before every linear layer; see `add_concrete_sites`."""
    return add_concrete_sites(copy.deepcopy(model), rate, temperature, lengthscale, names, attention)


def add_concrete_sites(
    model: nn.Module,
    rate: float | tuple[float, float] | list[float] = (0.1, 0.5),
    temperature: float = 0.1,
    lengthscale: float = 1.0,
    names: str = "*",
    attention: bool = True,
) -> nn.Module:
    """Put a site before every linear layer of a model, and on the attention weights of our Softmax, in place.

    Linear layers are nn.Linear, Hugging Face Conv1D and the packed input projections of nn.MultiheadAttention
    (queries, keys and values masked apart, at one rate). The output projection of nn.MultiheadAttention, whose
    forward is never called, has none. Attention weights multiply values, not a weight with a prior, so their
    sites pay only the entropy, K being the number of keys. `names` is a pattern of module names. Dropout that
    the model has elsewhere stays as it is.
    """
    start = (rate[0], rate[1]) if isinstance(rate, list) else rate  # from a file: JSON has no tuples
    hidden = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    sites = 0
    for name, module in list(model.named_modules()):
        if not fnmatchcase(name, names) or id(module) in hidden:
            continue
        on_weights = attention and isinstance(module, Softmax)
        if not on_weights and not isinstance(module, nn.Linear | nn.MultiheadAttention) and not is_conv1d(module):
            continue
        like = next(iter([*module.parameters(), *model.parameters()]))
        wide = torch.promote_types(like.dtype, torch.float32)  # half precision would round steps of a rate away
        with like.device:
            site = ConcreteDropout(start, temperature, lengthscale).to(wide).train(module.training)
        if on_weights:
            module.dropout = site
        else:
            module.concrete = site
            module.register_forward_pre_hook(_drop_inputs, with_kwargs=True)
        sites += 1
    if not sites:
        candidates = _candidates(model, hidden)
        if candidates:
            raise unknown_name("linear or attention module in names:", names, candidates)
        raise ValueError(
            "concrete_dropout needs a model with linear layers (nn.Linear, nn.MultiheadAttention or Conv1D of "
            f"transformers), before which it drops; {type(model).__name__} has none. Use mc_dropout or mean_field."
        )
    return model


def regularisers(model: nn.Module) -> list[Tensor]:
    """The regulariser of every site in a model."""
    return [
        child.regulariser(*_layer(module))
        for module in model.modules()
        for child in module.children()
        if isinstance(child, ConcreteDropout)
    ]


def _drop_inputs(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    count = 3 if isinstance(module, nn.MultiheadAttention) else 1
    dropped = tuple(module.concrete(value) if i < count else value for i, value in enumerate(args))
    return dropped, {key: module.concrete(value) if key in INPUTS else value for key, value in kwargs.items()}


def _layer(module: Any) -> tuple[Tensor | None, int | None]:
    """The weight a site stands before and its input width; neither for attention weights."""
    if isinstance(module, nn.MultiheadAttention):
        packed: Tensor | None = module.in_proj_weight
        if packed is not None:
            return packed, 3 * module.embed_dim
        parts = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
        return torch.cat([part.flatten() for part in parts]), sum(part.shape[1] for part in parts)
    if isinstance(module, nn.Linear):
        return module.weight, module.in_features
    return (module.weight, len(module.weight)) if is_conv1d(module) else (None, None)


def _candidates(model: nn.Module, hidden: set[int]) -> list[str]:
    kinds = (nn.Linear, nn.MultiheadAttention, Softmax)
    return [n for n, m in model.named_modules() if (isinstance(m, kinds) or is_conv1d(m)) and id(m) not in hidden]
