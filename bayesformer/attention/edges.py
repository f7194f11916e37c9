"""Attention along the edges of a graph: which entries of a list make a row.

Dense attention has logits (B, H, T, S) and a mask. On a graph with E edges they are (B, H, 1, E), one number per edge,
and `Edges` stands where the mask stood: the edges into a node are its row. Nothing here is N by N.

In memory the numbers of an edge, or of a node, stand together, whatever the shape says: what is gathered along edges
is then a few long reads instead of many short ones. Operations entry by entry keep that order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.core.compat import is_batched_gradient, transformed


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
        rows = _last_first(x)
        return _first_last(rows.new_zeros(self.nodes, rows.shape[1]).index_add(0, self.target, rows), x)

    def largest(self, x: Tensor) -> Tensor:
        """(..., N): the largest of each row; the lowest number there is where a row is empty."""
        rows = _last_first(x)
        lowest = rows.new_full((self.nodes, rows.shape[1]), torch.finfo(x.dtype).min)
        return _first_last(lowest.scatter_reduce(0, self.target[:, None].expand_as(rows), rows, "amax"), x)

    def spread(self, x: Tensor) -> Tensor:
        """(..., E): each edge gets the number of its row, from (..., N)."""
        return _first_last(_last_first(x).index_select(0, self.target), x)

    def sent(self, x: Tensor) -> Tensor:
        """(..., E): each edge gets the number of its source, from (..., N)."""
        return _first_last(_last_first(x).index_select(0, self.source), x)

    def seen(self, like: Tensor) -> Tensor:
        """(E,): the length of each edge's row."""
        return self.spread(self.sum(like.new_ones(len(self.target))))

    def log_softmax(self, logits: Tensor) -> Tensor:
        """(..., E): log softmax over the edges into each node."""
        shifted = self._shifted(logits)
        # An empty row has the logarithm of 0, but no edge asks for it or for its gradient.
        return shifted - self.spread(self.sum(shifted.exp()).log())

    def softmax(self, logits: Tensor) -> Tensor:
        """(..., E): softmax over the edges into each node."""
        scores = self._shifted(logits).exp()
        return scores * self.spread(self.sum(scores).reciprocal())

    def _shifted(self, logits: Tensor) -> Tensor:
        """Less the largest of each row; or of all rows, which is a pass instead of a search, where none underflows.

        It cancels: no gradient has to go through it. Asked on a CPU only, where the answer need not be waited for.
        """
        known = logits.detach()
        if known.device.type == "cpu" and known.numel() and not transformed() and not torch.compiler.is_compiling():
            low, high = known.aminmax()
            if high - low < NARROW:
                return logits - high
        return logits - self.spread(self.largest(known))

    def collect(self, weights: Tensor, values: Tensor) -> Tensor:
        """(..., N, d): the sum over each row of weights (..., E) times values (..., N, d) of the sources.

        Leading axes broadcast.
        """
        if transformed():
            return self.collect_at_once(weights, values)
        lead = torch.broadcast_shapes(weights.shape[:-1], values.shape[:-2])
        given = weights.expand(*lead, -1), values.expand(*lead, -1, -1)
        return _Collect.apply(*given, self)

    def collect_at_once(self, weights: Tensor, values: Tensor) -> Tensor:
        """`collect` with the messages of all edges in memory at a time, (..., E, d), and derivatives of any order."""
        messages = weights.unsqueeze(-1) * values.index_select(-2, self.source)  # (..., E, d)
        flat = messages.movedim(-2, 0).reshape(len(self.source), -1)  # (E, ...)
        total = flat.new_zeros(self.nodes, flat.shape[1]).scatter_add(0, self.target[:, None].expand_as(flat), flat)
        return total.view(self.nodes, *messages.shape[:-2], messages.shape[-1]).movedim(0, -2)


NARROW = 30.0  # nats: the derivative of 1/Σ has squares, and e⁻⁶⁰ is far from the smallest number there is
PIECE = 1 << 17  # numbers per piece of messages: small enough for the cache, large enough to hide the calls


