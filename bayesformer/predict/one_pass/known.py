"""Functions of an uncertain tensor whose result is known: they ask for its form, or decide by its mean."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesformer.predict.one_pass.carrier import mean_of, rule

KNOWN = [
    *[Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor],
    *[torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like],
    *[torch.is_floating_point, Tensor.is_floating_point, torch.is_tensor, torch.numel, Tensor.element_size],
    *[Tensor.is_contiguous, Tensor.stride, Tensor.get_device, Tensor.nelement, Tensor.is_complex, torch.is_complex],
    *[torch.isfinite, torch.isnan, torch.isinf, Tensor.isfinite, Tensor.isnan, Tensor.isinf, torch.sign, Tensor.sign],
    *[Tensor.__gt__, Tensor.__lt__, Tensor.__ge__, Tensor.__le__, Tensor.__eq__, Tensor.__ne__],
    *[torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin],
]


def _of_mean(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*map(mean_of, args), **{key: mean_of(value) for key, value in kwargs.items()})


for _function in KNOWN:
    rule(_function)(partial(_of_mean, _function))
