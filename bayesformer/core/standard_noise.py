"""Standard noise of location-scale families: a draw of the family is location + scale · noise."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bayesformer.core.draws import gamma_of, normal_like, uniform_like


def cauchy_like(like: Tensor) -> Tensor:
    """Standard Cauchy numbers tan π(u - ½) in the shape of `like`, u uniform on (0, 1)."""
    return torch.tan(math.pi * (uniform_like(like) - 0.5))


def laplace_like(like: Tensor) -> Tensor:
    """Numbers of density exp(-|z|) / 2 in the shape of `like`: -sign(u - ½) log(1 - 2|u - ½|), u uniform on (0, 1)."""
    u = uniform_like(like) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs())


def logistic_like(like: Tensor) -> Tensor:
    """Standard logistic numbers log(u / (1 - u)) in the shape of `like`, u uniform on (0, 1)."""
    return uniform_like(like).logit_()


def student_like(like: Tensor, df: Tensor) -> Tensor:
    """Student-t numbers ε / √λ with ε ~ N(0, 1) and λ ~ Gamma(ν/2, rate ν/2), differentiable in ν = `df`.

    The gradient in ν goes through λ by implicit reparameterisation, dλ/dν = -(∂F/∂ν) / f(λ), Figurnov et al. (2018).
    """
    half = 0.5 * df
    precision = gamma_of(half) / half
    return normal_like(like) * precision.rsqrt()


STANDARD_NOISE: dict[str, Callable[..., Tensor]] = {
    "gaussian": normal_like,
    "cauchy": cauchy_like,
    "laplace": laplace_like,
    "logistic": logistic_like,
    "student_t": student_like,
}
"""Noise by the name of its family; a Student-t takes the degrees of freedom as well."""
