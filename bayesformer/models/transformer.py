"""A transformer encoder to read top to bottom, and three models on it.

Pre-norm blocks, GELU, a final LayerNorm. What attention weights follow is a part: `family` builds one per
block. `attention_kl(model)` gives the KL of each example in the latest pass where a family is stochastic.

Letters: B batch, T positions, D width, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesformer.attention.multi_head import Dropout, Linear, MultiHeadAttention, Softmax
from bayesformer.attention.ranges import check_positive, check_rate
from bayesformer.core.errors import unknown_name


def sinusoids(length: int, dim: int, device: torch.device | None = None) -> Tensor:
    """(length, dim): the positions of Vaswani et al. (2017), section 3.5.

    P[t, 2i] = sin(t / 10000^(2i/dim)),   P[t, 2i + 1] = cos(t / 10000^(2i/dim))
    """
    rates = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64, device=device) * (-math.log(10_000) / dim))
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] * rates  # (length, dim / 2, rounded up)
    table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    return table[:, :dim].to(torch.get_default_dtype())


class SinusoidalPositions(nn.Module):
    """Adds the sinusoids. The table is kept up to `max_length` and computed anew beyond it."""

    table: Tensor

    def __init__(self, dim: int, max_length: int) -> None:
        super().__init__()
        self.register_buffer("table", sinusoids(max_length, dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D), each position marked."""
        length, dim = x.shape[-2:]
        known = length <= len(self.table)
        return x + (self.table[:length] if known else sinusoids(length, dim, self.table.device).to(self.table))


