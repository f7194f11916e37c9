"""Score functions: from queries and keys, split into heads, to logits. Families do not care which one it was.

Letters: B batch, H heads, T queries, S keys, d head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesformer.attention.edges import Edges
from bayesformer.attention.ranges import check_positive


class ScaledDot(nn.Module):
    """qᵀk / √d. Vaswani et al. (2017), eq. 1."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """From (B, H, T, d) and (B, H, S, d) to (B, H, T, S)."""
        return q @ k.mT / math.sqrt(q.shape[-1])


class Additive(nn.Module):
    """vᵀ tanh(q + k), v a vector per head. Bahdanau, Cho & Bengio (2015), their W and U being the projections."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        check_positive(heads=heads, width=width)
        self.v = nn.Parameter(torch.empty(heads, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot-uniform, as every weight."""
        nn.init.xavier_uniform_(self.v)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """From (B, H, T, d) and (B, H, S, d) to (B, H, T, S); (B, H, T, S, d) in between."""
        inner = torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3))
        return (inner * self.v[:, None, None]).sum(-1)


class Gat(nn.Module):
    """LeakyReLU(aᵀq + bᵀk), a and b vectors per head. Veličković et al. (2018), eq. 3.

    There q and k are one projection of the nodes; here each has its own.
    """

    def __init__(self, heads: int, width: int, slope: float = 0.2) -> None:
        super().__init__()
        check_positive(heads=heads, width=width)
        self.slope = slope
        self.a, self.b = nn.Parameter(torch.empty(heads, width)), nn.Parameter(torch.empty(heads, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot-uniform, as every weight."""
        nn.init.xavier_uniform_(self.a)
        nn.init.xavier_uniform_(self.b)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """From (B, H, T, d) and (B, H, S, d) to (B, H, T, S)."""
        of_query, of_key = self._parts(q, k)
        return F.leaky_relu(of_query.unsqueeze(-1) + of_key.unsqueeze(-2), self.slope)

    def along(self, q: Tensor, k: Tensor, edges: Edges) -> Tensor:
        """From the nodes' (B, H, N, d) to one logit per edge, (B, H, 1, E)."""
        of_query, of_key = _of_nodes(q, self.a), _of_nodes(k, self.b)
        logits = F.leaky_relu(edges.spread(of_query) + edges.sent(of_key), self.slope)
        return logits.unsqueeze(-2)

    def _parts(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        # Products of matrices, not of entries: (B, H, T, d) would be written out only to be summed.
        return (q @ self.a.unsqueeze(-1)).squeeze(-1), (k @ self.b.unsqueeze(-1)).squeeze(-1)  # (B, H, T), (B, H, S)


def _of_nodes(x: Tensor, vectors: Tensor) -> Tensor:
    """(B, H, N): products of (B, H, N, d) with a vector per head, (H, d).

    One matrix for all heads, 0 but for its blocks: nodes stand before heads in memory, and that order is kept.
    """
    heads = torch.eye(len(vectors), dtype=vectors.dtype, device=vectors.device)
    blocks = (vectors.unsqueeze(-1) * heads.unsqueeze(1)).flatten(0, 1)  # (H d, H)
    return (x.transpose(-3, -2).flatten(-2) @ blocks).mT
