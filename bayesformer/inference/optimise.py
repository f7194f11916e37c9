"""Adam and AdamW: inference at temperature zero, and the update rule that variational methods share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from bayesformer.core.types import Batch, LogJoint, Params, Transform
from bayesformer.core.vectors import blank, dot, per_member, value_and_grad
from bayesformer.inference.schedules import Schedule, constant


class AdamState(NamedTuple):
    """Running means of the gradient and of its square."""

    momentum: Params  # of the gradient downhill
    square: Params
    step: Tensor  # (), float, on the device of the parameters


@dataclass(frozen=True)
class Adam:
    """An ascent rule: `init(params) -> state`, `step(params, grads, state, inplace) -> (params, state)`.

        m ← β₁ m + (1-β₁) g,   v ← β₂ v + (1-β₂) g²
        θ ← (1 - η λ) θ + η m̂ / (√v̂ + ε),   m̂ = m / (1-β₁ᵗ),   v̂ = v / (1-β₂ᵗ)

    Kingma & Ba (2015), algorithm 1; Loshchilov & Hutter (2019), algorithm 2 for λ > 0. The pure step is the
    formula; in place it is torch's fused kernel, and both agree.
    """

    lr: float | Schedule = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    @property
    def schedule(self) -> Schedule:
        """The rate as a function of the step."""
        return self.lr if callable(self.lr) else constant(self.lr)

    def init(self, params: Params) -> AdamState:
        """The state before the first step: both moments are 0."""
        momentum = {k: torch.zeros_like(p) for k, p in params.items()}
        square = {k: torch.zeros_like(p) for k, p in params.items()}
        return AdamState(momentum, square, next(iter(params.values())).new_zeros(()))

    def step(self, params: Params, grads: Params, state: AdamState, inplace: bool = False) -> tuple[Params, AdamState]:
        """The parameters and the state after one step uphill."""
        if inplace:
            self._fused(params, grads, state)
            return params, state
        step = state.step + 1
        lr = self.schedule(step)
        b1, b2 = self.betas
        # of the gradient downhill, as the fused kernel keeps it when it maximises: the two may take turns
        momentum = {k: b1 * m - (1 - b1) * grads[k] for k, m in state.momentum.items()}
        square = {k: b2 * v + (1 - b2) * grads[k].square() for k, v in state.square.items()}
        correct1, correct2 = 1 - b1**step, 1 - b2**step
        moved = {
            k: p * (1 - lr * self.weight_decay)
            - lr * (momentum[k] / correct1) / ((square[k] / correct2).sqrt() + self.eps)
            for k, p in params.items()
        }
        return moved, AdamState(momentum, square, step)

    def _fused(self, params: Params, grads: Params, state: AdamState) -> None:
        names = list(params)
        (adamw if self.weight_decay else adam)(
            [params[k] for k in names],
            [grads[k] for k in names],
            [state.momentum[k] for k in names],
            [state.square[k] for k in names],
            [],
            [state.step] if len(names) == 1 else [state.step.clone() for _ in names],
            fused=True,
            foreach=False,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.schedule(state.step + 1),
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=True,
        )
        if len(names) > 1:  # the kernel advances every counter it is given; ours is one
            state.step.add_(1)


class OptimiseState(NamedTuple):
    """State of the ascent: what the next step needs."""

    params: Params  # the current θ
    adam: AdamState
    log_joint: Tensor  # () or (L,), where the last gradient was taken


def build(log_joint: LogJoint, rule: Adam | None = None, clip: float = math.inf) -> Transform:
    """Adam on the log joint, its gradient clipped to norm `clip`:  g ← g min(1, c / |g|).

    With parameters of shape (L, P) the L rows are members of their own: clipping is per row and nothing
    crosses rows.
    """
    rule = rule or Adam()
    return Transform(partial(init, rule=rule), partial(update, log_joint=log_joint, rule=rule, clip=clip))


def init(params: Params, *, rule: Adam) -> OptimiseState:
    """The state before the first step: both moments are 0."""
    return OptimiseState(params, rule.init(params), blank(params))


def update(
    state: OptimiseState,
    batch: Batch,
    inplace: bool = False,
    *,
    log_joint: LogJoint,
    rule: Adam,
    clip: float,
) -> tuple[OptimiseState, Tensor]:
    """One step; the second value is the outputs of the batch."""
    value, outputs, grads = value_and_grad(log_joint)(state.params, batch)
    params, adam_state = rule.step(state.params, clip_gradient(grads, clip, inplace), state.adam, inplace)
    return OptimiseState(params, adam_state, value), outputs


def clip_gradient(grads: Params, clip: float, inplace: bool = False) -> Params:
    """Scale the whole gradient to norm at most `clip`, member by member; a gradient is the caller's to overwrite."""
    if math.isinf(clip):
        return grads
    norm = dot(grads, grads).sqrt()
    scale = per_member((clip / (norm + 1e-6)).clamp_max(1.0), grads)  # 1e-6 as in torch.nn.utils.clip_grad_norm_
    return {k: g.mul_(scale) if inplace else g * scale for k, g in grads.items()}
