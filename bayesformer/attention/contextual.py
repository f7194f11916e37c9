"""A prior that is read off the keys: which of them matter, before any query is seen."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesformer.attention.edges import Edges, Visible
from bayesformer.attention.multi_head import Linear
from bayesformer.attention.ranges import check_positive
from bayesformer.attention.rows import masked_log_softmax


class HeadwiseLinear(nn.Module):
    """An affine map of its own for every head, from (B, H, S, inputs) to (B, H, S, outputs)."""

    def __init__(self, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(heads, 1, outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every head's weights Glorot-uniform, biases 0, as those of `Linear`."""
        with torch.no_grad():
            for weight in self.weight:
                nn.init.xavier_uniform_(weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, S, outputs): every head by its own map."""
        return x @ self.weight.mT + self.bias


class Contextual(nn.Module):
    """log Ψ, Ψ = softmax over keys of F₂(relu(F₁(K))). Fan et al. (2020), section 3.3.

    There one Ψ serves all queries. Here a query's Ψ is normalised over the keys it may see: with a causal mask
    the paper's would let the future into the prior of the past. Without one the two are the same.

    Args:
        width: d, of a head's keys.
        hidden: d_mid, between the two maps.
        heads: H, where every head has maps of its own; None: all heads share them.
    """

    inner: Linear | HeadwiseLinear
    outer: Linear | HeadwiseLinear

    def __init__(self, width: int, hidden: int = 5, heads: int | None = None) -> None:
        super().__init__()
        check_positive(width=width, hidden=hidden, **({} if heads is None else {"heads": heads}))
        self.width, self.hidden, self.heads = width, hidden, heads
        if heads is None:
            self.inner, self.outer = Linear(width, hidden), Linear(hidden, 1)
        else:
            self.inner, self.outer = HeadwiseLinear(heads, width, hidden), HeadwiseLinear(heads, hidden, 1)

    def forward(self, keys: Tensor | None, mask: Visible) -> Tensor:
        """From keys (B, H, S, d) to log Ψ, (B, H, 1, S), or (B, H, T, S) if queries see different keys.

        On a graph from the keys of the nodes, (B, H, N, d), to (B, H, 1, E).
        """
        if keys is None:
            raise ValueError("keys must be given to a family with a contextual prior; got None.")
        scores = self.outer(F.relu(self.inner(keys.to(self.inner.weight.dtype)))).mT  # (B, H, 1, S)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if isinstance(mask, Edges):
            return mask.log_softmax(mask.sent(scores))
        return masked_log_softmax(scores, ~mask)
