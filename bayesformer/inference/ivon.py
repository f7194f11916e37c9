"""IVON: variational inference with a diagonal Gaussian at the cost of Adam."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.core.types import Batch, LogJoint, Params, Transform
from bayesformer.core.vectors import THETA, blank, is_long, normal_like, pieces, value_and_grad
from bayesformer.inference.schedules import Schedule, constant
from bayesformer.inference.vi_diag import Estimate, average
from bayesformer.laws import GaussianLaw, gaussian


class IVONState(NamedTuple):
    """q(θ) = N(m, diag 1 / (λ (h + δ)))."""

    params: Params  # the mean m
    momentum: Params  # running mean of the gradient, uphill
    hessian: Params  # h, running estimate of the curvature of the mean loss
    averaged: Params  # mean of h over the steps after `average_after`; h itself before; empty without it
    step: Tensor  # ()
    log_joint: Tensor  # () or (L,), averaged over the draws of the last step


def build(
    log_joint: LogJoint,
    lr: float | Schedule,
    ess: float,
    *,
    weight_decay: float = 1e-4,
    h0: float | Tensor = 1.0,
    betas: tuple[float, float] = (0.9, 0.99999),
    draws: int = 1,
    pairs: bool = False,
    rescale_lr: bool = True,
    clip_radius: float = math.inf,
    average_after: int | None = None,
) -> Transform:
    """Improved variational online Newton, with ĝ = -∇ log_joint(θ) at θ = m + σ ε.

        σ = 1 / √(λ (h + δ)),     ĥ = ĝ (θ - m) / σ²
        g ← β₁ g + (1-β₁) ĝ
        h ← β₂ h + (1-β₂) ĥ + ½ (1-β₂)² (h - ĥ)² / (h + δ)
        m ← m - α (g / (1-β₁ᵗ) + δ m) / (h + δ)

    Shen et al. (2024), algorithm 1. `ess` is λ, the number of examples N for Bayes and more for a colder posterior:
    λ = 1 / temperature. `weight_decay` δ is the prior N(0, 1 / (λ δ)), so the log joint is the likelihood alone
    (or δ = 0 and the prior in the log joint). With `rescale_lr`, α = lr (h0 + δ), the paper's option. The step
    is clipped to `clip_radius` in each weight before α. No clipping of the gradient: ĥ would be biased. ĝ
    and ĥ are averaged over `draws`; with `pairs` each draw ε comes with -ε on the same batch, at two gradients, so that
    ĝ at the mean, with all of its noise, cancels in ĥ. `h0` may be a curvature per weight (P,), then without
    rescale_lr. `average_after` is a step: the law has the mean of h over the steps after it in the place of the last h.

    Known exactly: E ĥ is the curvature, averaged over q; whatever the gradient, h + δ at most halves in a step and
    stays positive. For the loss ½ c (θ-a)² the mean settles at c a / (c+δ) and h at c, up to O(1-β₂): h at
    c + ½ (1-β₂) E(h-ĥ)² / (c+δ), where E(h-ĥ)² = c² ((m-a)² / σ² + 2).
    """
    _check(lr, ess, weight_decay, h0, betas, draws, clip_radius)
    if rescale_lr and isinstance(h0, Tensor):
        raise ValueError("rescale_lr must be False with a curvature h0 per weight: lr is in units of one h0; got True.")
    schedule = lr if callable(lr) else constant(lr)
    step = partial(
        update,
        log_joint=log_joint,
        schedule=schedule,
        ess=ess,
        weight_decay=weight_decay,
        betas=betas,
        draws=draws,
        pairs=pairs,
        lr_scale=1.0 if isinstance(h0, Tensor) or not rescale_lr else h0 + weight_decay,
        clip_radius=clip_radius,
        average_after=average_after,
    )
    return Transform(partial(init, h0=h0, averages=average_after is not None), step)


def init(params: Params, *, h0: float | Tensor = 1.0, averages: bool = False) -> IVONState:
    """The curvature h0, one for all or one per weight. The mean is a copy: draws overwrite a flat model's vector."""
    mean = {k: p.clone() for k, p in params.items()}
    momentum = {k: torch.zeros_like(p) for k, p in params.items()}
    hessian = {k: torch.ones_like(p) * h0 for k, p in params.items()}
    averaged = {k: h.clone() for k, h in hessian.items()} if averages else {}
    one = next(iter(params.values()))
    step = one.new_zeros((), dtype=torch.promote_types(one.dtype, torch.float32))  # half precision cannot count
    return IVONState(mean, momentum, hessian, averaged, step, blank(params))


