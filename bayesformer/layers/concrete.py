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
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from bayesformer.attention.multi_head import Softmax
from bayesformer.core.errors import unknown_name
from bayesformer.core.standard_noise import logistic_like
from bayesformer.layers.local import is_conv1d

INPUTS = ("input", "x", "query", "key", "value")
"""Names under which the layers that get a site take what is dropped."""


class ConcreteSite(nn.Module):
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
        """Draw the rate anew, uniformly from the range given."""
        with torch.no_grad():
            self.logit.uniform_(*self.start).logit_()

    @property
    def rate(self) -> Tensor:
        """(1,): the probability p with which an entry is dropped."""
        return self.logit.sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """`x` times a mask of its own for every entry."""
        self.width = x.shape[-1]
        if not self.training:
            return x
        kept = (logistic_like(x.to(self.logit)) + self.logit).mul_(-1 / self.temperature).sigmoid_()  # 1 - z
        return x * (kept * (1 + self.logit.exp())).to(x.dtype)  # 1 / (1 - p) = 1 + e^logit

    def regulariser(self, weights: Sequence[Tensor] = (), width: int | None = None) -> Tensor:
        """(): l² ‖W‖² / (2 (1 - p)) - K H(p). Without weights only the entropy, K being the last width seen."""
        entropy = softplus(self.logit) - self.rate * self.logit
        value = -(self.width if width is None else width) * entropy
        for weight in weights:
            squares = weight.to(self.logit.dtype).square().sum()
            value = value + 0.5 * self.lengthscale**2 * (1 + self.logit.exp()) * squares
        return value.sum()

    def extra_repr(self) -> str:
        """Rate and temperature, for the printed module."""
        return f"rate={self.rate.item():.3g}, temperature={self.temperature:g}"


def convert_concrete(
    model: nn.Module,
    rate: float | tuple[float, float] = (0.1, 0.5),
    temperature: float = 0.1,
    lengthscale: float = 1.0,
    names: str = "*",
    attention: bool = True,
) -> nn.Module:
    """A copy of a model with a site before every linear layer that is learned; see `add_concrete_sites`."""
    return add_concrete_sites(copy.deepcopy(model), rate, temperature, lengthscale, names, attention)


def add_concrete_sites(
    model: nn.Module,
    rate: float | Sequence[float] = (0.1, 0.5),
    temperature: float = 0.1,
    lengthscale: float = 1.0,
    names: str = "*",
    attention: bool = True,
) -> nn.Module:
    """Put a site before every linear layer whose weight is learned, and on the attention weights of our Softmax.

    This changes the model itself. A layer is learned if its weight requires a gradient: a frozen weight has no
    posterior that dropout could stand for. Linear layers are nn.Linear, Hugging Face Conv1D and the packed input
    projections of nn.MultiheadAttention (queries, keys and values masked apart, at one rate). The output projection of
    nn.MultiheadAttention, whose forward is never called, has none. Attention weights multiply values, not a weight with
    a prior, so their sites pay only the entropy, K being the number of keys. `names` is a pattern of module names.
    Dropout that the model has elsewhere stays as it is.
    """
    between = rate if isinstance(rate, int | float) else (rate[0], rate[1])
    sites = _sites(model, attention)
    chosen = {name: module for name, module in sites.items() if fnmatchcase(name, names)}
    if not sites:
        raise ValueError(
            "model must have a linear layer whose weight is learned, or stochastic attention weights to drop; "
            f"{type(model).__name__} has none. Learn such a weight (infer=), or use mc_dropout."
        )
    if not chosen:
        raise unknown_name("linear or attention module in names:", names, sites)
    for module in chosen.values():
        like = next(iter([*module.parameters(), *model.parameters()]))
        with like.device:
            site = ConcreteSite(between, temperature, lengthscale).train(module.training)
        if like.dtype == torch.float64:
            site.double()
        if isinstance(module, Softmax):
            module.dropout = site  # type: ignore[assignment]
        else:
            module.concrete = site
            module.register_forward_pre_hook(_drop_inputs, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # a mask cannot be drawn in the shape of a nested tensor
    return model


def _sites(model: nn.Module, attention: bool) -> dict[str, Any]:
    """The modules that can have a site, by name."""
    hidden = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, Softmax):
            if attention:
                found[name] = module
        elif id(module) not in hidden and _is_learned(module):
            found[name] = module
    return found


def _is_learned(module: nn.Module) -> bool:
    """Whether this is a linear layer whose weight requires a gradient."""
    with torch.enable_grad():  # a parametrised weight is computed here
        return any(weight.requires_grad for weight in _weights(module))


def regularisers(model: nn.Module) -> list[Tensor]:
    """The regulariser of every site in a model."""
    return [
        child.regulariser(_weights(module), _width(module))
        for module in model.modules()
        for child in module.children()
        if isinstance(child, ConcreteSite)
    ]


def _drop_inputs(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    count = 3 if isinstance(module, nn.MultiheadAttention) else 1
    dropped = tuple(module.concrete(value) if i < count else value for i, value in enumerate(args))
    return dropped, {key: module.concrete(value) if key in INPUTS else value for key, value in kwargs.items()}


def _weights(module: Any) -> list[Tensor]:
    """The matrices that multiply what a site before the module drops; none for other modules."""
    if isinstance(module, nn.MultiheadAttention):
        packed: Tensor | None = module.in_proj_weight
        return [packed] if packed is not None else [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    return [module.weight] if isinstance(module, nn.Linear) or is_conv1d(module) else []


def _width(module: Any) -> int | None:
    """K, how many numbers a site before the module drops per position; None for attention weights."""
    if isinstance(module, nn.MultiheadAttention):
        return int(module.embed_dim + (module.kdim or module.embed_dim) + (module.vdim or module.embed_dim))
    if isinstance(module, nn.Linear):
        return module.in_features
    return len(module.weight) if is_conv1d(module) else None
