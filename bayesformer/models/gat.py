"""Graph attention network: classes of the nodes of a graph. Veličković et al. (2018)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from bayesformer.attention import Edges, GraphAttention, Softmax
from bayesformer.attention.edges import CompressedRows
from bayesformer.attention.multi_head import Dropout
from bayesformer.attention.ranges import check_positive, check_rate


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
        self.layers, self.dropout = nn.ModuleList([*hidden, last]), Dropout(dropout)
        self.features, self.self_loops = features, self_loops

    def forward(
        self,
        x: Any,
        edge_index: Tensor | None = None,
        columns: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """From nodes (N, F) and edges (2, E), or a PyTorch Geometric `Data` that has both, to (N, C).

        As a batch of one graph, (1, N, F) and (1, 2, E), to (1, N, C): so the nodes are positions of one example, and
        masks of the data say which of them count. Features of such a graph can be compressed rows: with `columns`
        and `starts`, `x` holds those that are not 0; see `data.graphs.compressed_rows`.
        """
        if edge_index is None:
            x, edge_index = parts_of(x)
        if columns is not None and starts is not None:
            rows = one_list(x, columns, starts)
            edges = Edges.of(one_graph(x[..., None], edge_index), starts.shape[1] - 1, self.self_loops)
            return self._through(rows._replace(values=self.dropout(rows.values)), edges)
        single = x.dim() == 2
        nodes, index = (x[None], edge_index) if single else (x, one_graph(x, edge_index))
        if nodes.shape[-1] != self.features:
            raise ValueError(f"x must have {self.features} features per node; got {tuple(x.shape)}.")
        out = self._through(self.dropout(nodes), Edges.of(index, nodes.shape[-2], self.self_loops))
        return out.squeeze(-3) if single else out

    def _through(self, nodes: Tensor | CompressedRows, edges: Edges) -> Tensor:
        """(1, N, C): all layers one after the other, from nodes that dropout has been applied to."""
        out: Tensor = self.layers[0](nodes, edges)
        for layer in self.layers[1:]:
            out = layer(self.dropout(F.elu(out)), edges)
        return out


def parts_of(graph: Any) -> tuple[Tensor, Tensor]:
    """Nodes and edges of anything that has them as `x` and `edge_index`."""
    x, edge_index = getattr(graph, "x", None), getattr(graph, "edge_index", None)
    if not isinstance(x, Tensor) or not isinstance(edge_index, Tensor):
        raise ValueError(f"x must come with edge_index, or be a graph that has both; got {type(graph).__name__} alone.")
    return x, edge_index


def one_list(values: Tensor, columns: Tensor, starts: Tensor) -> CompressedRows:
    """The compressed rows of a batch of one graph."""
    if values.dim() != 2 or len(values) != 1 or values.shape != columns.shape or starts.dim() != 2 or len(starts) != 1:
        raise ValueError(
            "x, columns and starts must be (1, Z), (1, Z) and (1, N + 1) for compressed rows; "
            f"got {tuple(values.shape)}, {tuple(columns.shape)} and {tuple(starts.shape)}."
        )
    return CompressedRows(values[0], columns[0], starts[0])


def one_graph(x: Tensor, edge_index: Tensor) -> Tensor:
    """(2, E): the edges of a batch of one graph."""
    if x.dim() != 3 or edge_index.dim() != 3 or len(x) != 1 or len(edge_index) != 1:
        raise ValueError(
            "x and edge_index must be one graph, (N, F) and (2, E) or (1, N, F) and (1, 2, E); "
            f"got {tuple(x.shape)} and {tuple(edge_index.shape)}. Several graphs are one with parts that do not touch."
        )
    return edge_index[0]