class _Collect(torch.autograd.Function):
    """`Edges.collect` along some edges at a time, so that their messages stay in the cache.

    A training step on a graph of 20,000 nodes takes 1.7 times as long with all messages at once. Gradients that have a
    gradient, or come several at a time, are those of `collect_at_once`.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor, edges: Edges) -> Tensor:
        ctx.save_for_backward(weights, values)
        ctx.edges = edges
        w, v = _last_first(weights), _nodes_first(values)  # (E, L), (N, L, d)
        out = torch.zeros_like(v)
        for source, target, share in _pieces(edges, w, v):
            out.index_add_(0, target, v.index_select(0, source).mul_(share.unsqueeze(-1)))
        return out.movedim(0, -2).reshape(values.shape)

    @staticmethod
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, ...]:
        weights, values = ctx.saved_tensors
        edges: Edges = ctx.edges
        if torch.is_grad_enabled() or is_batched_gradient(by_out) or transformed():
            with torch.enable_grad():
                out = edges.collect_at_once(weights, values)
            wanted = [x for x, want in zip((weights, values), ctx.needs_input_grad, strict=False) if want]
            found = iter(torch.autograd.grad(out, wanted, by_out, create_graph=torch.is_grad_enabled()))
            return *(next(found) if want else None for want in ctx.needs_input_grad[:2]), None
        w, v, g = _last_first(weights), _nodes_first(values), _nodes_first(by_out)
        by_weights, by_values = torch.empty_like(w), torch.zeros_like(v)
        start = 0
        for source, target, share in _pieces(edges, w, v):
            sent = g.index_select(0, target)
            torch.sum(sent * v.index_select(0, source), -1, out=by_weights[start : start + len(share)])
            by_values.index_add_(0, source, sent.mul_(share.unsqueeze(-1)))
            start += len(share)
        return _first_last(by_weights, weights), by_values.movedim(0, -2).reshape(values.shape), None


def _last_first(x: Tensor) -> Tensor:
    """(E, L) of (..., E), or (N, L) of (..., N)."""
    return x.reshape(-1, x.shape[-1]).mT.contiguous()


def _first_last(rows: Tensor, like: Tensor) -> Tensor:
    """The way back, to the leading axes of `like`."""
    return rows.mT.reshape(*like.shape[:-1], len(rows))


def _nodes_first(values: Tensor) -> Tensor:
    """(N, L, d) of (..., N, d): what an edge needs of a node stands together."""
    return values.reshape(-1, *values.shape[-2:]).movedim(1, 0).contiguous()


def _pieces(edges: Edges, weights: Tensor, values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Sources, targets and weights of some edges at a time; of all at once where there is no cache to fit."""
    size = max(1, PIECE // values[0].numel()) if values.device.type == "cpu" else max(1, len(weights))
    return zip(edges.source.split(size), edges.target.split(size), weights.split(size), strict=True)


SPARSE = 0.03  # the share of entries above which a dense product is faster


class CompressedRows(NamedTuple):
    """Features of the nodes of one graph as compressed rows: those that are not 0.

    What zeros cost is not paid: neither by the product with a weight, nor by dropout, which leaves a 0 at 0.
    """

    values: Tensor  # (Z,)
    columns: Tensor  # (Z,)
    starts: Tensor  # (N + 1,): the entries of row i are those from starts[i] to before starts[i + 1]

    def times(self, weight: Tensor) -> Tensor:
        """(N, O): the features times the transpose of a weight (O, F)."""
        nodes, features = len(self.starts) - 1, weight.shape[1]
        if self.values.numel() > SPARSE * nodes * features:
            rows = torch.repeat_interleave(self.starts.diff())
            return F.linear(self.values.new_zeros(nodes, features).index_put((rows, self.columns), self.values), weight)
        return F.embedding_bag(
            self.columns, weight.mT, self.starts, mode="sum", per_sample_weights=self.values, include_last_offset=True
        )


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
