"""A penalty on what low-rank adapters add to the weights of a frozen model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer.core.types import Batch
from bayesformer.layers.blob_linear import active_lora
from bayesformer.train.objective import Forward


@dataclass(frozen=True)
class AdapterPenalty:
    """λ Σ ‖B A‖_F² over the active LoRA adapters, as a term of the objective beside the mean log-likelihood.

    Balabanov & Linander (2024), section 3: of B A itself, without the factor α/r with which it enters the weight. By
    ‖B A‖_F² = tr(BᵀB A Aᵀ) nothing is larger than r by r.
    """

    weight: float  # λ
    name: str = "adapter_penalty"

    def __call__(self, forward: Forward, module: nn.Module, batch: Batch) -> Tensor:  # noqa: ARG002
        """(): the penalty of the weights at hand, whatever the batch."""
        norms = [((b.mT @ b) * (a @ a.mT)).sum() for a, b in adapter_factors(module)]
        return self.weight * torch.stack(norms).sum()


def adapter_factors(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """A (r, in) and B (out, r) of every active LoRA adapter of which something is trained."""
    for layer in module.modules():
        own: Any = layer
        for adapter in active_lora(layer):
            a, b = own.lora_A[adapter].weight, own.lora_B[adapter].weight
            if a.requires_grad or b.requires_grad:
                yield a, b
