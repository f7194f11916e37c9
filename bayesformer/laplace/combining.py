"""An earlier Gaussian over θ and the curvature of new data, block by block, where their blocks need not be the same.

Diagonal blocks of the earlier law, and diagonal pieces of curvature, are cut as the others need it. Of the rest,

    one piece over the weights of one block                     added by `absorb`
    pieces inside a block                                       added if all are diagonal, or the block is dense
    a dense piece over whole blocks of up to 4096 weights       written out as one dense block

and anything else is refused. Weights about which the new data say nothing keep their block; weights without spread get
none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bayesformer.core.slices import as_slice
from bayesformer.laplace.absorb import absorb, dense_of
from bayesformer.laplace.estimate import Curvature
from bayesformer.laplace.structures import CurvatureBlock, DenseCurvature, DiagonalCurvature
from bayesformer.laws import Block, Dense, Diagonal, GaussianLaw

WRITTEN_OUT = 4096  # weights up to which blocks of different forms are added as dense matrices

NOBODY, DIAGONAL = -2, -1  # owners of weights without spread, and of those in diagonal blocks, which may be cut

PlacedWeights = tuple[Tensor, Block]
"""Where the weights of a block lie in θ, (p,) int64, and the block."""

Piece = tuple[Tensor, CurvatureBlock]
"""Where the weights of a piece of curvature lie in θ, (p,) int64, and the curvature."""


def combine(old: GaussianLaw, found: Curvature, scale: float, num_old: int) -> GaussianLaw:
    """The law of precision P_old + h H_new, with the mean and buffers of the old one."""
    return _Combination(old, found, scale, num_old).law()


class _Combination:
    """One call of `combine`: the old blocks, the pieces of curvature at weights with spread, and which of them meet."""

    def __init__(self, old: GaussianLaw, found: Curvature, scale: float, num_old: int) -> None:
        self.old, self.scale = old, scale
        self.counts = {"num_old": num_old, "num_new": found.num_data}
        self.variance = old.variance()
        everywhere = torch.arange(old.size, device=old.mean.device)
        self.blocks = [(everywhere[place], block) for place, block in zip(old.places, old.blocks, strict=True)]
        self.owner = torch.full_like(everywhere, NOBODY)  # the number of each weight's block
        for number, (where, block) in enumerate(self.blocks):
            self.owner[where] = DIAGONAL if isinstance(block, Diagonal) else number
        self.pieces = [
            piece
            for place, structure in zip(found.places, found.structures, strict=True)
            for piece in self._cut(everywhere[_on(place, everywhere)], structure)
        ]

    def law(self) -> GaussianLaw:
        """The combined law, its blocks in the order of θ."""
        found: list[PlacedWeights] = []
        left = self.owner == DIAGONAL  # weights of diagonal blocks that no piece is about
        inside: dict[int, list[Piece]] = defaultdict(list)
        spanned: set[int] = set()
        for where, structure in self.pieces:
            owners = self.owner[where].unique().tolist()
            left[where] = False
            if owners == [DIAGONAL]:
                found.append((where, self._absorbed(Diagonal(self.variance[where]), structure)))
            elif len(owners) == 1:
                inside[owners[0]].append((where, structure))
            else:
                found.append((where, self._spanning(where, structure)))
                spanned |= set(owners)
        for number, (where, block) in enumerate(self.blocks):
            if number in spanned and number in inside:
                raise self._refusal(block, inside[number][0][1])
            if not isinstance(block, Diagonal) and number not in spanned:
                found.append((where, self._with_pieces(where, block, inside[number])))
        rest = left.nonzero().flatten()
        if len(rest):
            found.append((rest, Diagonal(self.variance[rest])))
        found.sort(key=lambda item: int(item[0][0]))
        places = tuple(as_slice(where) for where, _ in found)
        return GaussianLaw(self.old.mean, places, tuple(block for _, block in found), self.old.buffers)

    def _cut(self, where: Tensor, structure: CurvatureBlock) -> Iterator[Piece]:
        """A piece of curvature at the weights that have spread; a diagonal one by the blocks that it meets."""
        owner = self.owner[where]
        if isinstance(structure, DiagonalCurvature):
            for number in owner.unique().tolist():
                if number != NOBODY:
                    yield where[owner == number], DiagonalCurvature(structure.values[owner == number])
            return
        kept = owner != NOBODY
        if bool(kept.all()):
            yield where, structure
        elif bool(kept.any()) and isinstance(structure, DenseCurvature):
            yield where[kept], DenseCurvature(structure.matrix[kept][:, kept])
        elif bool(kept.any()):
            raise ValueError(
                f"prior must have spread in all weights of a {_name(structure)} block of the new curvature, or in "
                f"none; it has in {int(kept.sum())} of {len(where)}. Use structure='diag', or that of the prior."
            )

    def _with_pieces(self, where: Tensor, block: Block, pieces: Sequence[Piece]) -> Block:
        """An old block with the pieces of curvature that lie inside it, which may be none."""
        if not pieces:
            return block
        if len(pieces) == 1 and torch.equal(pieces[0][0], where):
            return self._absorbed(block, pieces[0][1])
        position = self._positions(where)
        if all(isinstance(structure, DiagonalCurvature) for _, structure in pieces):
            values = self.variance.new_zeros(len(where))
            for place, structure in pieces:
                values[position[place]] = structure.diagonal().to(values)
            return self._absorbed(block, DiagonalCurvature(values))
        if isinstance(block, Dense):
            matrix = self.variance.new_zeros(len(where), len(where))
            for place, structure in pieces:
                rows = position[place]
                matrix[rows.unsqueeze(1), rows] = structure.dense().to(matrix)
            return self._absorbed(block, DenseCurvature(matrix))
        raise self._refusal(block, pieces[0][1])

    def _spanning(self, where: Tensor, structure: CurvatureBlock) -> Block:
        """A dense piece of curvature over several old blocks, those that are not diagonal whole: written out."""
        others = [self.blocks[number] for number in self.owner[where].unique().tolist() if number >= 0]
        position = self._positions(where)
        whole = all(bool((position[own] >= 0).all()) for own, _ in others)
        if not whole or not isinstance(structure, DenseCurvature) or len(where) > WRITTEN_OUT:
            raise self._refusal(others[0][1], structure)
        diagonal = torch.where(self.owner[where] == DIAGONAL, self.variance[where].reciprocal(), 0.0)
        precision = diagonal.diag()
        for own, block in others:
            rows = position[own]
            eye = torch.eye(len(own), dtype=precision.dtype, device=precision.device)
            precision[rows.unsqueeze(1), rows] = block.precision_times(eye)
        return dense_of(precision, structure, self.scale)

    def _positions(self, where: Tensor) -> Tensor:
        """(P,): where each weight stands in `where`, -1 for those that are not in it."""
        position = torch.full_like(self.owner, -1)
        position[where] = torch.arange(len(where), device=where.device)
        return position

    def _absorbed(self, block: Block, structure: CurvatureBlock) -> Block:
        try:
            return absorb(block, structure, self.scale, **self.counts)
        except ValueError as error:
            raise self._refusal(block, structure) from error

    def _refusal(self, block: Block, structure: CurvatureBlock) -> ValueError:
        return ValueError(
            f"prior must have blocks that the new curvature can be added to; a {type(block).__name__} block of "
            f"{block.size} weights and a {_name(structure)} curvature of {structure.size} weights have no sum of a "
            "known form. Use the structure that the prior was made with, or structure='diag' for a diagonal prior."
        )


def _on(place: slice | Tensor, like: Tensor) -> slice | Tensor:
    return place.to(like.device) if isinstance(place, Tensor) else place


def _name(structure: CurvatureBlock) -> str:
    return type(structure).__name__.removesuffix("Curvature")
