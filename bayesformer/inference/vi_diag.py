"""Variational inference with a diagonal Gaussian, and the ascent rules that variational methods accept."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from bayesformer.core.types import Batch, LogJoint, Params, Transform
from bayesformer.core.vectors import THETA, blank, is_long, normal_like, pieces, value_and_grad
from bayesformer.inference.optimise import Adam, clip_gradient
from bayesformer.laws import GaussianLaw, gaussian

LOG_SD = math.log(1e-2)
"""Where log σ starts: about a tenth of a weight at the usual 1/√fan_in of widths 64 to 256, so the first gradients
still see the network they were given. Larger starts drown a trained network; smaller ones only take longer."""


Estimate: TypeAlias = tuple[Tensor, Tensor, Params, Params]
"""Value, outputs, and two sets of numbers in the shapes of the weights or of their spread."""


class VIDiagState(NamedTuple):
    """State of diagonal variational inference, q(θ) = N(μ, diag σ²)."""

    params: Params  # the mean μ
    log_sd: Params  # log σ, in the shapes of μ
    rule: Any  # state of the ascent rule over {"mean.*", "log_sd.*"}
    log_joint: Tensor  # () or (L,), averaged over the draws of the last step


class Rule(Protocol):
    """What moves parameters uphill; `optimise.Adam` is one."""

    def init(self, params: Params) -> Any:
        """The rule's own state before its first step."""
        ...

    def step(self, params: Params, grads: Params, state: Any, inplace: bool = False) -> tuple[Params, Any]:
        """The parameters and the rule's state after one step uphill."""
        ...


def build(
    log_joint: LogJoint,
    temperature: float,
    rule: Any = None,
    *,
    log_sd: float = LOG_SD,
    draws: int = 1,
    stl: bool = True,
    clip: float = math.inf,
    pairs: bool = False,
) -> Transform:
    """Ascent on the evidence lower bound, with its gradient written out at θ = μ + σ ε, ε ~ N(0, I).

        ELBO = E_q[log_joint(θ)] + T H[q],          g = ∇ log_joint(θ)
        ∂μ = g,              ∂log σ = g σ ε + T             stl=False
        ∂μ = g + T ε / σ,    ∂log σ = (g + T ε / σ) σ ε     stl=True

    Kingma & Welling (2014), section 2.4; "sticking the landing" drops the score of q, whose mean is zero
    (Roeder et al. 2017). The gradient is averaged over `draws`, and that of μ and that of log σ are each
    clipped to norm `clip`. `rule` is `optimise.Adam()` unless given: our form (`init`, `step`) or the
    torchopt form (`init`, `update`). Weight decay has no place in it: it would pull σ towards 1; a prior belongs
    in the log joint. With `pairs` every draw ε comes with -ε on the same batch, at two gradients: whatever is odd in
    ε cancels, so that the gradient of the batch at μ, which is its noise, is not in that of log σ, and the curvature
    along ε is not in that of μ.

    Known exactly: for log_joint = -½ (θ-a)ᵀΛ(θ-a) the optimum is μ = a, σ_i² = T / Λ_ii; with diagonal Λ the stl
    gradient there is 0 for every ε, and with pairs ∂μ is the gradient at μ, without noise, for any Λ. With
    log_sd = -inf (no noise) the path of μ is that of `optimise`; T = 0 is optimisation of the expected log joint.
    """
    check_settings(temperature, draws, clip)
    if math.isnan(log_sd) or log_sd == math.inf:
        raise ValueError(f"log_sd must be a finite number, or -inf for no noise; got {log_sd}.")
    if stl and temperature > 0 and log_sd == -math.inf:
        raise ValueError("log_sd must be finite with stl=True: ε / σ has no value at σ = 0; got -inf.")
    ascent = as_rule(rule)
    settings: dict[str, Any] = {
        "temperature": temperature,
        "rule": ascent,
        "draws": draws,
        "stl": stl,
        "clip": clip,
        "pairs": pairs,
    }
    return Transform(partial(init, rule=ascent, log_sd=log_sd), partial(update, log_joint=log_joint, **settings))


