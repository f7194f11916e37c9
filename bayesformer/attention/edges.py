"""Attention along the edges of a graph: which entries of a list make a row.

Dense attention has logits (B, H, T, S) and a mask. On a graph with E edges they are (B, H, 1, E), one number per edge,
and `Edges` stands where the mask stood: the edges into a node are its row. Nothing here is N by N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class Edges:
    """E edges among N nodes; node `target[e]` attends to node `source[e]`."""

    source: Tensor  # (E,)
    target: Tensor  # (E,)
    nodes: int  # N

    @classmethod
    def of(cls, edge_index: Tensor, nodes: int, self_loops: bool = False) -> Edges:
        """From (2, E), sources above targets as in PyTorch Geometric.

        Args:
            edge_index: whole numbers below `nodes`.
            nodes: N.
            self_loops: whether every node shall attend to itself, exactly once.
        """
        check_edge_index(edge_index, nodes)
        source, target = edge_index.long()
        if self_loops:
            others, each = source != target, torch.arange(nodes, device=source.device)
            source, target = torch.cat([source[others], each]), torch.cat([target[others], each])
        return cls(source, target, nodes)

    def sum(self, x: Tensor) -> Tensor:
        """(..., N): the sum of each row of (..., E)."""
        return x.new_zeros(*x.shape[:-1], self.nodes).scatter_add(-1, self.target.expand(x.shape), x)

    def largest(self, x: Tensor) -> Tensor:
        """(..., N): the largest of each row; the lowest number there is where a row is empty."""
        lowest = x.new_full((*x.shape[:-1], self.nodes), torch.finfo(x.dtype).min)
        return lowest.scatter_reduce(-1, self.target.expand(x.shape), x, "amax")

    def spread(self, x: Tensor) -> Tensor:
        """(..., E): each edge gets the number of its row, from (..., N)."""
        return x[..., self.target]

    def seen(self, like: Tensor) -> Tensor:
        """(E,): the length of each edge's row."""
        return self.spread(self.sum(like.new_ones(len(self.target))))

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Over each row of (..., E)."""
        # The largest cancels: no gradient has to go through it.
        shifted = logits - self.spread(self.largest(logits.detach()))
        # An empty row has the logarithm of 0, but no edge asks for it or for its gradient.
        return shifted - self.spread(self.sum(shifted.exp()).log())

    def softmax(self, logits: Tensor) -> Tensor:
        """Over each row of (..., E)."""
        return self.log_softmax(logits).exp()

    def softmax_backward(self, grad: Tensor, weights: Tensor) -> Tensor:
        """w (g - Σ w g) of each row."""
        product = grad * weights
        return product.sub_(weights * self.spread(self.sum(product)))

    def collect(self, weights: Tensor, values: Tensor) -> Tensor:
        """(..., N, d): the sum over each row of weights (..., E) times values (..., N, d) of the sources."""
        messages = weights.unsqueeze(-1) * values.index_select(-2, self.source)  # (..., E, d)
        # Edges in front and the rest flat: this is the scatter that torch makes fast.
        flat = messages.movedim(-2, 0).reshape(len(self.source), -1)  # (E, ...)
        total = flat.new_zeros(self.nodes, flat.shape[1]).scatter_add(0, self.target[:, None].expand_as(flat), flat)
        return total.view(self.nodes, *messages.shape[:-2], messages.shape[-1]).movedim(0, -2)


Visible: TypeAlias = Tensor | Edges
"""What may be attended to: a boolean mask that broadcasts to (B, H, T, S), or the edges of a graph."""


def check_edge_index(edge_index: Tensor, nodes: int) -> None:
    """Refuse what is no list of edges among this many nodes."""
    if edge_index.dim() != 2 or len(edge_index) != 2:
        raise ValueError(f"edge_index must have shape (2, E); got {tuple(edge_index.shape)}.")
    if edge_index.is_floating_point() or edge_index.dtype == torch.bool:
        raise ValueError(f"edge_index must hold whole numbers; got {edge_index.dtype}.")
    if edge_index.numel() and not (int(edge_index.min()) >= 0 and int(edge_index.max()) < nodes):
        low, high = int(edge_index.min()), int(edge_index.max())
        raise ValueError(f"edge_index must lie in 0..{nodes - 1} for {nodes} nodes; got {low}..{high}.")
