"""The diagonal of the curvature: Σ over examples and columns of the squared gradient of every weight.

A weight shared by tokens has one gradient per example, the sum over its tokens; squares are taken after that sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayesformer.core.slices import cache_sized_slices
from bayesformer.jacobians.site_groups import SiteGroup, site_groups
from bayesformer.laplace.passes import BatchPass, CurvaturePiece, Sweep
from bayesformer.laplace.structures import DiagonalCurvature

SHORT = 2**12  # numbers up to which a parameter is squared together with other short ones

Key = tuple[str, int, int]
"""A group: its parameter and stretch."""


def fit(sweep: Sweep) -> list[CurvaturePiece]:
    """The diagonal of the curvature from one pass over the data, one piece per parameter."""
    totals = {name: sweep.zeros(sweep.size(name)) for name in sweep.names}
    short: dict[tuple[Key, ...], Tensor] = {}
    used = Used()

    def add(step: BatchPass) -> None:
        groups = site_groups(step.sites)
        few = [f for f in groups if f.kind == "other" and f.size <= SHORT]
        rest = [f for f in groups if f.kind != "other" or f.size > SHORT]
        keys = tuple(f.key for f in few)
        for gradients in step.gradients():
            for group in rest:
                totals[group.name][group.stretch] += squares(group, group.pick(gradients), used)
            if few:  # biases and gains in one go: alone, each costs more in calls than in sums
                rows = torch.cat([f.per_example(f.pick(gradients)).flatten(0, 1) for f in few], 1)
                found = rows.square_().sum(0)
                short[keys] = short[keys] + found if keys in short else found

    sweep.each(add)
    for keys, found in short.items():
        for (name, start, stop), part in zip(keys, found.split([b - a for _, a, b in keys]), strict=True):
            totals[name][start:stop] += part
    return [CurvaturePiece((name,), sweep.place([name]), DiagonalCurvature(total)) for name, total in totals.items()]


class Used:
    """Positions at which gradients are not 0: after the last attention of a model read out at one position, only one.

    Looked for anew each time, until all positions of a group are seen to be used.
    """

    def __init__(self) -> None:
        self.all: set[Key] = set()

    def __call__(self, key: Key, g: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """g (S, B, R, out) and a (B, R, in) at those positions."""
        if a.shape[1] == 1 or key in self.all:
            return g, a
        if bool((g[0, 0] != 0).any(1).all()):  # one example is enough to see that all are used
            self.all.add(key)
            return g, a
        where = g.flatten(0, 1).any(2).any(0).nonzero().flatten()
        if len(where) == a.shape[1]:
            self.all.add(key)
            return g, a
        return g[:, :, where], a[:, where]


def squares(group: SiteGroup, gradients: list[Tensor], used: Used | None = None) -> Tensor:
    """(size of the stretch,): squared gradients of examples, summed over columns and examples.

    The stretch is the group's range in the flat parameter. An example's gradient is summed over its positions first.
    """
    if group.kind == "linear":
        g, a = group.gradient(gradients, "linear"), group.inputs()
        found = linear_squares(*(used(group.key, g, a) if used is not None else (g, a)))
        return (found.mT if group.sites[0].turned else found).flatten()  # type: ignore[attr-defined]
    if group.kind == "embedding":
        return _embedding_squares(group, gradients).flatten()
    if group.kind == "tied":
        return _tied_squares(group, gradients).flatten()
    return _naive_squares(group, gradients)


def linear_squares(g: Tensor, a: Tensor) -> Tensor:
    """(out, in): Σ (Σ_r g_r a_rᵀ)² for g (S, B, R, out) and a (B, R, in)."""
    if a.shape[1] == 1:  # the square of an outer product is the outer product of squares
        return g.square().sum(0).squeeze(1).mT @ a.square().squeeze(1)
    total: Tensor | None = None
    for column in g:
        for some in cache_sized_slices(len(a), g.shape[-1] * a.shape[-1]):
            found = torch.bmm(column[some].mT, a[some]).square_().sum(0)
            total = found if total is None else total.add_(found)
    assert total is not None
    return total


def _embedding_squares(group: SiteGroup, gradients: list[Tensor]) -> Tensor:
    g, pairs, rows = _by_token(group, gradients)
    table = g.new_zeros(_table(group))
    return table.index_add_(0, rows, g.square().sum(0)) if len(pairs) else table


def _by_token(group: SiteGroup, gradients: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (S, U, D) of the U different (example, token) pairs; the pairs' examples and tokens."""
    tokens, g = group.tokens(), group.gradient(gradients, "embedding")
    vocabulary = _table(group)[0]
    numbers = tokens + vocabulary * torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
    pairs, inverse = numbers.flatten().unique(return_inverse=True)
    sums = g.new_zeros(len(g), len(pairs), g.shape[-1]).index_add_(1, inverse, g.flatten(1, 2))
    return sums, pairs // vocabulary, pairs % vocabulary


def _tied_squares(group: SiteGroup, gradients: list[Tensor]) -> Tensor:
    """(E + H)² = E² + H² + 2 E H: a table looked up (E) that is also a matrix (H). E is 0 but for a few rows."""
    g, a = group.gradient(gradients, "linear"), group.inputs()
    looked_up, examples, rows = _by_token(group, gradients)
    total = linear_squares(g, a)
    total.index_add_(0, rows, looked_up.square().sum(0))
    for some in cache_sized_slices(len(rows), a[0].numel()):
        n, v = examples[some], rows[some]
        matrix_rows = (g[:, n, :, v].movedim(1, 0).unsqueeze(2) @ a[n]).squeeze(2)  # (S, U, D): rows v of H
        total.index_add_(0, v, 2 * (matrix_rows * looked_up[:, some]).sum(0))
    return total


def _naive_squares(group: SiteGroup, gradients: list[Tensor]) -> Tensor:
    total = gradients[0].new_zeros(group.size)
    for some in cache_sized_slices(gradients[0].shape[1], len(gradients[0]) * group.size):
        total += group.per_example(gradients, some).square().sum((0, 1))
    return total


def _table(group: SiteGroup) -> torch.Size:
    return group.sites[0].part.shape