def init(params: Params, *, rule: Rule, log_sd: float = LOG_SD) -> VIDiagState:
    """The mean is a copy: a flat model's own vector is overwritten by every draw."""
    mean = {k: p.clone() for k, p in params.items()}
    spread = {k: torch.full_like(p, log_sd) for k, p in params.items()}
    return VIDiagState(mean, spread, rule.init(join(mean, spread)), blank(params))


def update(
    state: VIDiagState,
    batch: Batch,
    inplace: bool = False,
    *,
    log_joint: LogJoint,
    temperature: float,
    rule: Rule,
    draws: int = 1,
    stl: bool = True,
    clip: float = math.inf,
    pairs: bool = False,
) -> tuple[VIDiagState, Tensor]:
    """One step; the second value is the outputs of the batch under the last draw."""
    value, outputs, mean_grad, log_sd_grad = elbo_gradient(state, batch, log_joint, temperature, draws, stl, pairs)
    clipped = join(clip_gradient(mean_grad, clip, inplace), clip_gradient(log_sd_grad, clip, inplace))
    moved, rule_state = rule.step(join(state.params, state.log_sd), clipped, state.rule, inplace)
    mean, log_sd = split(moved)
    return VIDiagState(mean, log_sd, rule_state, value), outputs


def sample(state: VIDiagState) -> Params:
    """One draw of the weights (of each member): μ + σ ε."""
    return {k: torch.addcmul(p, state.log_sd[k].exp(), normal_like(p)) for k, p in state.params.items()}


def elbo_gradient(
    state: VIDiagState,
    batch: Batch,
    log_joint: LogJoint,
    temperature: float,
    draws: int = 1,
    stl: bool = True,
    pairs: bool = False,
) -> Estimate:
    """Log joint, outputs and the gradients of μ and of log σ, without a graph through the sampling."""
    evaluate = value_and_grad(log_joint)
    combine = partial(_gradients, temperature=temperature, stl=stl and temperature > 0)

    def at(eps: Params) -> Estimate:
        value, outputs, grad = evaluate({k: _draw(p, state.log_sd[k], eps[k]) for k, p in state.params.items()}, batch)
        parts = {k: combine(g, state.log_sd[k], eps[k]) for k, g in grad.items()}
        return value, outputs, {k: both[0] for k, both in parts.items()}, {k: both[1] for k, both in parts.items()}

    return average(at, lambda: {k: normal_like(p) for k, p in state.params.items()}, draws, pairs)


def _draw(mean: Tensor, log_sd: Tensor, eps: Tensor) -> Tensor:
    """A draw of the weights, μ + σ ε."""
    if not is_long(mean):
        return torch.addcmul(mean, log_sd.exp(), eps)
    theta = torch.empty_like(mean)
    for m, s, e, t in pieces(mean, log_sd, eps, theta):
        t.copy_(torch.addcmul(m, s.exp(), e))
    return theta


def _gradients(grad: Tensor, log_sd: Tensor, eps: Tensor, temperature: float, stl: bool) -> tuple[Tensor, Tensor]:
    """Those of μ and of log σ from that of θ; long vectors are overwritten."""
    if not is_long(grad):
        sd = log_sd.exp()
        if stl:
            grad = torch.addcdiv(grad, eps, sd, value=temperature)
        spread = grad * (sd * eps)
        return grad, spread if stl else spread + temperature
    for g, s, e in pieces(grad, log_sd, eps):
        sd = s.exp()
        if stl:
            g.addcdiv_(e, sd, value=temperature)
        e.mul_(sd).mul_(g)
        if not stl:
            e.add_(temperature)
    return grad, eps


