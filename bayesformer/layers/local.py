"""Noise on the outputs of affine layers in place of noise on their weights: lower variance per gradient.

Local reparameterisation draws B = A W itself, which is possible where sums stay in the family, Kingma et al.
(2015), section 2.2:

    Gaussian    B_ij ~ N(Σ_k a_ik m_kj, Σ_k a_ik² s_kj²)
    Cauchy      B_ij ~ Cauchy(Σ_k a_ik m_kj, Σ_k |a_ik| s_kj)

Every example and every position gets noise of its own. That is the law of one output exactly, and what the gradient
of a sum over examples needs. It is not the law of outputs that share a weight (tokens of a sentence, pixels of an
image): they are drawn as if they did not, so it is for training and not for prediction. An embedding is a linear
layer of one-hot inputs: every place of a text draws its row anew.

Flipout, Wen et al. (2018), eq. 4, works for every family symmetric about its location, all of ours:

    B_n = A_n M + ((A_n ∘ s_n) ΔW) ∘ r_n,    s_n, r_n random signs per example

One deviation ΔW is shared, the signs decorrelate the examples; within an example the weights stay shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesformer.core import draws
from bayesformer.core.compat import convolution
from bayesformer.core.standard_noise import cauchy_like
from bayesformer.layers.families import CauchyWeights, GaussianWeights, WeightFamily

Affine: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x, weight, bias) -> outputs of a layer that is linear in weight and bias."""


class Noise(NamedTuple):
    """Location of an affine layer's weight and bias, and their scales, or for Flipout their deviations.

    A bias without noise has None there.
    """

    weight: Tensor
    bias: Tensor | None
    weight_noise: Tensor
    bias_noise: Tensor | None


Forward: TypeAlias = Callable[[Affine, Noise, Tensor], Tensor]
"""(layer, its noise, x) -> outputs under random weights."""

DrawingForward: TypeAlias = Callable[[Tensor], Tensor]
"""A module's forward of one input, with everything else about it filled in."""


def rows(module: nn.Embedding, law: WeightFamily, ids: Tensor) -> Tensor:
    """Rows of an embedding (..., dim), drawn anew at every place where they occur."""
    loc, scale = (F.embedding(ids, table, module.padding_idx) for table in (law.loc, law.scale))
    return type(law)(loc, scale).rsample().to(module.weight.dtype)


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
        return convolution(module)
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
    """Outputs x W + b (..., out) for a weight (in, out)."""
    return F.linear(x, weight.mT, bias)


def gaussian(apply: Affine, given: Noise, x: Tensor) -> Tensor:
    """Outputs under Gaussian weights; the noise is given as scales.

    An input of zeros has variance 0, where the root has an infinite slope; the smallest normal number in the
    place of 0 keeps every gradient finite and costs nothing as part of the bias.
    """
    tiny = torch.finfo(x.dtype).tiny
    mean = apply(x, given.weight, given.bias)
    outputs = len(given.weight) if apply is not transposed else given.weight.shape[1]
    floor = x.new_full((outputs,), tiny) if given.bias_noise is None else given.bias_noise.square() + tiny
    variance = apply(x * x, given.weight_noise.square(), floor)
    if given.weight.dim() > 2:  # some convolution algorithms round below 0
        variance = variance.clamp_min(tiny)
    sd = variance.sqrt()
    return torch.addcmul(mean, sd, draws.normal_like(sd))


def cauchy(apply: Affine, given: Noise, x: Tensor) -> Tensor:
    """Outputs under Cauchy weights; the noise is given as scales."""
    scale = apply(x.abs(), given.weight_noise, given.bias_noise)
    return torch.addcmul(apply(x, given.weight, given.bias), scale, cauchy_like(scale))


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


LOCAL: dict[type[WeightFamily], Forward] = {GaussianWeights: gaussian, CauchyWeights: cauchy}


@contextmanager
def replaced(forwards: Sequence[tuple[nn.Module, DrawingForward]]) -> Iterator[None]:
    """Let some modules run another forward for a while; their hooks and parameters stay."""
    try:
        for module, forward in forwards:
            module.forward = forward
        yield
    finally:
        for module, _ in forwards:
            vars(module).pop("forward", None)
