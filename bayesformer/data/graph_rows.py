"""Graphs of PyTorch Geometric as examples: each is one row, so that they can be cut into batches like anything else.

Their nodes and edges are padded to the largest of a batch. `GraphModel` takes the padding away again and calls a model
with the graphs merged into one, as `torch_geometric.data.Batch` merges them; nothing here imports PyTorch Geometric.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer.data.ragged import pad_rows


class GraphModel(nn.Module):
    """A model of graphs, `model(x, edge_index, batch=...)`, that takes padded graphs and gives one output for each.

        posterior = bf.fit(GraphModel(net), graphs, likelihood="categorical")
        posterior.predict(graphs)

    with `graphs` a list or Dataset of `torch_geometric.data.Data` that have `x`, `edge_index` and a `y` of the whole
    graph, or PyTorch Geometric's DataLoader of them; N is the number of graphs. `edge_attr` is passed on where all
    graphs have it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, x: Tensor, edge_index: Tensor, nodes: Tensor, edges: Tensor, edge_attr: Tensor | None = None
    ) -> Tensor:
        """Outputs (B, ...) of B graphs.

        Args:
            x: (B, n, F), features of at most n nodes.
            edge_index: (B, e, 2), edges by the numbers of their nodes within the graph.
            nodes: (B,), how many nodes each graph has; what follows is padding.
            edges: (B,), the same of its edges.
            edge_attr: (B, e, D), features of the edges.
        """
        real_nodes, real_edges = _places(nodes, x.shape[1]), _places(edges, edge_index.shape[1])
        shift = (nodes.cumsum(0) - nodes).view(-1, 1, 1)  # of the numbers of nodes, where all graphs are one
        merged = (edge_index + shift)[real_edges].mT
        batch = torch.arange(len(x), device=x.device).repeat_interleave(nodes)
        further = {} if edge_attr is None else {"edge_attr": edge_attr[real_edges]}
        return self.model(x[real_nodes], merged, batch=batch, **further)


def _places(counts: Tensor, length: int) -> Tensor:
    """(B, length): True at the first `counts` places of each row."""
    return torch.arange(length, device=counts.device) < counts.unsqueeze(1)


def is_graph(item: Any) -> bool:
    """Whether an example is a graph as PyTorch Geometric has it: an object with nodes' features and edges."""
    return hasattr(item, "edge_index") and hasattr(item, "x")


def collate_graphs(graphs: Sequence[Any], name: str = "data") -> dict[str, Tensor]:
    """Graphs as one batch for `GraphModel`, with their targets as "labels" (B, ...) where all have some."""
    for graph in graphs:
        if not isinstance(graph.x, Tensor) or not isinstance(graph.edge_index, Tensor):
            raise ValueError(f"graphs of {name} must have tensors x and edge_index; got {graph}.")
    batch = {
        "x": pad_rows([graph.x for graph in graphs], 0),
        "edge_index": pad_rows([graph.edge_index.mT for graph in graphs], 0),
        "nodes": torch.tensor([len(graph.x) for graph in graphs], device=graphs[0].x.device),
        "edges": torch.tensor([graph.edge_index.shape[1] for graph in graphs], device=graphs[0].x.device),
    }
    if (features := _of_all(graphs, "edge_attr")) is not None:
        batch["edge_attr"] = pad_rows(features, 0)
    if (targets := _of_all(graphs, "y")) is not None:
        batch["labels"] = torch.cat([_target(y, name) for y in targets])
    return batch


def _of_all(graphs: Sequence[Any], key: str) -> list[Tensor] | None:
    """A tensor of every graph; None where some have none."""
    found = [value for graph in graphs if isinstance(value := getattr(graph, key, None), Tensor)]
    return found if len(found) == len(graphs) else None


def _target(y: Tensor, name: str) -> Tensor:
    """(1, ...): the target of one graph."""
    row = y.unsqueeze(0) if y.dim() == 0 else y
    if len(row) != 1:
        raise ValueError(
            f"y of the graphs of {name} must have one row, the target of the whole graph; got {len(row)}. Targets of "
            "nodes: one graph is one example, {'x': graph.x[None], 'edge_index': graph.edge_index[None], "
            "'labels': graph.y[None]}, with a module that takes that axis away."
        )
    return row