def average(at: Callable[[Params], Estimate], noise: Callable[[], Params], draws: int, pairs: bool = False) -> Estimate:
    """Means of the value and of both parts over draws, and the last outputs. One draw is passed on as it is.

    Args:
        at: the estimate at one ε, which may be overwritten by it.
        noise: makes an ε.
        draws: how many.
        pairs: whether each is followed by -ε.
    """
    count = 2 * draws if pairs else draws
    if count == 1:
        return at(noise())
    values, first, second = [], {}, {}  # type: list[Tensor], Params, Params
    for eps in _signed(noise, draws, pairs):
        value, outputs, *parts = at(eps)
        values.append(value)
        # sums of their own: the log joint may reuse the memory of its gradient
        for total, part in zip((first, second), parts, strict=True):
            total |= {k: torch.add(total[k], v, alpha=1 / count) if k in total else v / count for k, v in part.items()}
    return torch.stack(values).mean(0), outputs, first, second


def _signed(noise: Callable[[], Params], draws: int, pairs: bool) -> Iterator[Params]:
    """The ε of a step, each followed by -ε in pairs."""
    for _ in range(draws):
        eps = noise()
        mirrored = {k: -e for k, e in eps.items()} if pairs else None
        yield eps
        if mirrored is not None:
            yield mirrored


def join(mean: Params, log_sd: Params) -> Params:
    """Both halves of q in one dict, so that one call of the rule moves them."""
    return {f"mean.{k}": v for k, v in mean.items()} | {f"log_sd.{k}": v for k, v in log_sd.items()}


def split(joined: Params) -> tuple[Params, Params]:
    """Mean and log σ out of what `join` put together."""
    mean = {k[5:]: v for k, v in joined.items() if k.startswith("mean.")}
    return mean, {k[7:]: v for k, v in joined.items() if k.startswith("log_sd.")}


@dataclass(frozen=True)
class Foreign:
    """An optimiser of the torchopt form as an ascent rule.

    `init(params) -> state`, `update(grads, state, params=...) -> (updates, state)`: it is shown the gradient of
    a loss, and its updates are added.
    """

    optimiser: Any

    def init(self, params: Params) -> Any:
        """The rule's own state before its first step."""
        return self.optimiser.init(params)

    def step(self, params: Params, grads: Params, state: Any, inplace: bool = False) -> tuple[Params, Any]:
        """The parameters and the rule's state after one step uphill."""
        # torchopt overwrites its state unless told not to
        options = {"inplace": inplace} if "inplace" in inspect.signature(self.optimiser.update).parameters else {}
        downhill = {k: -g for k, g in grads.items()}
        updates, state = self.optimiser.update(downhill, state, params=params, **options)
        if inplace:
            return {k: p.add_(updates[k]) for k, p in params.items()}, state
        return {k: p + updates[k] for k, p in params.items()}, state


def as_rule(rule: Any) -> Rule:
    """An ascent rule from what a caller may have."""
    if rule is None:
        return Adam()
    if getattr(rule, "weight_decay", 0.0):
        raise ValueError(
            f"rule.weight_decay must be 0, for it would pull σ towards 1; got {rule.weight_decay}. "
            "Put a prior in the log joint instead."
        )
    if hasattr(rule, "init") and hasattr(rule, "step"):
        return rule
    if hasattr(rule, "init") and hasattr(rule, "update"):
        return Foreign(rule)
    raise ValueError(f"rule must have init and step, or init and update; got {type(rule).__name__}.")


def check_settings(temperature: float, draws: int, clip: float) -> None:
    """Refuse a temperature, number of draws or clipping that neither VI, diagonal or dense, can use."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be at least 0 (1/N is Bayes) and finite; got {temperature}.")
    if draws < 1:
        raise ValueError(f"draws must be at least 1; got {draws}.")
    if not clip > 0:
        raise ValueError(f"clip must be positive; got {clip}.")


def law(state: VIDiagState) -> GaussianLaw:
    """q as a law over the one vector of weights."""
    return gaussian(state.params[THETA], state.log_sd[THETA].exp())
