"""Noise on the outputs of affine layers in place of noise on their weights: lower variance per gradient.

Local reparameterisation draws B = A W itself, which is possible where sums stay in the family, Kingma et al.
(2015), section 2.2:

    Gaussian    B_ij ~ N(Σ_k a_ik m_kj, Σ_k a_ik² s_kj²)
    Cauchy      B_ij ~ Cauchy(Σ_k a_ik m_kj, Σ_k |a_ik| s_kj)

Every example and every position gets noise of its own. That is the law of one output exactly; positions that
share a weight (tokens of a sentence, pixels of an image) are drawn as if they did not. An embedding is a linear
layer of one-hot inputs: every place of a text draws its row anew, and rows that do not occur are not drawn.

Flipout, Wen et al. (2018), eq. 4, works for every family symmetric about its location, all of ours:

    B_n = A_n M + ((A_n ∘ s_n) ΔW) ∘ r_n,    s_n, r_n random signs per example

One deviation ΔW is shared, the signs decorrelate the examples; within an example the weights stay shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesformer.core import draws
from bayesformer.core.vectors import normal_like, transformed
from bayesformer.layers import fused_linear as fused
from bayesformer.layers.families import Cauchy, Family, Gaussian
from bayesformer.priors import distributions as laws

Affine: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Noise(NamedTuple):
    """Location of an affine layer's weight and bias, and their scales, or for Flipout their deviations.

    A bias without noise has None there.
    """

    weight: Tensor
    bias: Tensor | None
    weight_noise: Tensor
    bias_noise: Tensor | None


Forward: TypeAlias = Callable[[Affine, Noise, Tensor], Tensor]


def affine(module: nn.Module) -> Affine | None:
    """`(x, weight, bias) -> output` of a linear or convolution layer or a Hugging Face Conv1D; None otherwise.

    A subclass with a forward of its own is none of these.
    """
    forward = type(module).forward
    if "forward" in vars(module):  # somebody else has replaced it
        return None
    if forward is nn.Linear.forward:
        return F.linear
    if forward in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward):
        return module._conv_forward  # type: ignore[return-value]
    return transposed if is_conv1d(module) else None


def is_table(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether this is an embedding that does nothing but look up rows."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
    return plain and "forward" not in vars(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is the Conv1D of Hugging Face, a linear layer with its weight (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and not isinstance(module, nn.Conv1d)


def transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W + b for a weight (in, out)."""
    return F.linear(x, weight.mT, bias)


def gaussian(apply: Affine, given: Noise, x: Tensor) -> Tensor:
    """Outputs under Gaussian weights; the noise is given as scales.

    An input of zeros has variance 0, where the root has an infinite slope; the smallest normal number in the
    place of 0 keeps every gradient finite and costs nothing as part of the bias.
    """
    tiny = torch.finfo(x.dtype).tiny
    outputs = len(given.weight) if given.bias is None else len(given.bias)
    floor = x.new_full((outputs,), tiny) if given.bias_noise is None else given.bias_noise.square() + tiny
    single = transformed() or torch.is_autocast_enabled(x.device.type)
    if apply in (F.linear, transposed) and not single:
        weight, scale = (t if apply is F.linear else t.mT for t in (given.weight, given.weight_noise))
        return fused.gaussian_linear(x, weight, given.bias, scale, floor)
    variance = apply(x * x, given.weight_noise.square(), floor)
    if given.weight.dim() > 2:  # some convolution algorithms round below 0
        variance = variance.clamp_min(tiny)
    sd = variance.sqrt()
    return torch.addcmul(apply(x, given.weight, given.bias), sd, normal_like(sd))


def cauchy(apply: Affine, given: Noise, x: Tensor) -> Tensor:
    """Outputs under Cauchy weights; the noise is given as scales."""
    scale = apply(x.abs(), given.weight_noise, given.bias_noise)
    return torch.addcmul(apply(x, given.weight, given.bias), scale, laws.Cauchy().sample(scale))


def flipout(apply: Affine, given: Noise, x: Tensor) -> Tensor:
    """Outputs with the signs of the weights' deviations flipped per example; the noise is given as deviations."""
    positions = given.weight.dim() - 2  # 0 for a linear layer, whose features come last
    deviation = apply(signs(x, positions) * x, given.weight_noise, given.bias_noise)
    return torch.addcmul(apply(x, given.weight, given.bias), signs(deviation, positions), deviation)


def signs(x: Tensor, positions: int) -> Tensor:
    """±1 per example and feature, constant over everything else; features stand before `positions` axes."""
    features = x.dim() - 1 - positions
    shape = [size if axis in (0, features) else 1 for axis, size in enumerate(x.shape)]
    return draws.signs(shape, x)


LOCAL: dict[type[Family], Forward] = {Gaussian: gaussian, Cauchy: cauchy}


@contextmanager
def replaced(forwards: Sequence[tuple[nn.Module, Callable[[Tensor], Tensor]]]) -> Iterator[None]:
    """Let some modules run another forward for a while; their hooks and parameters stay."""
    try:
        for module, forward in forwards:
            module.forward = forward
        yield
    finally:
        for module, _ in forwards:
            vars(module).pop("forward", None)


@contextmanager
def substituted(slots: Sequence[tuple[dict[str, Any], str, Tensor]]) -> Iterator[None]:
    """Put tensors in the place of parameters for a while, as torch.func.functional_call does."""
    before = [table[name] for table, name, _ in slots]
    try:
        for table, name, value in slots:
            table[name] = value
        yield
    finally:
        for (table, name, _), value in zip(slots, before, strict=True):
            table[name] = value
