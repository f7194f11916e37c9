"""Stochastic gradient Hamiltonian Monte Carlo: Langevin dynamics with momentum, SGD's arithmetic plus noise."""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bayesformer.core.errors import unknown_name
from bayesformer.core.types import Batch, LogJoint, Params, Transform
from bayesformer.core.vectors import blank, pieces, value_and_grad
from bayesformer.inference.schedules import Schedule, at
from bayesformer.inference.sgld import add, add_noise, check_settings, multiply, next_step, noise_sd, step_zero

Scheme: TypeAlias = Literal["semi-implicit", "explicit"]
SCHEMES = ("semi-implicit", "explicit")


class SGHMCState(NamedTuple):
    """State of SGHMC: what the next step needs."""

    params: Params  # the current draw of θ
    momenta: Params
    step: Tensor  # ()
    log_joint: Tensor  # () or (L,), where the gradient was taken


def build(
    log_joint: LogJoint,
    lr: float | Schedule,
    temperature: float | Schedule,
    friction: float = 1.0,
    sigma: float = 1.0,
    beta: float = 0.0,
    scheme: Scheme = "semi-implicit",
    scale: Params | None = None,
) -> Transform:
    """Underdamped Langevin dynamics by Euler steps; one gradient per step.

        m ← m + η ∇U(θ) - η σ⁻² α m + √(T η (2α - T η β)) z,    z ~ N(0, I)
        θ ← θ + η σ⁻² m

    Chen et al. (2014), algorithm 2, with U the log joint over N, α the friction, σ² the mass, the temperature T
    free (the posterior at T = 1/N), and β = V/T² for gradients of known noise variance V. Momenta start at 0.
    Their algorithm moves θ first: the same chain, looked at between the two lines.

    Known exactly, for U = -λ θ²/2, gradients with additive noise of variance V (β = 0), and c = 1 - η σ⁻² α,
    κ = η² λ σ⁻²:

        var θ = (T + η V/(2α)) / λ · (1 + c) / (1 + c - κ/2),    stable if κ < 2 (1 + c).

    At T = 0 it is SGD with momentum: torch's SGD(γ, momentum=μ, dampening=τ), its buffer started at 0, is
    η = 1 - τ, σ² = (1 - τ)/γ, α = (1 - μ)/γ.

    `scale` s, positive and in the shape of the parameters, is a diagonal metric: the chain of φ = θ/s, seen in θ,

        m ← m + η s ∘ ∇U(θ) - η σ⁻² α m + √(T η (2α - T η β)) z,    θ ← θ + η σ⁻² s ∘ m.

    The target is the same; step size and friction are in units of s. A gradient is overwritten by s ∘ ∇U.

    `scheme="explicit"` takes the old m in the second line, as `posteriors` 0.1.3 does. Its bias is of order η
    instead of η², and it is not SGD at T = 0. With a = η σ⁻², b = η λ, q = 2 η T α + η² V:

        var m = q / (1 - c² - a b c - a b (1 + c + a b)/2),    var θ = (a/b) var m (1 + c + a b)/2.
    """
    check_settings(lr, temperature, beta, friction, sigma)
    if scheme not in SCHEMES:
        raise unknown_name("scheme", scheme, SCHEMES)
    if scale is not None and not all(bool((part > 0).all()) for part in scale.values()):
        raise ValueError(f"scale must be positive; got {min(part.min().item() for part in scale.values())}.")
    settings = partial(update, lr=lr, temperature=temperature, friction=friction, sigma=sigma, beta=beta, scheme=scheme)
    return Transform(init, partial(settings, log_joint=log_joint, scale=scale))


def init(params: Params) -> SGHMCState:
    """The state at `params` with momenta 0."""
    return SGHMCState(params, {k: torch.zeros_like(p) for k, p in params.items()}, step_zero(params), blank(params))


def update(
    state: SGHMCState,
    batch: Batch,
    inplace: bool = False,
    *,
    log_joint: LogJoint,
    lr: float | Schedule,
    temperature: float | Schedule,
    friction: float,
    sigma: float,
    beta: float,
    scheme: Scheme,
    scale: Params | None = None,
) -> tuple[SGHMCState, Tensor]:
    """One step; the second value is the outputs of the batch."""
    value, outputs, grads = value_and_grad(log_joint)(state.params, batch)
    step = next_step(state.step, inplace)
    rate = at(lr, step)
    drift = rate * sigma**-2
    sd = noise_sd(rate, at(temperature, step), friction, beta)
    keep = 1 - drift * friction
    params, momenta = state.params, state.momenta
    if inplace and scheme == "semi-implicit":  # both lines on one piece while it is in the cache
        for k, theta in params.items():
            if scale is None:
                for p, m, g in pieces(theta, momenta[k], grads[k]):
                    add(p, kick(m, g, keep, rate, sd, inplace), drift, inplace)
            else:
                for p, m, g, s in pieces(theta, momenta[k], grads[k], scale[k].expand_as(theta)):
                    add(p, kick(m, g.mul_(s), keep, rate, sd, inplace).mul(s), drift, inplace)
        return SGHMCState(params, momenta, step, value), outputs
    if scale is not None:
        grads = {k: g * scale[k] for k, g in grads.items()}
    if scheme == "explicit":
        params = {k: add(p, _scaled(momenta, scale, k), drift, inplace) for k, p in params.items()}
    momenta = {k: kick(m, grads[k], keep, rate, sd, inplace) for k, m in momenta.items()}
    if scheme == "semi-implicit":
        params = {k: add(p, _scaled(momenta, scale, k), drift, inplace) for k, p in params.items()}
    return SGHMCState(params, momenta, step, value), outputs


def _scaled(momenta: Params, scale: Params | None, name: str) -> Tensor:
    return momenta[name] if scale is None else momenta[name] * scale[name]


def kick(
    momentum: Tensor, grad: Tensor, keep: float | Tensor, rate: float | Tensor, sd: float | Tensor, inplace: bool
) -> Tensor:
    """The momenta after a step, keep · m + η ∇U + sd z."""
    return add_noise(add(multiply(momentum, keep, inplace), grad, rate, inplace), sd, inplace)
