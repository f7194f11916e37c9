"""BAOAB: underdamped Langevin dynamics by splitting, exact in variance on a Gaussian at any step size."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bayesformer.core.errors import unknown_name
from bayesformer.core.types import Batch, LogJoint, Params, Transform
from bayesformer.core.vectors import blank, value_and_grad
from bayesformer.inference.schedules import Schedule, at
from bayesformer.inference.sgld import add, add_noise, check_settings, multiply, next_step, step_zero

Order: TypeAlias = Literal["baoa", "baoab"]
ORDERS = ("baoa", "baoab")


class BAOABState(NamedTuple):
    """State of BAOA and BAOAB: what the next step needs."""

    params: Params  # the current draw of θ
    momenta: Params
    gradient: Params  # of the last step, for the half kick that opens the next; empty for BAOA
    step: Tensor  # ()
    log_joint: Tensor  # () or (L,), where the gradient was taken: BAOA the old θ, BAOAB the new


def build(
    log_joint: LogJoint,
    lr: float | Schedule,
    temperature: float | Schedule,
    friction: float = 1.0,
    sigma: float = 1.0,
    order: Order = "baoa",
) -> Transform:
    """Underdamped Langevin dynamics as kicks B, drifts A and friction O, each solved exactly; one gradient per step.

        B(h):  m ← m + h ∇U(θ)
        A(h):  θ ← θ + h σ⁻² m
        O(h):  m ← c m + σ √(T (1 - c²)) z,    c = exp(-h α σ⁻²),    z ~ N(0, I)

        "baoab":  B(η/2) A(η/2) O(η) A(η/2) B(η/2)
        "baoa":   B(η) A(η/2) O(η) A(η/2)

    Leimkuhler & Matthews (2013), with U the log joint over N, α the friction, σ² the mass and the temperature T
    free (the posterior at T = 1/N). The gradient that ends a BAOAB step opens the next, so two half kicks make
    one: both orders have the same path of θ, and the momentum of BAOAB is that of BAOA plus η/2 ∇U(θ). Momenta
    start at 0, and so does BAOAB's kept gradient: its first half kick is missing.

    Known exactly, for U = -λ θ²/2 and gradients with additive noise of variance V, κ = η² λ σ⁻² < 4:

        var θ = T/λ + η² V (1 + c) / (λ σ² (1 - c) (4 - κ)),

    so T/λ at every step size if V = 0; then var m is T σ² for BAOA and T σ² (1 - κ/4) for BAOAB. Gradient
    noise heats by 1 + η V/(2αT) to first order. At T = 0 it is gradient ascent with momentum.
    """
    check_settings(lr, temperature, 0.0, friction, sigma)
    if order not in ORDERS:
        raise unknown_name("order", order, ORDERS)
    settings = partial(update, lr=lr, temperature=temperature, friction=friction, sigma=sigma, order=order)
    return Transform(partial(init, order=order), partial(settings, log_joint=log_joint))


def init(params: Params, *, order: Order) -> BAOABState:
    """The state at `params` with momenta 0."""
    momenta = {k: torch.zeros_like(p) for k, p in params.items()}
    gradient = {k: torch.zeros_like(p) for k, p in params.items()} if order == "baoab" else {}
    return BAOABState(params, momenta, gradient, step_zero(params), blank(params))


def update(
    state: BAOABState,
    batch: Batch,
    inplace: bool = False,
    *,
    log_joint: LogJoint,
    lr: float | Schedule,
    temperature: float | Schedule,
    friction: float,
    sigma: float,
    order: Order,
) -> tuple[BAOABState, Tensor]:
    """One step; the second value is the outputs of the batch."""
    step = next_step(state.step, inplace)
    rate = at(lr, step)
    aoa = partial(
        drift_relax_drift,
        half=rate / 2 * sigma**-2,
        friction=friction * sigma**-2 * rate,
        variance=at(temperature, step) * sigma**2,
        inplace=inplace,
    )
    if order == "baoa":
        value, outputs, grads = value_and_grad(log_joint)(state.params, batch)
        params, momenta = aoa(state.params, _kick(state.momenta, grads, rate, inplace))
        return BAOABState(params, momenta, {}, step, value), outputs
    params, momenta = aoa(state.params, _kick(state.momenta, state.gradient, rate / 2, inplace))
    value, outputs, grads = value_and_grad(log_joint)(params, batch)
    momenta = _kick(momenta, grads, rate / 2, inplace)
    # A copy: a log joint may reuse its gradient's memory.
    gradient = {k: state.gradient[k].copy_(g) if inplace else g.clone() for k, g in grads.items()}
    return BAOABState(params, momenta, gradient, step, value), outputs


def drift_relax_drift(
    params: Params,
    momenta: Params,
    *,
    half: float | Tensor,
    friction: float | Tensor,
    variance: float | Tensor,
    inplace: bool,
) -> tuple[Params, Params]:
    """A O A: θ + h m, then m relaxed towards N(0, variance) by exp(-friction), then θ + h m."""
    keep, sd = _relaxation(friction, variance)
    params = {k: add(p, momenta[k], half, inplace) for k, p in params.items()}
    momenta = {k: add_noise(multiply(m, keep, inplace), sd, inplace) for k, m in momenta.items()}
    return {k: add(p, momenta[k], half, inplace) for k, p in params.items()}, momenta


def _relaxation(friction: float | Tensor, variance: float | Tensor) -> tuple[float | Tensor, float | Tensor]:
    """c = e^{-γ} and √(variance (1 - c²)); the number 0 at temperature 0, so that nothing is drawn."""
    keep = torch.exp(-friction) if isinstance(friction, Tensor) else math.exp(-friction)
    if not isinstance(variance, Tensor) and variance == 0:
        return keep, 0.0
    lost = -torch.expm1(-2 * friction) if isinstance(friction, Tensor) else -math.expm1(-2 * friction)  # 1 - c²
    return keep, (variance * lost) ** 0.5


def _kick(momenta: Params, grads: Params, rate: float | Tensor, inplace: bool) -> Params:
    return {k: add(m, grads[k], rate, inplace) for k, m in momenta.items()}
