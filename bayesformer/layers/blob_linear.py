"""The random A of a low-rank adapter B A, as BLoB trains it: a Gaussian in rank space, its noise flipped by signs."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bayesformer.core import draws
from bayesformer.core.errors import unknown_name

Flipout = Literal["token", "example", "none"]
FLIPOUTS = ("token", "example", "none")
WIDTH, EPSILON = 4096, 0.05  # the published start of G, and the width it was chosen for


class BlobLinear(nn.Module):
    """x Aᵀ with A ~ N(M, Ω²) elementwise, Ω = G ∘ G; `weight` is M and `rho` is G, both (r, in).

        y = x Mᵀ + ((x ∘ s) Eᵀ) ∘ t,    E = Ω ∘ Z,  Z ~ N(0, 1),   s, t = ±1

    One Z for the whole batch. Signs s (in) and t (r) are drawn per token, per example, or not at all. The variance of
    an output is Σ_j Ω²_ij x_j² in each case; with signs per token the noise of different tokens is uncorrelated. In
    evaluation mode it is x Mᵀ. Wang et al. (2024), section 3; Flipout: Wen et al. (2018).
    """

    def __init__(self, weight: nn.Parameter, flipout: Flipout = "token", epsilon: float | None = None) -> None:
        super().__init__()
        if flipout not in FLIPOUTS:
            raise unknown_name("flipout", flipout, FLIPOUTS)
        self.weight, self.flipout = weight, flipout
        # A starts with entries of spread ∝ 1/√in, and Ω = G² keeps its published ratio to it at any width
        self.epsilon = EPSILON * (WIDTH / weight.shape[1]) ** 0.25 if epsilon is None else epsilon
        self.rho = nn.Parameter(torch.empty_like(weight))
        self.reset_rho()

    def reset_rho(self) -> None:
        """Draw G uniformly from (ε/√2, ε)."""
        with torch.no_grad():
            self.rho.uniform_(self.epsilon / math.sqrt(2), self.epsilon)

    def reset_parameters(self) -> None:
        """Draw M as PEFT does, and G anew."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.reset_rho()

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (..., in) to A x (..., r), with noise in training mode."""
        mean = linear(x, self.weight)
        if not self.training:
            return mean
        noise = self.rho.square() * draws.normal_like(self.rho)  # (r, in)
        if self.flipout == "none":
            return mean + linear(x, noise)
        shape = x.shape[:-1] if self.flipout == "token" else (len(x), *[1] * (x.dim() - 2))
        inward = draws.signs((*shape, x.shape[-1]), x)
        outward = draws.signs((*shape, len(noise)), x)
        return mean + linear(x * inward, noise) * outward


def add_blob(model: nn.Module, flipout: Flipout = "token", epsilon: float | None = None) -> nn.Module:
    """The model with a random A in every LoRA layer whose A is trained; changed in place."""
    count = 0
    for layer in list(model.modules()):
        for adapter in active_lora(layer):
            table: Any = layer.lora_A
            if table[adapter].weight.requires_grad:
                table[adapter] = BlobLinear(table[adapter].weight, flipout, epsilon)
                count += 1
    if not count:
        raise ValueError(
            "model must have LoRA adapters that are trained, for Blob puts its posterior on their A; got none. "
            "Use peft.get_peft_model(model, LoraConfig(...))."
        )
    return model


def active_lora(layer: nn.Module) -> list[str]:
    """Names of the active LoRA adapters of a PEFT layer whose A and B are linear maps; none for other modules."""
    a, b = getattr(layer, "lora_A", None), getattr(layer, "lora_B", None)
    if not isinstance(a, nn.ModuleDict) or not isinstance(b, nn.ModuleDict):
        return []
    active: Any = getattr(layer, "active_adapters", [])
    return [name for name in active if name in a and isinstance(a[name], nn.Linear)]
