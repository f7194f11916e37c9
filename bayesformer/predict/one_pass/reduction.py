"""Sums, means and pooling over axes: entries are taken as independent, except over the last axis with covariances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.predict.one_pass.attention_rules import mixed
from bayesformer.predict.one_pass.carrier import Uncertain, rule
from bayesformer.predict.one_pass.shape import moved


@rule(torch.sum, Tensor.sum)
def sum_(input: Uncertain, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Uncertain:
    """A sum over some axes, of entries taken as independent: variances add."""
    _check_dtype(dtype)
    return _reduced(input, dim, keepdim, mean=False)


@rule(torch.mean, Tensor.mean)
def mean_(input: Uncertain, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Uncertain:
    """The sum over n: variances add and are divided by n²."""
    _check_dtype(dtype)
    return _reduced(input, dim, keepdim, mean=True)


def _check_dtype(dtype: Any) -> None:
    if dtype is not None:
        raise ValueError(f"a sum of uncertain values must keep its dtype; got dtype={dtype}.")


def _reduced(x: Uncertain, dim: Any, keepdim: bool, mean: bool) -> Uncertain:
    axes = _axes(dim, x.dim())
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    if x.settings.tokens == "shared" and axes == [x.dim() - 2] and x.dim() == 3 and x.origin is not None:
        found = mixed(x.m.new_full((len(x), 1, x.shape[1]), 1 / count if mean else 1.0), x)
        return found if keepdim else moved(found, lambda values: values.squeeze(1))
    value = x.m.sum(axes, keepdim)
    spread = _summed(x, axes, keepdim)
    return x.like(value / count, spread / count**2) if mean else x.like(value, spread)


def _axes(dim: Any, dims: int) -> list[int]:
    if dim is None:
        return list(range(dims))
    return [d % dims for d in (dim if isinstance(dim, Sequence) else [dim])]


def _summed(x: Uncertain, axes: list[int], keepdim: bool) -> Tensor:
    if not x.full:
        return x.s.sum(axes, keepdim)
    last = x.dim() - 1
    if last not in axes:
        return x.v.expand(*x.shape, x.shape[-1]).sum(axes, keepdim)
    # 1ᵀ S 1 over the last axis, then the rest as variances; what was last is gone, so variances remain.
    within = x.v.sum((-2, -1)).expand(x.shape[:-1])
    rest = [axis for axis in axes if axis != last]
    found = within.sum(rest, keepdim) if rest else within
    return found.unsqueeze(-1) if keepdim else found


@rule(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
def avg_pool(input: Uncertain, kernel_size: Any, *args: Any, **kwargs: Any) -> Uncertain:
    """The sum of n variances over n²; padding counts as in the mean."""
    pool = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}[input.dim()]
    dims = input.dim() - 2
    sizes = [kernel_size] * dims if isinstance(kernel_size, int) else list(kernel_size) * (dims // len(kernel_size))
    count = 1
    for size in sizes:
        count *= size
    if kwargs.get("divisor_override") is not None or kwargs.get("count_include_pad") is False:
        raise ValueError("average pooling must divide by the size of its window to carry variance.")
    return input.like(pool(input.m, kernel_size, *args, **kwargs), pool(input.s, kernel_size, *args, **kwargs) / count)


@rule(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)
def adaptive_avg_pool(input: Uncertain, output_size: Any) -> Uncertain:
    """Pooling to one value, or by equal windows."""
    dims = 1 if input.dim() == 3 else 2
    pool = F.adaptive_avg_pool1d if dims == 1 else F.adaptive_avg_pool2d
    wanted = [output_size] * dims if isinstance(output_size, int) else list(output_size)
    windows = 1
    for size, out in zip(input.shape[-dims:], wanted, strict=True):
        if out is not None and size % out:
            raise ValueError(f"adaptive pooling must divide its input evenly; got {size} values for {out}.")
        windows *= 1 if out is None else size // out
    return input.like(pool(input.m, output_size), pool(input.s, output_size) / windows)


@rule(F.max_pool1d, F.max_pool2d, F.max_pool3d)
def max_pool(input: Uncertain, *args: Any, return_indices: bool = False, **kwargs: Any) -> Uncertain:
    """The variance of the value that is largest at the mean."""
    if return_indices:
        raise ValueError("max pooling of uncertain values must not return indices.")
    dims = input.dim() - 2
    pool = {1: F.max_pool1d_with_indices, 2: F.max_pool2d_with_indices, 3: F.max_pool3d_with_indices}[dims]
    value, index = pool(input.m, *args, **kwargs)
    spread = input.s.flatten(-dims).gather(-1, index.flatten(-dims)).view(value.shape)
    return input.like(value, spread)