def update(
    state: IVONState,
    batch: Batch,
    inplace: bool = False,
    *,
    log_joint: LogJoint,
    schedule: Schedule,
    ess: float,
    weight_decay: float,
    betas: tuple[float, float],
    draws: int = 1,
    pairs: bool = False,
    lr_scale: float = 1.0,
    clip_radius: float = math.inf,
    average_after: int | None = None,
) -> tuple[IVONState, Tensor]:
    """One step; the second value is the outputs of the batch under the last draw."""
    value, outputs, gradient, curvature = estimate(state, batch, log_joint, ess, weight_decay, draws, pairs)
    b1, b2 = betas
    step = state.step.add_(1) if inplace else state.step + 1
    size = _Size(1 - b1, 1 - b2, 1 - b1**step, lr_scale * schedule(step), weight_decay, clip_radius)
    move = _move_inplace if inplace else _move
    moved = {
        k: move(mean, state.momentum[k], state.hessian[k], gradient[k], curvature[k], size)
        for k, mean in state.params.items()
    }
    mean, momentum, hessian = ({k: parts[i] for k, parts in moved.items()} for i in range(3))
    averaged = state.averaged
    if average_after is not None:
        share = (step - average_after).clamp(min=1).reciprocal()
        blend = Tensor.lerp_ if inplace else Tensor.lerp
        averaged = {k: blend(averaged[k], h, share.to(h.dtype)) for k, h in hessian.items()}
    return IVONState(mean, momentum, hessian, averaged, step, value), outputs


def sample(state: IVONState, ess: float, weight_decay: float) -> Params:
    """One draw of the weights (of each member): m + ε / √(λ (h + δ)). Give the λ and δ of `build`."""
    sd = standard_deviation(state, ess, weight_decay)
    return {k: torch.addcmul(m, sd[k], normal_like(m)) for k, m in state.params.items()}


def standard_deviation(state: IVONState, ess: float, weight_decay: float) -> Params:
    """σ = 1 / √(λ (h + δ)), in the shapes of the mean; with the averaged h where there is one."""
    return {k: ((h + weight_decay) * ess).rsqrt_() for k, h in (state.averaged or state.hessian).items()}


def estimate(
    state: IVONState,
    batch: Batch,
    log_joint: LogJoint,
    ess: float,
    weight_decay: float,
    draws: int = 1,
    pairs: bool = False,
) -> Estimate:
    """Log joint, outputs, the gradient uphill (-ĝ) and the curvature ĥ, averaged over draws.

    ĥ is the reparameterisation trick: E_q[ĝ (θ-m)] / σ² = E_q[∇² loss] by Stein's lemma, one product and no
    second derivative.
    """
    evaluate = value_and_grad(log_joint)
    law = {"ess": ess, "weight_decay": weight_decay}

    def at(eps: Params) -> Estimate:
        theta = {k: _draw(m, state.hessian[k], eps[k], **law) for k, m in state.params.items()}
        value, outputs, grad = evaluate(theta, batch)
        return value, outputs, grad, {k: _curvature(g, state.hessian[k], eps[k], **law) for k, g in grad.items()}

    return average(at, lambda: {k: normal_like(m) for k, m in state.params.items()}, draws, pairs)


def _draw(mean: Tensor, hessian: Tensor, eps: Tensor, ess: float, weight_decay: float) -> Tensor:
    """A draw of the weights, m + σ ε."""
    if not is_long(mean):
        return torch.addcmul(mean, ((hessian + weight_decay) * ess).rsqrt_(), eps)
    theta = torch.empty_like(mean)
    for m, h, e, t in pieces(mean, hessian, eps, theta):
        t.copy_(torch.addcmul(m, ((h + weight_decay) * ess).rsqrt_(), e))
    return theta


