"""Convolutions and embeddings.

    m = x * W + b,   s = x² * V + s_x * (W² + V) + v_b

with * the same convolution. Correlated weights act on the patches one by one, as in a linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.predict.one_pass.carrier import Uncertain, first_uncertain, mean_of, rule
from bayesformer.predict.one_pass.linear import second_moment, structure_of
from bayesformer.predict.one_pass.weight_covariance import with_one

CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}


def _register() -> None:
    for function in CONVOLUTIONS:

        def convolution(
            input: Any, weight: Any, bias: Any = None, *args: Any, function: Any = function, **kw: Any
        ) -> Any:
            return _convolved(function, input, weight, bias, *args, **kw)

        rule(function)(convolution)


def _convolved(function: Any, x: Any, w: Any, b: Any, *args: Any, **kwargs: Any) -> Uncertain:
    context = first_uncertain(x, w, b).context
    m = function(mean_of(x), mean_of(w), mean_of(b), *args, **kwargs)
    return Uncertain(m, lambda: _spread(function, x, w, b, m, *args, **kwargs), context)


def _spread(function: Any, x: Any, w: Any, b: Any, m: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    own = b.s if isinstance(b, Uncertain) else None
    found = None
    if isinstance(w, Uncertain) and w.structure is not None and _is_kept(function, w, *args, **kwargs):
        found = _correlated(function, x, w, *args, **kwargs)
        if isinstance(x, Uncertain):
            found = found + function(x.s, w.m * w.m, None, *args, **kwargs)
        if structure_of(w).with_bias:
            own = None
    elif isinstance(w, Uncertain):
        found = function(mean_of(x).square(), w.s, None, *args, **kwargs)
        if isinstance(x, Uncertain):
            found = found + function(x.s, second_moment(w), None, *args, **kwargs)
    elif isinstance(x, Uncertain):
        found = function(x.s, w * w, None, *args, **kwargs)
    if own is None:
        assert found is not None
        return found
    own = own.view(-1, *[1] * (m.dim() - 2 if m.dim() > CONVOLUTIONS[function] + 1 else m.dim() - 1))
    return own.expand(m.shape) if found is None else found + own


OPTIONS = ("stride", "padding", "dilation", "groups")


def _is_kept(function: Any, w: Uncertain, *args: Any, **kwargs: Any) -> bool:
    """Whether correlations between the weights are used; where they cannot be, they are dropped if settings say so."""
    options = dict(zip(OPTIONS, args, strict=False)) | kwargs
    if CONVOLUTIONS[function] <= 2 and options.get("groups", 1) == 1 and not isinstance(options.get("padding", 0), str):
        return True
    if w.settings.correlations == "drop":
        return False
    raise ValueError(
        "correlated weights of a convolution are supported in conv1d and conv2d without groups and with padding in "
        "numbers; use predictive='streamlined', which takes any layer, or correlations='drop', or a diagonal posterior "
        "for this layer."
    )


def _correlated(function: Any, x: Any, w: Uncertain, *args: Any, **kwargs: Any) -> Tensor:
    """Noise of correlated weights: every patch is one input of a linear layer."""
    axes = CONVOLUTIONS[function]
    options = dict(zip(OPTIONS, args, strict=False)) | kwargs
    m = mean_of(x)
    patches = _patches(m, w.shape[2:], options)
    spread = _patches(x.s, w.shape[2:], options) if isinstance(x, Uncertain) else None
    structure = structure_of(w)
    if structure.with_bias:
        patches, spread = with_one(patches, spread)
    noise = structure.variance(patches, spread).mT  # (B, out, places)
    return noise.reshape(*noise.shape[:-1], *function(m, w.m, None, *args, **kwargs).shape[-axes:])


def _patches(x: Tensor, kernel: tuple[int, ...], options: Mapping[str, Any]) -> Tensor:
    """(B, places, in): what a kernel of one or two axes meets at every place; a series is an image of height 1."""
    resting = {"stride": 1, "padding": 0, "dilation": 1}
    size = {name: options.get(name, rest) for name, rest in resting.items()}
    if len(kernel) == 1:
        x, kernel = x.unsqueeze(-2), (1, *kernel)
        size = {name: (resting[name], *_numbers(value)) for name, value in size.items()}
    return F.unfold(x, kernel, **size).mT


def _numbers(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


_register()


@rule(F.embedding, torch.embedding)
def embedding(input: Tensor, weight: Uncertain, *args: Any, **kwargs: Any) -> Uncertain:
    """The variances of the rows looked up."""
    if isinstance(input, Uncertain):
        raise TypeError("token numbers must not be uncertain.")
    del args, kwargs  # padding, norms and sparse gradients matter in training only
    return weight.like(F.embedding(input, weight.m), F.embedding(input, weight.s))
