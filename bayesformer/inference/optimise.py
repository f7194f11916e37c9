"""Adam and AdamW: inference at temperature zero."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from bayesformer.functional import THETA, value_and_grad
from bayesformer.inference.schedules import Schedule, constant
from bayesformer.types import Batch, LogJoint, Params, Transform


class OptimiseState(NamedTuple):
    """What the next step needs."""

    params: Params  # the current θ
    momentum: Params  # running mean of the gradient
    square: Params  # running mean of its square
    step: Tensor  # (), float, on the device of θ
    log_joint: Tensor  # () or (L,), where the last gradient was taken


def build(
    log_joint: LogJoint,
    lr: float | Schedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip: float = math.inf,
) -> Transform:
    """Adam on the log joint (ascent), with decoupled weight decay (AdamW) and clipping by global norm.

        g ← g min(1, c / |g|),   m ← β₁ m + (1-β₁) g,   v ← β₂ v + (1-β₂) g²
        θ ← (1 - η λ) θ + η m̂ / (√v̂ + ε),   m̂ = m / (1-β₁ᵗ),   v̂ = v / (1-β₂ᵗ)

    Kingma & Ba (2015), algorithm 1; Loshchilov & Hutter (2019), algorithm 2 for λ > 0. With parameters of
    shape (L, P) the L rows are members of their own: clipping is per row and nothing crosses rows. The pure
    update is the formula above; in place it is torch's fused kernel, and both agree.
    """
    schedule = lr if callable(lr) else constant(lr)
    bound = partial(
        update,
        log_joint=log_joint,
        schedule=schedule,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        clip=clip,
    )
    return Transform(init, bound)


def init(params: Params) -> OptimiseState:
    """Zero moments."""
    one = next(iter(params.values()))
    members = one.shape[:-1] if list(params) == [THETA] else ()
    return OptimiseState(
        params=params,
        momentum={k: torch.zeros_like(p) for k, p in params.items()},
        square={k: torch.zeros_like(p) for k, p in params.items()},
        step=one.new_zeros(()),
        log_joint=one.new_full(members, math.nan),
    )


def update(
    state: OptimiseState,
    batch: Batch,
    inplace: bool = False,
    *,
    log_joint: LogJoint,
    schedule: Schedule,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip: float,
) -> tuple[OptimiseState, Tensor]:
    """One step; the second value is the outputs of the batch."""
    value, outputs, grads = value_and_grad(log_joint)(state.params, batch)
    grads = clip_gradient(grads, clip)
    if inplace:
        _fused(state, grads, schedule, betas, eps, weight_decay)
        return state._replace(log_joint=value), outputs
    step = state.step + 1
    lr = schedule(step)
    b1, b2 = betas
    momentum = {k: b1 * m + (1 - b1) * grads[k] for k, m in state.momentum.items()}
    square = {k: b2 * v + (1 - b2) * grads[k].square() for k, v in state.square.items()}
    correct1, correct2 = 1 - b1**step, 1 - b2**step
    params = {
        k: p * (1 - lr * weight_decay) + lr * (momentum[k] / correct1) / ((square[k] / correct2).sqrt() + eps)
        for k, p in state.params.items()
    }
    return OptimiseState(params, momentum, square, step, value), outputs


def clip_gradient(grads: Params, clip: float) -> Params:
    """Scale the whole gradient to norm at most `clip`, member by member."""
    if math.isinf(clip):
        return grads
    norm = gradient_norm(grads)
    scale = (clip / (norm + 1e-6)).clamp_max(1.0)  # 1e-6 as in torch.nn.utils.clip_grad_norm_
    return {k: g * scale.unsqueeze(-1) if scale.dim() else g * scale for k, g in grads.items()}


def gradient_norm(grads: Params) -> Tensor:
    """() for parameters of any shape; (L,) for one matrix (L, P) of members."""
    if list(grads) == [THETA] and grads[THETA].dim() == 2:
        return torch.linalg.vector_norm(grads[THETA], dim=-1)
    return torch.stack([torch.linalg.vector_norm(g) for g in grads.values()]).norm()


def _fused(
    state: OptimiseState,
    grads: Params,
    schedule: Schedule,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    names = list(state.params)
    (adamw if weight_decay else adam)(
        [state.params[k] for k in names],
        [grads[k] for k in names],
        [state.momentum[k] for k in names],
        [state.square[k] for k in names],
        [],
        [state.step] * len(names) if len(names) == 1 else [state.step.clone() for _ in names],
        fused=True,
        foreach=False,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=schedule(state.step + 1),
        weight_decay=weight_decay,
        eps=eps,
        maximize=True,
    )
    if len(names) > 1:  # the kernel advances every counter it is given; ours is one
        state.step.add_(1)
