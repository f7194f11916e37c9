"""One graph whose nodes are classified, some of them with labels to learn from."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from bayesformer.data import Data


class Graph(NamedTuple):
    """N nodes, the edges between them, a class for each, and which nodes are for what."""

    x: Tensor  # (N, F)
    edge_index: Tensor  # (2, E), sources above targets
    y: Tensor  # (N,)
    train: Tensor  # (N,) boolean, as are the next two
    validation: Tensor
    test: Tensor

    def part(self, mask: Tensor, compressed: bool = False, hops: int | None = None) -> Data:
        """The whole graph as the one example there is; only the classes of nodes in the mask count.

        Learning is transductive: all parts have the same inputs, features of test nodes included.

        Args:
            mask: (N,) boolean.
            compressed: whether features come as compressed rows, for bags of words, which are nearly all 0.
            hops: leave out what the nodes in the mask do not see through this many layers. Their outputs are the
                same; the KL of stochastic attention, which is one of all edges, is not.
        """
        if hops is not None and hops < 1:
            raise ValueError(f"hops must be at least 1; got {hops}.")
        if hops is not None:
            return self.around(mask, hops).part(mask[self.seen(mask, hops)], compressed)
        nodes = compressed_rows(self.x) if compressed else {"x": self.x[None]}
        return Data({**nodes, "edge_index": self.edge_index[None]}, self.y[None], mask[None])

    def seen(self, mask: Tensor, hops: int) -> Tensor:
        """(N,) boolean: nodes from which a node in the mask can be reached by at most `hops` edges."""
        seen, (source, target) = mask.clone(), self.edge_index
        for _ in range(hops):
            seen = seen.index_fill(0, source[seen[target]], True)
        return seen

    def around(self, mask: Tensor, hops: int) -> Graph:
        """The graph of these nodes, and of the edges into those among them that are one hop nearer."""
        kept, inner = self.seen(mask, hops), self.seen(mask, hops - 1)
        number = kept.cumsum(0) - 1
        edges = number[self.edge_index[:, inner[self.edge_index[1]]]]
        return Graph(self.x[kept], edges, *(part[kept] for part in self[2:]))


def compressed_rows(x: Tensor) -> dict[str, Tensor]:
    """The features (N, F) that are not 0, row by row: `x` (1, Z), their `columns`, and where rows begin and end."""
    columns, ends = x.ne(0).nonzero()[:, 1], x.ne(0).sum(1).cumsum(0)
    return {"x": x[x.ne(0)][None], "columns": columns[None], "starts": F.pad(ends, (1, 0))[None]}


def from_geometric(graph: Any) -> Graph:
    """From a PyTorch Geometric `Data`, or anything with its names."""
    names = ("x", "edge_index", "y", "train_mask", "val_mask", "test_mask")
    missing = [name for name in names if not isinstance(getattr(graph, name, None), Tensor)]
    if missing:
        raise ValueError(f"graph must have the tensors {', '.join(names)}; it lacks {', '.join(missing)}.")
    return Graph(*(getattr(graph, name) for name in names))
