"""Any sampler in coordinates φ around where it starts, θ = θ₀ + W φ, as a transform of θ, with a thermometer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesformer.core.types import Batch, LogJoint, Params, Transform
from bayesformer.core.vectors import THETA, blank, value_and_grad
from bayesformer.inference.affine import AffineLogJoint, Root


class WhitenedState(NamedTuple):
    """State of a sampler in coordinates: where it stands in θ, and the sampler's own state in φ."""

    params: Params  # {"theta": (P,) or (L, P)}
    inner: Any
    virial: Tensor  # () or (L,), Σ over measured steps of -mean(φ ∇_φ log joint)
    measured: Tensor  # (), how many steps that are
    log_joint: Tensor  # () or (L,), where the gradient was taken


class MeasuredLogJoint(AffineLogJoint):
    """A log joint over φ that remembers -Σ ω φ · gradient of its last evaluation, () or (L,), for shares ω (Q,)."""

    virial: Tensor
    shares: Tensor | None = None  # ω, of sum 1; None: all alike

    def value_and_grad(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor, Params]:
        """Value, outputs and the gradient with respect to φ."""
        phi = params[THETA]
        value, outputs, grads = value_and_grad(self.log_joint)({THETA: self.to_theta(phi)}, batch)
        slope = self.root.times_root(grads[THETA])
        product = phi * slope
        self.virial = -(product.mean(-1) if self.shares is None else product @ self.shares)
        return value, outputs, {THETA: slope}


def build(
    log_joint: LogJoint,
    root: Root,
    make: Callable[[LogJoint], Transform],
    burn_in: int = 0,
    shares: Tensor | None = None,
) -> Transform:
    """The sampler that `make` builds of a log joint over φ, run in θ = θ₀ + W φ from its start θ₀, φ = 0.

        U_φ(φ) = U(θ₀ + W φ),    ∇U_φ = Wᵀ ∇U

    Members in rows have one W and each its own θ₀. The target is that of the sampler: densities over θ differ from
    those over φ by a constant. After `burn_in` steps the mean of -φ_q ∂U/∂φ_q is taken, whose expectation under
    exp(U/T) is T for every q (see `configuration`): over all q alike, or with `shares` (Q,) that say how much each
    counts. Batches heat only directions that the data determine, which a mean over all may hide.
    """
    if burn_in < 0:
        raise ValueError(f"burn_in must be at least 0; got {burn_in}.")
    return Transform(*_Whitened(log_joint, root, make, burn_in, shares).functions())


def configuration(state: WhitenedState) -> Tensor:
    """() or (L,): an estimate of the temperature T at which a chain samples exp(U / T), with U the log joint over N.

    The posterior has T = 1/N. The estimate is -φᵀ∇U(φ) / P, with P the number of weights (or what shares of them make
    of it), averaged over the steps
    after the burn-in (0 before there are any), by the chain's own minibatch gradients. In batches without replacement
    these depend on the chain's moves, which makes the estimate slightly too high.
    """
    return state.virial / state.measured.clamp_min(1)


class _Whitened:
    """The two functions of the transform; the centre is where `init` is called."""

    def __init__(
        self,
        log_joint: LogJoint,
        root: Root,
        make: Callable[[LogJoint], Transform],
        burn_in: int,
        shares: Tensor | None,
    ) -> None:
        self.log_joint, self.root, self.make, self.burn_in = log_joint, root, make, burn_in
        self.shares = None if shares is None else shares / shares.sum()

    def functions(self) -> tuple[Any, Any]:
        return self.init, self.update

    def init(self, params: Params) -> WhitenedState:
        theta = params[THETA]
        self.joint = MeasuredLogJoint(self.log_joint, theta.clone(), self.root)
        self.joint.shares = self.shares
        self.sampler = self.make(self.joint)
        inner = self.sampler.init({THETA: torch.zeros_like(theta)})
        return WhitenedState(
            params, inner, torch.zeros_like(blank(params)), torch.zeros_like(inner.step), blank(params)
        )

    def update(self, state: WhitenedState, batch: Batch, inplace: bool = False) -> tuple[WhitenedState, Any]:
        inner, outputs = self.sampler.update(state.inner, batch, inplace=inplace)
        theta = self.joint.to_theta(inner.params[THETA])
        if inplace:
            theta = state.params[THETA].copy_(theta)
        late = (inner.step > self.burn_in).to(state.measured)
        return (
            WhitenedState(
                {THETA: theta},
                inner,
                state.virial + late * self.joint.virial,
                state.measured + late,
                inner.log_joint,
            ),
            outputs,
        )
