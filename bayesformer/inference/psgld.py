"""Preconditioned SGLD: Langevin dynamics with RMSprop's step size per weight."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.core.types import Batch, LogJoint, Params, Transform
from bayesformer.core.vectors import blank, normal_like, value_and_grad
from bayesformer.inference.schedules import Schedule, at
from bayesformer.inference.sgld import check_settings, next_step, noise_sd, step_zero


class PSGLDState(NamedTuple):
    """State of pSGLD: what the next step needs."""

    params: Params  # the current draw of θ
    square: Params  # running mean of the squared gradient
    step: Tensor  # ()
    log_joint: Tensor  # () or (L,), where the gradient was taken


def build(
    log_joint: LogJoint,
    lr: float | Schedule,
    temperature: float | Schedule,
    decay: float = 0.99,
    eps: float = 1e-5,
    freeze: int | None = None,
) -> Transform:
    """Langevin dynamics preconditioned by the size of past gradients.

        v ← a v + (1-a) ∇U(θ)²,    G = 1 / (ε + √v)
        θ ← θ + η G ∇U(θ) + √(2 η T G) z,    z ~ N(0, I)

    Li et al. (2016), algorithm 1, with their ε_t/2 written as η/N, their λ as ε, and the temperature T free. As in
    their experiments the term Γ = ∂G/∂θ is left out, so while v adapts the chain has no exact stationary law.
    `freeze` keeps v as it is after that many steps; from then on, for U = -λ θ²/2 and gradients with additive
    noise of variance V, weight by weight,

        var θ = (T + η G V/2) / (λ (1 - η G λ/2)),

    and the path is that of SGLD in the coordinates θ/√G. At T = 0 it is RMSprop. Mind ε: a weight whose gradients
    are all 0 has G = 1/ε, a step and a noise to match.
    """
    check_settings(lr, temperature)
    if not 0 <= decay < 1:
        raise ValueError(f"decay must be in [0, 1); got {decay}.")
    if not eps > 0:
        raise ValueError(f"eps must be positive; got {eps}.")
    if freeze is not None and freeze < 1:
        raise ValueError(f"freeze must be at least 1 step, or None to adapt for ever; got {freeze}.")
    settings = partial(update, lr=lr, temperature=temperature, decay=decay, eps=eps, freeze=freeze)
    return Transform(init, partial(settings, log_joint=log_joint))


def init(params: Params) -> PSGLDState:
    """The state at `params`, before a gradient was seen."""
    return PSGLDState(params, {k: torch.zeros_like(p) for k, p in params.items()}, step_zero(params), blank(params))


def update(
    state: PSGLDState,
    batch: Batch,
    inplace: bool = False,
    *,
    log_joint: LogJoint,
    lr: float | Schedule,
    temperature: float | Schedule,
    decay: float,
    eps: float,
    freeze: int | None,
) -> tuple[PSGLDState, Tensor]:
    """One step; the second value is the outputs of the batch."""
    value, outputs, grads = value_and_grad(log_joint)(state.params, batch)
    step = next_step(state.step, inplace)
    weight = 1 - decay if freeze is None else (1 - decay) * (step <= freeze).to(step.dtype)  # of the newest gradient
    rate = at(lr, step)
    sd = noise_sd(rate, at(temperature, step), 1.0, 0.0)
    square = {k: _towards(v, grads[k].square(), weight, inplace) for k, v in state.square.items()}
    params = {k: _move(p, grads[k], square[k], rate, sd, eps, inplace) for k, p in state.params.items()}
    return PSGLDState(params, square, step, value), outputs


def _towards(old: Tensor, new: Tensor, weight: float | Tensor, inplace: bool) -> Tensor:
    if isinstance(weight, Tensor):
        weight = weight.to(old.dtype)
    return old.lerp_(new, weight) if inplace else old.lerp(new, weight)


def _move(
    theta: Tensor, grad: Tensor, square: Tensor, rate: float | Tensor, sd: float | Tensor, eps: float, inplace: bool
) -> Tensor:
    scale = square.sqrt().add_(eps).reciprocal_()  # G
    change = scale * grad * rate
    if isinstance(sd, Tensor) or sd:
        change = change + scale.sqrt() * normal_like(theta) * sd
    return theta.add_(change) if inplace else theta + change
