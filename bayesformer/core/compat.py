"""Every private name of torch that the library uses, each with its reason; nothing else may use a private name.

A release of torch that drops one of these breaks this file alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["DIRICHLET", "GAMMA", "TorchDispatchMode", "defaults", "standard_gamma", "transformed", "tree_leaves"]
# TorchDispatchMode: documented by torch ("Extending torch") under this private path only.
# tree_leaves: tensors inside whatever a model returns; torch.utils has no public way to walk it.


def defaults(operation: Any) -> dict[str, Any]:
    """The arguments of an elementary operation (torch.ops.aten...) in their order, with their default values.

    A TorchDispatchMode is given arguments by place and without defaults; the schema alone knows their names.
    """
    return {argument.name: argument.default_value for argument in operation._schema.arguments}


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
