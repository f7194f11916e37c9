"""Stochastic gradient Langevin dynamics, and the small steps that the other samplers share with it."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.core.types import Batch, LogJoint, Params, Transform
from bayesformer.core.vectors import blank, normal_like, pieces, value_and_grad
from bayesformer.inference.schedules import Schedule, at


class SGLDState(NamedTuple):
    """State of SGLD: what the next step needs."""

    params: Params  # the current draw of θ
    step: Tensor  # ()
    log_joint: Tensor  # () or (L,), where the gradient was taken


def build(log_joint: LogJoint, lr: float | Schedule, temperature: float | Schedule, beta: float = 0.0) -> Transform:
    """Langevin dynamics with minibatch gradients of U, the log joint over N.

        θ ← θ + η ∇U(θ) + √(T η (2 - T η β)) z,    z ~ N(0, I)

    Welling & Teh (2011), eq. 4, with their ε_t/2 written as η/N and the temperature T free: the target is
    exp(U/T), the posterior at T = 1/N. β is what is known of the gradients' own noise: gradients of variance V
    are allowed for by β = V/T². No Metropolis step.

    Known exactly, for U = -λ θ²/2 and gradients with additive noise of variance V (β = 0):

        var θ = (T + η V/2) / (λ (1 - η λ/2)),    stable if η λ < 2,

    the same without V if β = V/T². At T = 0 it is gradient ascent.
    """
    check_settings(lr, temperature, beta)
    return Transform(init, partial(update, log_joint=log_joint, lr=lr, temperature=temperature, beta=beta))


def init(params: Params) -> SGLDState:
    """The state before the first step, at `params`."""
    return SGLDState(params, step_zero(params), blank(params))


def update(
    state: SGLDState,
    batch: Batch,
    inplace: bool = False,
    *,
    log_joint: LogJoint,
    lr: float | Schedule,
    temperature: float | Schedule,
    beta: float,
) -> tuple[SGLDState, Tensor]:
    """One step; the second value is the outputs of the batch."""
    value, outputs, grads = value_and_grad(log_joint)(state.params, batch)
    step = next_step(state.step, inplace)
    rate = at(lr, step)
    sd = noise_sd(rate, at(temperature, step), 1.0, beta)
    params = {k: add_noise(add(p, grads[k], rate, inplace), sd, inplace) for k, p in state.params.items()}
    return SGLDState(params, step, value), outputs


def check_settings(
    lr: float | Schedule,
    temperature: float | Schedule,
    beta: float = 0.0,
    friction: float = 1.0,
    sigma: float = 1.0,
) -> None:
    """Raise ValueError unless lr, friction and sigma are positive, temperature and beta at least 0, and all are finite.

    beta is at most 2 friction / (temperature lr). Settings that are schedules are not checked.
    """
    for name, value in {"lr": lr, "friction": friction, "sigma": sigma}.items():
        if not callable(value) and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite; got {value}.")
    for name, value in {"temperature": temperature, "beta": beta}.items():
        if not callable(value) and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite; got {value}.")
    if callable(lr) or callable(temperature):
        return
    if temperature * lr * beta > 2 * friction:
        most = 2 * friction / (temperature * lr)
        raise ValueError(f"beta must be at most 2 friction / (temperature lr) = {most:g}; got {beta}.")


def step_zero(params: Params) -> Tensor:
    """The step before the first, in a precision that can count steps."""
    one = next(iter(params.values()))
    return one.new_zeros((), dtype=torch.promote_types(one.dtype, torch.float32))


def next_step(step: Tensor, inplace: bool) -> Tensor:
    """The number of the next step, t + 1."""
    return step.add_(1) if inplace else step + 1


def noise_sd(lr: float | Tensor, temperature: float | Tensor, friction: float, beta: float) -> float | Tensor:
    """√(T η (2α - T η β)); the number 0 at temperature 0, so that nothing is drawn."""
    if not isinstance(temperature, Tensor) and temperature == 0:
        return 0.0
    variance = temperature * lr * (2 * friction - temperature * lr * beta)
    if isinstance(variance, Tensor):
        return variance.clamp_min(0).sqrt()  # gradients noisier than the bath: nothing is left to add
    return math.sqrt(variance)


def add(tensor: Tensor, other: Tensor, scale: float | Tensor, inplace: bool) -> Tensor:
    """tensor + scale other. In place and not, it is the same arithmetic to the last bit."""
    if isinstance(scale, Tensor):
        return tensor.addcmul_(other, scale) if inplace else tensor.addcmul(other, scale)
    return tensor.add_(other, alpha=scale) if inplace else tensor.add(other, alpha=scale)


def multiply(tensor: Tensor, scale: float | Tensor, inplace: bool) -> Tensor:
    """The product of a tensor with a scale."""
    return tensor.mul_(scale) if inplace else tensor.mul(scale)


def add_noise(tensor: Tensor, sd: float | Tensor, inplace: bool) -> Tensor:
    """tensor + sd z; the number 0 draws nothing."""
    if not isinstance(sd, Tensor) and sd == 0:
        return tensor
    if not inplace:
        return add(tensor, normal_like(tensor), sd, inplace)
    for (piece,) in pieces(tensor):
        add(piece, normal_like(piece), sd, inplace)
    return tensor
