"""Learning rates and temperatures as functions of the step, which counts from 1.

Tensors in, tensors out: no device sync.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Schedule: TypeAlias = Callable[[Tensor], Tensor]


def at(setting: float | Schedule, step: Tensor) -> float | Tensor:
    """The value of a setting at a step: a number is itself, a schedule is asked."""
    return setting(step) if callable(setting) else setting


def constant(lr: float) -> Schedule:
    """A rate that is the same in every step, η_t = η."""
    return lambda step: torch.full_like(step, lr)


def warmup_inverse_sqrt(lr: float, warmup: int) -> Schedule:
    """Linear to `lr` over `warmup` steps, then falling with the inverse square root of the step.

        η_t = η min(t / w, √(w / t))

    Vaswani et al. (2017), section 5.3, with the peak given directly instead of through the model's width.
    """
    if warmup < 1:
        raise ValueError(f"warmup must be at least 1 step; got {warmup}.")
    return lambda step: lr * torch.minimum(step / warmup, (warmup / step).sqrt())


def warmup_cosine(lr: float, warmup: int, steps: int) -> Schedule:
    """Linear to `lr` over `warmup` steps, then half a cosine down to 0 at step `steps`.

        η_t = η min(t / w, ½ (1 + cos π (t - w) / (n - w)))

    Loshchilov & Hutter (2017), without restarts. At its end the noise of the steps is gone, so the last weights
    need no validation data to be picked by.
    """
    if not warmup >= 1:
        raise ValueError(f"warmup must be at least 1 step; got {warmup}.")
    rest = max(steps - warmup, 1)

    def rate(step: Tensor) -> Tensor:
        fallen = ((step - warmup) / rest).clamp(0, 1)
        return lr * torch.minimum(step / warmup, 0.5 * (1 + torch.cos(math.pi * fallen)))

    return rate


def robbins_monro(a: float, b: float, gamma: float) -> Schedule:
    """Steps that fall as a power of their number, so that a sampler with noisy gradients loses its bias in the end.

        η_t = a (b + t)^-γ

    Welling & Teh (2011), section 2; the sum diverges and the sum of squares does not for γ in (½, 1] (Robbins &
    Monro 1951). γ = 1/3 makes the error of averages fall fastest (Teh et al. 2016).
    """
    if not (a > 0 and b >= 0 and 0 <= gamma <= 1):
        raise ValueError(f"a must be positive, b at least 0 and gamma in [0, 1]; got a={a}, b={b}, gamma={gamma}.")
    return lambda step: a * (b + step) ** -gamma


def warmup_linear(lr: float, warmup: int, steps: int) -> Schedule:
    """Linear to `lr` over `warmup` steps, then linear down to 0 at `steps`: η min(t / w, (n - t) / (n - w))."""
    if not warmup >= 1:
        raise ValueError(f"warmup must be at least 1 step; got {warmup}.")
    rest = max(steps - warmup, 1)

    def rate(step: Tensor) -> Tensor:
        return lr * torch.minimum(step / warmup, ((steps - step) / rest).clamp(0, 1))

    return rate


def annealed(start: float, end: float, steps: int) -> Schedule:
    """Linear from `start` to `end` over `steps`, and constant from there: η_t = η_0 + (η_1 - η_0) min(t / n, 1).

    The linear form of torch's SWALR (Izmailov et al. 2018), by steps instead of epochs.
    """
    if not steps >= 1:
        raise ValueError(f"steps must be at least 1; got {steps}.")
    return lambda step: start + (end - start) * (step / steps).clamp_max(1)


def cycle_position(cycles: int, steps: int) -> Schedule:
    """Where a step stands in its cycle, in [0, 1):  r_t = ((t - 1) mod n) / n,  n = ⌈steps / cycles⌉.

    Cycles of one length; those after `steps` go on the same way.
    """
    if not 1 <= cycles <= steps:
        raise ValueError(f"cycles must be at least 1 and at most steps; got cycles={cycles}, steps={steps}.")
    length = -(-steps // cycles)
    return lambda step: (step - 1) % length / length


def cyclical_lr(lr: float, cycles: int, steps: int) -> Schedule:
    """Cosine cycles: from `lr` down to nearly 0, and back at once.

        η_t = η/2 (1 + cos π r_t)

    Zhang et al. (2020), eq. 1. The rate never is 0, so a sampler never stands still.
    """
    position = cycle_position(cycles, steps)
    return lambda step: lr / 2 * (1 + torch.cos(math.pi * position(step)))


def cyclical_temperature(temperature: float, cycles: int, steps: int, exploration: float = 0.8) -> Schedule:
    """Temperature 0 in the first part of each cycle (exploration), `temperature` in the rest (sampling).

        T_t = T 1[r_t ≥ β],    β = `exploration`

    Zhang et al. (2020), algorithm 1. Goes with `cyclical_lr` of the same cycles and steps, and with any sampler
    but SGNHT, whose friction only grows at temperature 0. Draws are kept from the sampling part alone.
    """
    if not 0 <= exploration < 1:
        raise ValueError(f"exploration must be in [0, 1); got {exploration}.")
    position = cycle_position(cycles, steps)
    return lambda step: temperature * (position(step) >= exploration).to(step.dtype)