def _curvature(grad: Tensor, hessian: Tensor, eps: Tensor, ess: float, weight_decay: float) -> Tensor:
    """-g ε / σ; a long ε is overwritten by it."""
    if not is_long(grad):
        return -grad * eps * ((hessian + weight_decay) * ess).sqrt_()
    for g, h, e in pieces(grad, hessian, eps):
        e.mul_(g).mul_(((h + weight_decay) * ess).sqrt_()).neg_()
    return eps


class _Size(NamedTuple):
    """Everything that sets how far a step goes."""

    momentum: float  # 1 - β₁
    hessian: float  # 1 - β₂
    correct: Tensor  # 1 - β₁ᵗ
    lr: Tensor  # α
    weight_decay: float
    clip_radius: float


def _move(
    mean: Tensor,
    momentum: Tensor,
    hessian: Tensor,
    gradient: Tensor,
    curvature: Tensor,
    size: _Size,
) -> tuple[Tensor, Tensor, Tensor]:
    """The equations, for one tensor of weights."""
    momentum = momentum + size.momentum * (gradient - momentum)
    gap = size.hessian * (curvature - hessian)
    hessian = hessian + gap + 0.5 * gap.square() / (hessian + size.weight_decay)
    newton = (momentum / size.correct - size.weight_decay * mean) / (hessian + size.weight_decay)
    return mean + size.lr * newton.clamp(-size.clip_radius, size.clip_radius), momentum, hessian


def _move_inplace(
    mean: Tensor,
    momentum: Tensor,
    hessian: Tensor,
    gradient: Tensor,
    curvature: Tensor,
    size: _Size,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in few passes over pieces; `curvature` is scratch."""
    for m, v, h, g, c in pieces(mean, momentum, hessian, gradient, curvature):
        _move_piece(m, v, h, g, c, size)
    return mean, momentum, hessian


def _move_piece(
    mean: Tensor, momentum: Tensor, hessian: Tensor, gradient: Tensor, curvature: Tensor, size: _Size
) -> None:
    momentum.lerp_(gradient, size.momentum)
    gap = curvature.sub_(hessian).mul_(size.hessian)
    damped = hessian + size.weight_decay
    hessian.add_(gap).addcdiv_(gap.square_(), damped, value=0.5)
    newton = (momentum / size.correct).sub_(mean, alpha=size.weight_decay)
    newton.div_(torch.add(hessian, size.weight_decay, out=damped))
    if size.clip_radius < math.inf:
        newton.clamp_(-size.clip_radius, size.clip_radius)
    mean.add_(newton.mul_(size.lr))


def _check(
    lr: float | Schedule,
    ess: float,
    weight_decay: float,
    h0: float | Tensor,
    betas: tuple[float, float],
    draws: int,
    clip_radius: float,
) -> None:
    if not callable(lr) and not lr > 0:
        raise ValueError(f"lr must be positive; got {lr}.")
    if not 0 < ess < math.inf:
        raise ValueError(f"ess must be positive and finite (the number of examples is Bayes); got {ess}.")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be at least 0; got {weight_decay}.")
    if isinstance(h0, Tensor):
        if not bool((h0 + weight_decay > 0).all()) or bool((h0 < 0).any()):
            raise ValueError(f"h0 must be at least 0, and positive without weight_decay; got {h0.min().item()}.")
    elif not h0 > 0:
        raise ValueError(f"h0 must be positive; got {h0}.")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must lie in [0, 1); got {betas}.")
    if draws < 1:
        raise ValueError(f"draws must be at least 1; got {draws}.")
    if not clip_radius > 0:
        raise ValueError(f"clip_radius must be positive; got {clip_radius}.")


def law(state: IVONState, ess: float, weight_decay: float) -> GaussianLaw:
    """q as a law over the one vector of weights. Give the λ and δ of `build`."""
    return gaussian(state.params[THETA], standard_deviation(state, ess, weight_decay)[THETA])