class LearnedPositions(nn.Module):
    """Adds a learned vector per position."""

    def __init__(self, dim: int, max_length: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(max_length, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot-uniform, as every weight."""
        nn.init.xavier_uniform_(self.table)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D), each position marked."""
        length, max_length = x.shape[-2], len(self.table)
        if length > max_length:
            raise ValueError(
                f"a sequence with learned positions must be at most max_length={max_length}; got {length}."
            )
        return x + self.table[:length]


POSITIONS = {"sinusoidal": SinusoidalPositions, "learned": LearnedPositions}


class Embedding(nn.Embedding):
    """A learned vector per token, Glorot-uniform at the start.

    The small start matters: from N(0, 1), as torch has it, a tagger of English learns markedly more slowly.
    """

    def reset_parameters(self) -> None:
        """Uniform within ±√(6 / (tokens + width))."""
        nn.init.xavier_uniform_(self.weight)


class Mlp(nn.Module):
    """Two affine maps with GELU between, on every position by itself."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = Linear(dim, hidden), Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """The same network at every position, from (B, T, D) to (B, T, D)."""
        return self.down(F.gelu(self.up(x)))


class EncoderBlock(nn.Module):
    """x + Attention(LayerNorm(x)), then x + Mlp(LayerNorm(x))."""

    def __init__(self, dim: int, heads: int, hidden: int, dropout: float, family: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.mlp = MultiHeadAttention(dim, heads, family), Mlp(dim, hidden)
        self.attention_dropout, self.mlp_dropout = Dropout(dropout), Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """From (B, T, D) to (B, T, D), attending where `mask` allows."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), mask))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))


class Encoder(nn.Module):
    """Positions, `depth` blocks, and a LayerNorm, from (B, T, D) to (B, T, D).

    Args:
        dim: width D.
        depth: number of blocks.
        heads: attention heads per block; divides `dim`.
        mlp_ratio: hidden width of the MLP over D.
        dropout: rate on the embedded inputs and on what each block adds. Dropout of attention weights
            belongs to the family: `partial(Softmax, dropout=0.1)`.
        causal: whether a position sees only itself and the past.
        positions: "sinusoidal" or "learned".
        max_length: longest sequence for learned positions; up to here tables are kept ready.
        family: called once per block to build what attention weights follow.
    """

    visible: Tensor

    def __init__(
        self,
        dim: int,
        depth: int = 1,
        heads: int = 1,
        *,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
        causal: bool = False,
        positions: str = "sinusoidal",
        max_length: int = 512,
        family: Callable[[], nn.Module] = Softmax,
    ) -> None:
        super().__init__()
        check_positive(dim=dim, depth=depth, mlp_ratio=mlp_ratio, max_length=max_length)
        check_rate("dropout", dropout)
        if positions not in POSITIONS:
            raise unknown_name("positions", positions, POSITIONS)
        self.dim, self.causal = dim, causal
        self.positions, self.dropout = POSITIONS[positions](dim, max_length), Dropout(dropout)
        self.blocks = nn.ModuleList(EncoderBlock(dim, heads, mlp_ratio * dim, dropout, family()) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.register_buffer("visible", visible_keys(max_length, causal), persistent=False)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """The encoded positions (B, T, D); `valid` (B, T) is nonzero where a position is no padding."""
        return self.encode(self.positions(x), valid)

    def encode(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """The encoded positions (B, T, D) of tokens that are marked with their positions; some may be left out."""
        mask = self.mask(x.shape[-2], valid)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)

    def mask(self, length: int, valid: Tensor | None) -> Tensor:
        """What may be attended to, broadcasting to (B, H, T, S) with S always written out."""
        table = self.visible
        if length > table.shape[-1]:
            table = visible_keys(length, self.causal, table.device)
        table = table[..., :length, :length]  # (1, 1, T or 1, S)
        if valid is None:
            return table
        kept = valid.bool()[:, None]
        # Padding attends to nothing either: its weights are no part of the model, and would be part of the KL.
        return table & kept[:, :, None, :] & kept[..., None]


def visible_keys(length: int, causal: bool, device: torch.device | None = None) -> Tensor:
    """(1, 1, T, S): every key up to the query's own position; or (1, 1, 1, S): every key."""
    if causal:
        return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()
    return torch.ones(1, 1, 1, length, dtype=torch.bool, device=device)


class Regressor(nn.Module):
    """Real vectors in, a mean and a raw scale per value out: for `likelihoods.Gaussian(scale=None)`."""

    def __init__(self, encoder: Encoder, inputs: int = 1, outputs: int = 1) -> None:
        super().__init__()
        check_positive(inputs=inputs, outputs=outputs)
        self.embedding, self.encoder = Linear(inputs, encoder.dim), encoder
        self.projection = Linear(encoder.dim, 2 * outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """From (B, T, inputs) to (B, T, 2 outputs): the means, then the scales before softplus."""
        # √D as for token embeddings in Vaswani et al. (2017), section 3.4. Without it a value is drowned by its
        # position, and a function that varies fast in the value is never found.
        values = math.sqrt(self.encoder.dim) * self.embedding(inputs)
        return self.projection(self.encoder(values))


class _OfTokens(nn.Module):
    """Token numbers in, the logits of C classes out."""

    def __init__(self, encoder: Encoder, vocabulary: int, classes: int) -> None:
        super().__init__()
        check_positive(vocabulary=vocabulary, classes=classes)
        self.embedding, self.encoder = Embedding(vocabulary, encoder.dim), encoder
        self.projection = Linear(encoder.dim, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """From (B, T) to logits. `attention_mask` (B, T) is 0 at padding."""
        x = self.encoder(self.embedding(input_ids), attention_mask)
        return self.projection(self.read(x, attention_mask))

    def read(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """(B, ..., D): the states that the logits are computed from."""
        raise NotImplementedError


class Tagger(_OfTokens):
    """Logits (B, T, C) of every token; those at padding mean nothing."""

    def read(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:  # noqa: ARG002
        """(B, T, D): every position by itself."""
        return x


class SequenceClassifier(_OfTokens):
    """Logits (B, C) of a sequence, from the mean over its tokens."""

    def read(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """(B, D): one state per sequence, the mean over its valid positions."""
        return mean_over(x, attention_mask)


def mean_over(x: Tensor, valid: Tensor | None) -> Tensor:
    """(B, D): the mean over valid positions; 0 where a sequence has none."""
    if valid is None:
        return x.mean(-2)
    kept = valid.bool().unsqueeze(-1)
    return x.masked_fill(~kept, 0.0).sum(-2) / kept.sum(-2).clamp_min(1)
