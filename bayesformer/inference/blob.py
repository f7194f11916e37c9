"""BLoB: Bayesian low-rank adaptation by backpropagation, its two optimisers as one transform."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.core.types import Batch, LogJoint, Params, Transform
from bayesformer.core.vectors import THETA, blank, value_and_grad
from bayesformer.inference.optimise import Adam, AdamState, clip_gradient
from bayesformer.inference.schedules import Schedule, at


class BlobState(NamedTuple):
    """State of BLoB: what the next step needs."""

    params: Params  # θ: means M and roots G of the random weights, and all others
    adam: AdamState
    log_joint: Tensor  # (), mean log-likelihood of the batch minus π KL
    step: Tensor  # ()


def build(
    log_joint: LogJoint,
    means: Tensor,
    roots: Tensor,
    *,
    rule: Adam,
    kl_rate: float | Schedule,
    prior_sd: float = 0.2,
    cycle: int = 1,
    rising: bool = True,
    clip: float = math.inf,
) -> Transform:
    """Adam on the likelihood for all weights but G, then plain gradient steps on the KL.

        M, B ← Adam(∇ log p)                    q(A) = N(M, Ω²),  Ω = G²,  prior N(0, σ_p²)
        M ← M - η_KL π_i ∂KL/∂M                 KL = Σ log(σ_p/Ω) + (Ω² + M²)/(2σ_p²) - ½
        G ← G + η_KL (∂ log p/∂G - π_i ∂KL/∂G)

    Wang et al. (2024), algorithm 1, with the update of G as their code makes it: one plain step on both gradients, for
    with Adam on G variances explode or collapse. π_i = 2^i / Σ_j 2^j within a cycle of steps (`rising`), else 1/cycle:
    the KL counts once per cycle.

    Args:
        log_joint: the mean log-likelihood alone, of a network that draws A.
        means: (Q,), places of M in θ.
        roots: (Q,), places of the G of the same weights.
        rule: Adam for everything but G.
        kl_rate: η_KL.
        prior_sd: σ_p.
        cycle: steps in which the KL counts once.
        rising: whether its weight doubles from step to step of a cycle.
        clip: largest norm of the likelihood's gradient.
    """
    if cycle < 1:
        raise ValueError(f"cycle must be at least 1; got {cycle}.")
    settings = {"rule": rule, "kl_rate": kl_rate, "prior_sd": prior_sd, "cycle": cycle, "rising": rising, "clip": clip}
    step = partial(update, log_joint=log_joint, means=means, roots=roots, **settings)  # type: ignore[arg-type]
    return Transform(partial(init, rule=rule), step)


def init(params: Params, *, rule: Adam) -> BlobState:
    """The state before the first step."""
    return BlobState(params, rule.init(params), blank(params), params[THETA].new_zeros(()))


def update(
    state: BlobState,
    batch: Batch,
    inplace: bool = False,
    *,
    log_joint: LogJoint,
    means: Tensor,
    roots: Tensor,
    rule: Adam,
    kl_rate: float | Schedule,
    prior_sd: float,
    cycle: int,
    rising: bool,
    clip: float,
) -> tuple[BlobState, Tensor]:
    """One step; the second value is the outputs of the batch."""
    value, outputs, grads = value_and_grad(log_joint)(state.params, batch)
    grads = clip_gradient(grads, clip, inplace)
    gradient = grads[THETA] if inplace else grads[THETA].clone()
    of_roots = gradient[roots].clone()  # ∂ log p / ∂G
    gradient[roots] = 0  # Adam leaves G where it is
    params, adam = rule.step(state.params, {THETA: gradient}, state.adam, inplace)
    theta = params[THETA] if inplace else params[THETA].clone()
    step = state.step + 1
    weight, rate = kl_weight(step, cycle, rising), at(kl_rate, step)
    m, g = theta[means], theta[roots]
    theta[means] = m - rate * weight * m / prior_sd**2
    theta[roots] = g + rate * (of_roots - weight * (2 * g**3 / prior_sd**2 - 2 / g))
    total = value - weight * kl_divergence_of(m, g, prior_sd)
    return BlobState({THETA: theta}, adam, total, step), outputs


def kl_weight(step: Tensor, cycle: int, rising: bool) -> Tensor:
    """(): the weight of the KL in this step, counted from 1; the weights of a cycle sum to 1.

    2^i / (2^(K+1) - 2) = 2^(i-K) / (2 - 2^(1-K)), which does not overflow for a long cycle.
    """
    if not rising:
        return torch.ones_like(step) / cycle
    number = (step - 1) % cycle + 1
    return torch.exp2(number - cycle) / (2 - 2.0 ** (1 - cycle))


def kl_divergence_of(mean: Tensor, root: Tensor, prior_sd: float) -> Tensor:
    """(): KL from N(0, prior_sd²) to N(M, G⁴), summed over weights."""
    variance = root**4
    log_sd = root.square().log()
    return (math.log(prior_sd) - log_sd + (variance + mean.square()) / (2 * prior_sd**2) - 0.5).sum()
