"""The curvature in full, for all weights, for the weights of each layer, or for a few chosen ones."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from bayesformer.jacobians.site_groups import SiteGroup, site_groups
from bayesformer.laplace.passes import BatchPass, CurvaturePiece, Sweep
from bayesformer.laplace.structures import CurvatureBlock, DenseCurvature


def full(sweep: Sweep) -> list[CurvaturePiece]:
    """One block (p, p) over all parameters followed."""
    return _fit(sweep, [sweep.names])


def blocks(sweep: Sweep) -> list[CurvaturePiece]:
    """A block per module: a weight with its bias."""
    return _fit(sweep, [list(names) for _, names in groupby(sweep.names, lambda name: name.rpartition(".")[0])])


def subnetwork(sweep: Sweep, index: Tensor) -> list[CurvaturePiece]:
    """One dense block (k, k) over the k weights at `index`, int64 places in θ (P,) of the inferred weights."""
    inverse = {name: _inside(index, sweep.place([name])) for name in sweep.names}
    matrix = sweep.zeros(len(index), len(index))

    def add(step: BatchPass) -> None:
        rows_of = ExampleRows(step, sweep)
        for gradients in step.gradients():
            parts = [
                (where, rows_of([name], gradients)[:, inside])
                for name, (where, inside) in inverse.items()
                if len(where)
            ]
            rows = matrix.new_zeros(len(parts[0][1]), len(index))
            for where, values in parts:
                rows[:, where] = values
            matrix.addmm_(rows.mT, rows)

    sweep.each(add)
    names = tuple(name for name, (where, _) in inverse.items() if len(where))
    return [CurvaturePiece(names, index, DenseCurvature(matrix))]


def largest_variance(diagonal: list[CurvaturePiece] | list[tuple[slice | Tensor, CurvatureBlock]], size: int) -> Tensor:
    """The places of the `size` weights with the smallest diagonal curvature, in order.

    With one prior precision for all weights these have the largest variance in a diagonal Laplace posterior
    (Daxberger et al. 2021, subnetwork inference).
    """
    places, values = [], []
    for piece in diagonal:
        place, structure = (piece.place, piece.structure) if isinstance(piece, CurvaturePiece) else piece
        at = torch.arange(place.start, place.stop, device="cpu") if isinstance(place, slice) else place
        places.append(at)
        values.append(structure.diagonal())
    order = torch.cat(values).argsort(stable=True)[:size].cpu()
    return torch.cat(places)[order].sort().values


def _inside(index: Tensor, place: slice | Tensor) -> tuple[Tensor, Tensor]:
    """Which entries of `index` lie in a parameter, and where in it."""
    assert isinstance(place, slice)
    where = ((index >= place.start) & (index < place.stop)).nonzero().flatten()
    return where, index[where] - place.start


def _fit(sweep: Sweep, groups: list[list[str]]) -> list[CurvaturePiece]:
    sizes = [sum(sweep.size(name) for name in names) for names in groups]
    matrices = [sweep.zeros(size, size) for size in sizes]

    def add(step: BatchPass) -> None:
        rows_of = ExampleRows(step, sweep)
        for gradients in step.gradients():
            for names, matrix in zip(groups, matrices, strict=True):
                rows = rows_of(names, gradients)
                matrix.addmm_(rows.mT, rows)

    sweep.each(add)
    return [
        CurvaturePiece(tuple(names), sweep.place(names), DenseCurvature(matrix))
        for names, matrix in zip(groups, matrices, strict=True)
    ]


class ExampleRows:
    """Rows of Sᵀ J of a minibatch: for S columns and B examples, the gradient in some parameters side by side."""

    def __init__(self, step: BatchPass, sweep: Sweep) -> None:
        self.sweep, self.examples = sweep, len(step.outputs)
        self.groups: dict[str, list[SiteGroup]] = {}
        for group in site_groups(step.sites):
            self.groups.setdefault(group.name, []).append(group)

    def __call__(self, names: list[str], gradients: list[Tensor]) -> Tensor:
        """(S · B, p): a row per column of S and example, for the p weights of `names` in that order."""
        return torch.cat([self._one(name, gradients) for name in names], 1)

    def _one(self, name: str, gradients: list[Tensor]) -> Tensor:
        own = self.groups.get(name, [])
        size = self.sweep.size(name)
        if len(own) == 1 and own[0].stretch == slice(0, size):
            return own[0].per_example(own[0].pick(gradients)).flatten(0, 1)
        rows = self.sweep.zeros(len(gradients[0]) * self.examples, size)
        for group in own:
            rows[:, group.stretch] = group.per_example(group.pick(gradients)).flatten(0, 1)
        return rows
