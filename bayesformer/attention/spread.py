"""How wide a family's law is: a learned number, or one that depends on the data ("DD").

A spread is a positive number per entry of the logits, for the standard deviation of Gaussian logits, or per row, for
the sharpness of a Dirichlet. It sees a row's visible logits and nothing else. On a graph a row's number stands at
each of its edges.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesformer.attention.edges import Edges, Visible
from bayesformer.attention.multi_head import Linear
from bayesformer.attention.ranges import check_above_zero, check_positive
from bayesformer.attention.rows import masked_log_softmax


class LogitSpread(nn.Module):
    """`spread(logits, mask)`: positive, broadcasting to (B, H, T, S), or to (B, H, T, 1) if `per_row`."""

    def __init__(self, start: float, per_row: bool) -> None:
        super().__init__()
        check_above_zero(start=start)
        self.start, self.per_row = start, per_row

    def extra_repr(self) -> str:
        """The value at the start and whether keys of a row share it, for printing."""
        return f"start={self.start:g}, per_row={self.per_row}"


class Learned(LogitSpread):
    """A learned number per head, or with `length` per position: (H, T, S), or (H, T, 1) if `per_row`.

    Args:
        start: its value at the start.
        heads: H; 1 shares it among heads.
        length: longest sequence, for a number per position; None for one number per head and any length.
        per_row: whether keys share it.
    """

    def __init__(self, start: float, heads: int = 1, length: int | None = None, per_row: bool = False) -> None:
        super().__init__(start, per_row)
        check_positive(heads=heads, length=1 if length is None else length)
        self.heads, self.length = heads, length
        rows = 1 if length is None else length
        self.rho = nn.Parameter(torch.empty(heads, rows, 1 if per_row else rows))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set ρ so that the spread is `start` everywhere."""
        nn.init.constant_(self.rho, inverse_softplus(self.start))

    def forward(self, logits: Tensor, mask: Visible) -> Tensor:
        """softplus(ρ) at the positions there are."""
        rho: Tensor = self.rho
        if self.length is not None:
            _check_length(self.length, mask, *logits.shape[-2:])
            rho = rho[:, : logits.shape[-2], : logits.shape[-1]]
        return F.softplus(rho.to(logits.dtype))


class DataDependent(LogitSpread):
    """softplus of a network with one hidden layer, the same for every row, so that any length will do.

    Per row it sees what makes attention sure or unsure: the entropy of its softmax, its largest log weight, and the
    logarithm of the number of keys; per entry also the entry's own log weight. Cinquin et al. (2021) feed the row
    itself to the network, whose width then is the one length it can take: that is `RowNetwork`.
    """

    def __init__(self, start: float, hidden: int = 16, per_row: bool = False) -> None:
        super().__init__(start, per_row)
        check_positive(hidden=hidden)
        self.hidden = hidden
        self.row, self.out = Linear(3, hidden), Out(hidden, 1, start)
        self.entry = None if per_row else Linear(1, hidden, bias=False)

    def forward(self, logits: Tensor, mask: Visible) -> Tensor:
        """(B, H, T, S), or (B, H, T, 1)."""
        if isinstance(mask, Edges):
            return self._along(logits, mask)
        log_m = masked_log_softmax(logits, ~mask)
        dtype = self.out.weight.dtype
        inner = self.row(row_features(log_m, mask).to(dtype))  # (B, H, T, hidden)
        if self.entry is not None:
            own = log_m.masked_fill(~mask, 0.0).unsqueeze(-1).to(dtype)
            inner = inner.unsqueeze(-2) + self.entry(own)  # (B, H, T, S, hidden)
        raw = self.out(F.relu(inner)).to(logits.dtype)
        return F.softplus(raw if self.per_row else raw.squeeze(-1))

    def _along(self, logits: Tensor, edges: Edges) -> Tensor:
        """(B, H, 1, E): the same on a graph, from the edges into each node."""
        log_m, dtype = edges.log_softmax(logits), self.out.weight.dtype
        inner = self.row(node_features(log_m, edges).to(dtype))[..., edges.target, :]  # (B, H, 1, E, hidden)
        if self.entry is not None:
            inner = inner + self.entry(log_m.unsqueeze(-1).to(dtype))
        return F.softplus(self.out(F.relu(inner)).to(logits.dtype).squeeze(-1))


class RowNetwork(LogitSpread):
    """softplus of a network fed the whole row of masked logits, for rows up to `length` keys. Cinquin et al. (2021)."""

    def __init__(self, start: float, length: int, hidden: int = 16, per_row: bool = False) -> None:
        super().__init__(start, per_row)
        check_positive(length=length, hidden=hidden)
        self.length, self.hidden = length, hidden
        self.inner, self.out = Linear(length, hidden), Out(hidden, 1 if per_row else length, start)

    def forward(self, logits: Tensor, mask: Visible) -> Tensor:
        """(B, H, T, S), or (B, H, T, 1)."""
        keys = logits.shape[-1]
        _check_length(self.length, mask, keys)
        assert isinstance(mask, Tensor)
        row = F.pad(logits.masked_fill(~mask, 0.0), (0, self.length - keys))
        raw = self.out(F.relu(self.inner(row.to(self.inner.weight.dtype)))).to(logits.dtype)
        return F.softplus(raw if self.per_row else raw[..., :keys])


class Out(Linear):
    """The last map of a spread's network: at the start a constant, `start` after softplus."""

    def __init__(self, inputs: int, outputs: int, start: float) -> None:
        self.start = start
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        """Zero weights: training decides what the spread depends on."""
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, inverse_softplus(self.start))


def row_features(log_m: Tensor, mask: Tensor) -> Tensor:
    """(B, H, T, 3): entropy and largest log weight of each row, and log of its number of keys; 0 without keys."""
    count = mask.expand_as(log_m).sum(-1, dtype=log_m.dtype)
    shown = log_m.masked_fill(~mask, 0.0)
    entropy = -(shown.exp() * shown).sum(-1)
    largest = log_m.amax(-1).masked_fill(count == 0, 0.0)
    return torch.stack([entropy, largest, count.clamp_min(1).log()], -1)


def node_features(log_m: Tensor, edges: Edges) -> Tensor:
    """(B, H, 1, N, 3): the same of the edges into each node."""
    count = edges.sum(torch.ones_like(log_m))
    entropy = -edges.sum(log_m.exp() * log_m)
    largest = edges.largest(log_m).masked_fill(count == 0, 0.0)
    return torch.stack([entropy, largest, count.clamp_min(1).log()], -1)


def inverse_softplus(value: float) -> float:
    """The number ρ with softplus(ρ) = log(1 + e^ρ) = value, for a value above 0."""
    return value + math.log(-math.expm1(-value))


def _check_length(length: int, mask: Visible, *sizes: int) -> None:
    if isinstance(mask, Edges):
        raise ValueError(f"length must be None on a graph, whose edges have no position; got {length}.")
    if max(sizes) > length:
        raise ValueError(f"a spread of length={length} must see no longer sequence; got {max(sizes)} positions.")
