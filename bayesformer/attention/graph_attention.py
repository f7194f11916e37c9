"""Attention of the nodes of a graph to their neighbours. Veličković et al. (2018), Graph Attention Networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bayesformer.attention.edges import CompressedRows, Edges
from bayesformer.attention.multi_head import Linear
from bayesformer.attention.ranges import check_positive
from bayesformer.attention.score_functions import Gat


class GraphAttention(nn.Module):
    """A graph attention layer whose weights are given by `family(logits, edges) -> Draw`.

        h = W x,   logits_ij = LeakyReLU(aᵀh_i + bᵀh_j),   y_i = Σ_j weights_ij h_j + c,   j → i an edge

    Eqs. 1 to 6 of the paper. Time and memory are linear in the edges.

    Args:
        inputs: width of a node.
        width: d, of a head.
        heads: H.
        family: the law of the weights, as for `MultiHeadAttention`; contextual priors read the h_j.
        concat: whether heads stand side by side, as inside a network, or are averaged, as at its end.
        slope: of the LeakyReLU.
    """

    def __init__(
        self, inputs: int, width: int, heads: int, family: nn.Module, concat: bool = True, slope: float = 0.2
    ) -> None:
        super().__init__()
        check_positive(inputs=inputs, width=width, heads=heads)
        self.width, self.heads, self.concat = width, heads, concat
        self.project, self.score, self.family = (
            Linear(inputs, heads * width, bias=False),
            Gat(heads, width, slope),
            family,
        )
        self.bias = nn.Parameter(torch.empty(heads * width if concat else width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias to 0; the projection and the scores reset themselves."""
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor | CompressedRows, edges: Edges) -> Tensor:
        """From (B, N, ·), or the compressed rows of one graph, to (B, N, H d), or (B, N, d) without `concat`.

        Graphs of a batch share their edges. Where draws are made together, axes stand before B. A node without edges
        gets the bias.
        """
        projected = x.times(self.project.weight)[None] if isinstance(x, CompressedRows) else self.project(x)
        h = projected.unflatten(-1, (self.heads, self.width)).transpose(-3, -2)  # (B, H, N, d)
        given = (h,) if getattr(self.family, "wants_keys", False) else ()
        weights = self.family(self.score.along(h, h, edges), edges, *given).weights  # (B, H, 1, E)
        out = edges.collect(weights.squeeze(-2), h)  # (B, H, N, d)
        return (out.transpose(-3, -2).flatten(-2) if self.concat else out.mean(-3)) + self.bias
