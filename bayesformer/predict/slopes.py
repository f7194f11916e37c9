"""Backward passes for many columns at once."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesformer.curvature.capture import Site, backpropagate


def back(sites: list[Site], outputs: Tensor, columns: Tensor) -> list[Tensor]:
    """As `backpropagate`, with all columns in one batched backward pass where the model's operations have one."""
    if len(columns) == 1 or any(site.edge is None for site in sites):
        return backpropagate(sites, outputs, columns)
    edges = {id(site.edge): site.edge for site in sites if site.edge is not None}
    try:
        answers = torch.autograd.grad(
            outputs, list(edges.values()), columns, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    except RuntimeError:  # an operation whose backward pass cannot be batched; anything else fails again below
        return backpropagate(sites, outputs, columns)
    gradients = dict(zip(edges, answers, strict=True))
    return [_arranged(site, gradients[id(site.edge)], len(columns)) for site in sites]


def _arranged(site: Site, gradient: Tensor | None, columns: int) -> Tensor:
    if gradient is None:
        nothing = site.arrange(None)
        return nothing.expand(columns, *nothing.shape)
    return torch.vmap(site.arrange)(gradient)


def one_hot(outputs: Tensor, start: int, stop: int) -> Tensor:
    """(C, B, ...): 1 at one output of every example, for the outputs from `start` to `stop`."""
    rows = torch.zeros(stop - start, outputs[0].numel(), dtype=outputs.dtype, device=outputs.device)
    rows.diagonal(start).fill_(1)
    return rows.view(-1, 1, *outputs.shape[1:]).expand(-1, len(outputs), *outputs.shape[1:])


def at_position(outputs: Tensor, position: int, vectors: Tensor) -> Tensor:
    """(C, B, ..., K): vectors (C, K) at one position of every example, 0 at the others."""
    rows = vectors.new_zeros(len(vectors), outputs[0].numel() // vectors.shape[1], vectors.shape[1])
    rows[:, position] = vectors
    return rows.view(-1, 1, *outputs.shape[1:]).expand(-1, len(outputs), *outputs.shape[1:])
