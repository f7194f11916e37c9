"""Multi-head attention that takes its weights from a part: a family of attention laws.

A family answers `family(logits, mask) -> Draw(weights, kl)`. Softmax is the deterministic one; stochastic
families stand beside it, one file each, and plug into the same `MultiHeadAttention`. So do score functions, in
`score_functions.py`. The KL of the weights is kept by the family: `attention_kl(model)` reads it after a pass.

Letters: B batch, H heads, T queries, S keys, d head width, D model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from bayesformer.attention.edges import Visible
from bayesformer.attention.ranges import check_positive, check_rate
from bayesformer.attention.rows import hidden_keys, row_softmax
from bayesformer.attention.score_functions import ScaledDot
from bayesformer.core.draws import dropout, dropout_rate
from bayesformer.core.types import Draw


def masked_softmax(logits: Tensor, mask: Visible) -> Tensor:
    """Softmax over the keys a query may attend to, (B, H, T, S); every other weight is exactly 0.

    `mask` is boolean, broadcasts to the logits and is True where attending is allowed. A query without any
    key gets a row of zeros. The fill is the lowest finite number: minus infinity would make such a row 0/0,
    and its NaN would come back through the gradient.
    With edges, logits are (B, H, 1, E) and a row is what goes into one node.
    """
    return row_softmax(logits, hidden_keys(mask))


class Dropout(nn.Dropout):
    """Dropout of the library's own modules, by the generators in force, see `bayesformer/core/draws.py`."""

    def forward(self, input: Tensor) -> Tensor:
        """Entries at random set to 0, the others divided by their share."""
        return dropout(input, dropout_rate(self.p)) if self.training else input


class Softmax(nn.Module):
    """Deterministic attention, with dropout of weights if asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        check_rate("dropout", dropout)
        self.dropout = Dropout(dropout)

    def forward(self, logits: Tensor, mask: Visible) -> Draw:
        """Weights (B, H, T, S) and a KL of 0, (B,)."""
        return Draw(self.dropout(masked_softmax(logits, mask)), logits.new_zeros(logits.shape[:-3]))


class Linear(nn.Linear):
    """An affine map that starts from Glorot-uniform weights and zero biases.

    A class of its own so that re-initialising a model, in whatever order its modules are visited, gives the
    law it was built with.
    """

    def reset_parameters(self) -> None:
        """Weights uniform within ±√(6 / (fan in + fan out)), biases 0."""
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class MultiHeadAttention(nn.Module):
    """Multi-head attention whose weights are given by `family(logits, mask) -> Draw`.

    The products are written out: the fused attention of torch hides the weights, and has no batching rule,
    forward derivative or second backward.

    Args:
        dim: width D of what attends, and of the result.
        heads: H, which divides `dim`.
        family: the law of the weights. One with `wants_keys` is also given the keys, (B, H, S, d).
        score: from queries and keys to logits, see `bayesformer.attention.score_functions`; the scaled dot
            product by default.
        context_dim: width of what is attended to, where that is another.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        family: nn.Module,
        score: nn.Module | None = None,
        context_dim: int | None = None,
    ) -> None:
        super().__init__()
        check_positive(dim=dim, heads=heads)
        if dim % heads:
            raise ValueError(f"dim must be a multiple of heads; got dim={dim}, heads={heads}.")
        source = dim if context_dim is None else context_dim
        check_positive(context_dim=source)
        self.heads, self.family, self.score = heads, family, ScaledDot() if score is None else score
        self.query, self.key, self.value = Linear(dim, dim), Linear(source, dim), Linear(source, dim)
        self.out = Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor, context: Tensor | None = None) -> Tensor:
        """From (B, T, D) to (B, T, D).

        Attends to `context` (B, S, ·), or to itself. Where draws are made together, axes stand before B.
        """
        source = x if context is None else context
        q, k, v = self.split(self.query(x)), self.split(self.key(source)), self.split(self.value(source))
        given = (k,) if getattr(self.family, "wants_keys", False) else ()
        weights = self.family(self.score(q, k), mask, *given).weights  # (B, H, T, S)
        return self.out((weights @ v).transpose(-3, -2).flatten(-2))

    @property
    def width(self) -> int:
        """d, the width of a head: D / H."""
        return self.query.out_features // self.heads

    def split(self, x: Tensor) -> Tensor:
        """(B, T, D) as heads, (B, H, T, d)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)
