"""SWA and SWAG: a Gaussian from the path of any other algorithm."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesformer.core.types import Batch, Params, Transform
from bayesformer.core.vectors import THETA, blank, is_matrix, normal_like
from bayesformer.laws import GaussianLaw, gaussian


class SWAGState(NamedTuple):
    """Moments of the snapshots so far."""

    params: Params  # their mean (SWA); the current weights until there is a snapshot
    variance: Params  # their variance, in the shapes of the mean
    deviations: Params  # (K, ...) or (L, K, P): the last K snapshots minus the mean of their time, as a ring
    snapshots: Tensor  # (), how many; counters stay on the CPU, where a look at them is free
    step: Tensor  # (), steps of the inner algorithm
    inner: Any  # its state
    log_joint: Tensor  # () or (L,), its log joint


def build(transform: Transform, start: int = 0, every: int = 1, rank: int = 20) -> Transform:
    """Run `transform` and, after its first `start` steps, take a snapshot of its weights every `every` steps.

        θ̄ₙ = θ̄ₙ₋₁ + (θₙ - θ̄ₙ₋₁) / n
        vₙ = vₙ₋₁ + ((θₙ - θ̄ₙ₋₁)(θₙ - θ̄ₙ) - vₙ₋₁) / n,     that is, the mean of θ² minus θ̄²
        D  = the last K of θₙ - θ̄ₙ
        q  = N(θ̄, c (diag v + D Dᵀ / (min(n, K) - 1))),      c = ½

    Maddox et al. (2019), algorithm 1; θ̄ alone is SWA (Izmailov et al. 2018), `rank` K = 0 the diagonal form. Two
    deviations: v is updated centred, since in float32 the difference of two large means has no digits left; and
    D is divided by what it holds, also before it is full.

    Known exactly: all moments of any path. One snapshot, or equal ones, have no spread.
    """
    if start < 0:
        raise ValueError(f"start must be at least 0; got {start}.")
    if every < 1:
        raise ValueError(f"every must be at least 1; got {every}.")
    if rank < 0 or rank == 1:
        raise ValueError(f"rank must be 0 (diagonal) or at least 2, as one deviation has no variance; got {rank}.")
    step = partial(update, transform=transform, start=start, every=every)
    return Transform(partial(init, transform=transform, rank=rank), step)


def init(params: Params, *, transform: Transform, rank: int = 20) -> SWAGState:
    """No snapshots. The inner algorithm gets a copy: scoring the mean overwrites a flat model's own vector."""
    axis = _axis(params)
    inner = transform.init({k: p.clone() for k, p in params.items()})
    return SWAGState(
        params={k: p.clone() for k, p in params.items()},
        variance={k: torch.zeros_like(p) for k, p in params.items()},
        deviations={k: p.new_zeros(*p.shape[:axis], rank, *p.shape[axis:]) for k, p in params.items()},
        snapshots=torch.tensor(0, device="cpu"),
        step=torch.tensor(0, device="cpu"),
        inner=inner,
        log_joint=inner.log_joint,
    )


def update(
    state: SWAGState, batch: Batch, inplace: bool = False, *, transform: Transform, start: int = 0, every: int = 1
) -> tuple[SWAGState, Any]:
    """One inner step, and a snapshot when it is time; the second value is the inner one."""
    inner, outputs = transform.update(state.inner, batch, inplace=inplace)
    step = state.step + 1
    due = (step > start) & ((step - start) % every == 0)
    moved = state._replace(step=step, inner=inner, log_joint=inner.log_joint)
    return (_collect_inplace(moved, due) if inplace else _collect(moved, due)), outputs


def sample(state: SWAGState, scale: float = 0.5) -> Params:
    """One draw of the weights (of each member):  θ = θ̄ + sd z + factorᵀ w,  z, w ~ N(0, I)."""
    sd, factor = spread(state, scale)
    first = next(iter(state.params.values()))
    rank = next(iter(factor.values())).shape[_axis(state.params)]
    w = normal_like(first.new_empty(*blank(state.params).shape, rank))  # (K,) or (L, K), the same for all names
    mix = partial(torch.tensordot, dims=1) if w.dim() == 1 else partial(torch.einsum, "lk,lkp->lp")
    return {k: p + sd[k] * normal_like(p) + mix(w, factor[k]) for k, p in state.params.items()}


