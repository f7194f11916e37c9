"""Every private name of torch that the library uses, each with its reason; nothing else may use a private name.

A release of torch that drops one of these breaks this file alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp) is being applied to the code that is running.

    There is no public question for it, and in-place random functions must not be called there.
    """
    return torch._C._are_functorch_transforms_active()


def standard_gamma(shape: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draws from Gamma(shape, 1), differentiable in the shape by implicit reparameterisation.

    torch.distributions.Gamma calls the same function but cannot be given a generator.
    """
    return torch._standard_gamma(shape, generator=generator)


GAMMA = torch._standard_gamma
"""What torch.distributions.Gamma and StudentT call: it takes a generator, which they do not hand on."""

DIRICHLET = torch._sample_dirichlet
"""What torch.distributions.Dirichlet and Beta call: it takes a generator, which they do not hand on."""
