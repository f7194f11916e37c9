"""Stochastic gradient Nosé-Hoover thermostat: SGHMC whose friction adapts to the noise of the gradients."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.core.types import Batch, LogJoint, Params, Transform
from bayesformer.core.vectors import blank, count, dot, per_member, value_and_grad
from bayesformer.inference.schedules import Schedule, at
from bayesformer.inference.sghmc import kick
from bayesformer.inference.sgld import add, check_settings, next_step, noise_sd, step_zero


class SGNHTState(NamedTuple):
    """State of SGNHT: what the next step needs."""

    params: Params  # the current draw of θ
    momenta: Params
    xi: Tensor  # () or (L,), the friction that holds a member's temperature
    step: Tensor  # ()
    log_joint: Tensor  # () or (L,), where the gradient was taken


def build(
    log_joint: LogJoint,
    lr: float | Schedule,
    temperature: float | Schedule,
    friction: float = 1.0,
    sigma: float = 1.0,
    beta: float = 0.0,
) -> Transform:
    """SGHMC with a thermostat; one gradient per step.

        m ← m + η ∇U(θ) - η σ⁻² ξ m + √(T η (2α - T η β)) z,    z ~ N(0, I)
        θ ← θ + η σ⁻² m
        ξ ← ξ + η (σ⁻² mean(m²) - T),    the mean over all weights of a member

    Ding et al. (2014), algorithm 1, with U the log joint over N, α the friction that ξ starts from, σ² the mass
    and the temperature T free (the posterior at T = 1/N); `beta` as in SGHMC. Momenta start at 0. In continuous
    time the target is exp{[U - m²/(2σ²) - d (ξ - α)²/2] / T}: gradient noise of unknown size V, equal in all
    weights, only moves ξ.

    Start near a mode: what a descent sets free heats the momenta, ξ grows against it, and only η T per step takes
    it back; at T = 1/N a chain may so stand still for long.

    Known exactly: ξ stands still on average only if mean(m²) is T σ² on average, whatever V and η. For
    U = -λ θ²/2, gradients with additive noise of variance V and many weights, κ = η² λ σ⁻²,
    q = η σ⁻² (2α + η V/T):

        ξ → u σ²/η,    u = s - √(s² - q),    s = 1 - κ/4,    var θ = T/λ · (1 - u/2).

    Not an optimiser: at T = 0 the friction only grows.
    """
    check_settings(lr, temperature, beta, friction, sigma)
    if temperature == 0:
        raise ValueError("temperature must be positive: at 0 the thermostat's friction only grows; got 0.")
    settings = partial(update, lr=lr, temperature=temperature, friction=friction, sigma=sigma, beta=beta)
    return Transform(partial(init, friction=friction), partial(settings, log_joint=log_joint))


def init(params: Params, *, friction: float) -> SGNHTState:
    """At rest, with the given friction."""
    momenta = {k: torch.zeros_like(p) for k, p in params.items()}
    return SGNHTState(params, momenta, torch.full_like(blank(params), friction), step_zero(params), blank(params))


def update(
    state: SGNHTState,
    batch: Batch,
    inplace: bool = False,
    *,
    log_joint: LogJoint,
    lr: float | Schedule,
    temperature: float | Schedule,
    friction: float,
    sigma: float,
    beta: float,
) -> tuple[SGNHTState, Tensor]:
    """One step; the second value is the outputs of the batch."""
    value, outputs, grads = value_and_grad(log_joint)(state.params, batch)
    step = next_step(state.step, inplace)
    rate, heat = at(lr, step), at(temperature, step)
    drift = rate * sigma**-2
    keep = per_member(1 - drift * state.xi, state.params)
    sd = noise_sd(rate, heat, friction, beta)
    momenta = {k: kick(m, grads[k], keep, rate, sd, inplace) for k, m in state.momenta.items()}
    params = {k: add(p, momenta[k], drift, inplace) for k, p in state.params.items()}
    excess = dot(momenta, momenta) / (count(momenta) * sigma**2) - heat  # of kinetic temperature
    return SGNHTState(params, momenta, add(state.xi, excess, rate, inplace), step, value), outputs