def spread(state: SWAGState, scale: float = 0.5) -> tuple[Params, Params]:
    """Diagonal and low-rank part of q's covariance: diag sd² + factorᵀ factor.

        sd = √(c v),    factor = √(c / (min(n, K) - 1)) Dᵀ

    `scale` is c: ½ because each part holds the whole variance; 0 is SWA. Rank 0 has the first part only, so there
    the paper's SWAG-Diagonal is scale = 1.
    """
    if not scale >= 0:
        raise ValueError(f"scale must be at least 0; got {scale}.")
    sd = {k: (scale * v).sqrt() for k, v in state.variance.items()}
    rank = next(iter(state.deviations.values())).shape[_axis(state.params)]
    held = (state.snapshots.clamp(max=rank) - 1).clamp(min=1)  # a lone deviation is 0, whatever divides it
    return sd, {k: d * (scale / held).sqrt().to(d) for k, d in state.deviations.items()}


def _collect(state: SWAGState, due: Tensor) -> SWAGState:
    """The moments after a step without a branch, for vmap."""
    device = next(iter(state.params.values())).device
    seen, due_there = state.snapshots.to(device), due.to(device)
    before = {k: torch.where(seen == 0, state.inner.params[k], p) for k, p in state.params.items()}
    mean, variance, deviation = _moments(before, state)
    axis = _axis(state.params)

    def stored(name: str, ring: Tensor) -> Tensor:
        rank = ring.shape[axis]
        place = torch.arange(rank, device=device) == seen % max(rank, 1)
        place = place.view(rank, *[1] * (ring.dim() - axis - 1))
        return torch.where(due_there & place, deviation[name].unsqueeze(axis), ring)

    return state._replace(
        params={k: torch.where(due_there, mean[k], p) for k, p in before.items()},
        variance={k: torch.where(due_there, variance[k], v) for k, v in state.variance.items()},
        deviations={k: stored(k, ring) for k, ring in state.deviations.items()},
        snapshots=state.snapshots + due,
    )


def _collect_inplace(state: SWAGState, due: Tensor) -> SWAGState:
    """The same, touching nothing but the weights until the first snapshot, and nothing between snapshots."""
    seen = int(state.snapshots)
    if seen == 0:
        for name, weights in state.params.items():
            weights.copy_(state.inner.params[name])
    if not due:
        return state
    mean, variance, deviation = _moments(state.params, state)
    for name, ring in state.deviations.items():
        state.params[name].copy_(mean[name])
        state.variance[name].copy_(variance[name])
        rank = ring.shape[_axis(state.params)]
        if rank:
            ring.select(_axis(state.params), seen % rank).copy_(deviation[name])
    return state._replace(snapshots=state.snapshots + 1)


def _moments(before: Params, state: SWAGState) -> tuple[Params, Params, Params]:
    """Mean, variance and deviation with one more snapshot. The first is its own mean before: no spread."""
    theta: Params = state.inner.params
    n = (state.snapshots + 1).to(next(iter(before.values())))
    mean = {k: p + (theta[k] - p) / n for k, p in before.items()}
    spread = {k: (theta[k] - p) * (theta[k] - mean[k]) for k, p in before.items()}
    variance = {k: v + (spread[k] - v) / n for k, v in state.variance.items()}
    return mean, variance, {k: theta[k] - m for k, m in mean.items()}


def _axis(params: Params) -> int:
    """Where the axis of deviations stands: behind that of the members."""
    return 1 if is_matrix(params) else 0


def law(state: SWAGState, scale: float = 0.5) -> GaussianLaw:
    """q as a law over the one vector of weights. Of rank 0 the diagonal holds all of the variance: 2 · scale."""
    rank = state.deviations[THETA].shape[0]
    sd, factor = spread(state, scale if rank else 2 * scale)
    return gaussian(state.params[THETA], sd[THETA], factor[THETA] if rank else None)
