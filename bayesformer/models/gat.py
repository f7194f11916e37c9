"""Graph attention network: classes of the nodes of a graph. Veličković et al. (2018)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from bayesformer.attention import Edges, GraphAttention, Softmax
from bayesformer.attention.checks import check_positive, check_rate


class GraphAttentionNetwork(nn.Module):
    """Features of the nodes and the edges in, C outputs per node out. Section 3.3 of the paper.

    Layers of H heads of width d with ELU between them; the heads of the last are averaged. Dropout acts on the input
    of every layer and on attention weights.

    Args:
        features: width of a node.
        classes: C.
        width: d, of a hidden head.
        heads: H, of a hidden layer.
        out_heads: of the last layer.
        depth: layers.
        dropout: of inputs and of attention weights.
        self_loops: whether every node attends to itself too, whatever the edges say.
        family: makes the law of a layer's attention weights; softmax with `dropout` by default.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        width: int = 8,
        heads: int = 8,
        out_heads: int = 1,
        depth: int = 2,
        dropout: float = 0.6,
        self_loops: bool = True,
        family: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        check_positive(features=features, classes=classes, width=width, heads=heads, out_heads=out_heads, depth=depth)
        check_rate("dropout", dropout)
        make = family or (lambda: Softmax(dropout))
        inner = width * heads
        hidden = [GraphAttention(inner if i else features, width, heads, make()) for i in range(depth - 1)]
        last = GraphAttention(inner if depth > 1 else features, classes, out_heads, make(), concat=False)
        self.layers, self.dropout = nn.ModuleList([*hidden, last]), nn.Dropout(dropout)
        self.features, self.self_loops = features, self_loops

    def forward(self, x: Any, edge_index: Tensor | None = None) -> Tensor:
        """From nodes (N, F) and edges (2, E), or a PyTorch Geometric `Data` that has both, to (N, C).

        As a batch of one graph, (1, N, F) and (1, 2, E), to (1, N, C): so the nodes are positions of one example, and
        masks of the data say which of them count.
        """
        return self.outputs_and_kl(x, edge_index)[0]

    def outputs_and_kl(self, x: Any, edge_index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The outputs, and the KL of the graph, (1,)."""
        if edge_index is None:
            x, edge_index = parts_of(x)
        single = x.dim() == 2
        nodes, index = (x[None], edge_index) if single else (x, one_graph(x, edge_index))
        if nodes.shape[-1] != self.features:
            raise ValueError(f"x must have {self.features} features per node; got {tuple(x.shape)}.")
        edges = Edges.of(index, nodes.shape[-2], self.self_loops)
        owed = []
        for i, layer in enumerate(self.layers):
            nodes, kl = layer(self.dropout(F.elu(nodes) if i else nodes), edges)
            owed.append(kl)
        return nodes.squeeze(-3) if single else nodes, sum(owed[1:], owed[0])


def parts_of(graph: Any) -> tuple[Tensor, Tensor]:
    """Nodes and edges of anything that has them as `x` and `edge_index`."""
    x, edge_index = getattr(graph, "x", None), getattr(graph, "edge_index", None)
    if not isinstance(x, Tensor) or not isinstance(edge_index, Tensor):
        raise ValueError(f"x must come with edge_index, or be a graph that has both; got {type(graph).__name__} alone.")
    return x, edge_index


def one_graph(x: Tensor, edge_index: Tensor) -> Tensor:
    """(2, E): the edges of a batch of one graph."""
    if x.dim() != 3 or edge_index.dim() != 3 or len(x) != 1 or len(edge_index) != 1:
        raise ValueError(
            "x and edge_index must be one graph, (N, F) and (2, E) or (1, N, F) and (1, 2, E); "
            f"got {tuple(x.shape)} and {tuple(edge_index.shape)}. Several graphs are one with parts that do not touch."
        )
    return edge_index[0]
