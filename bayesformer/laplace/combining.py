"""An earlier Gaussian over θ and the curvature of new data, block by block, where their blocks need not be the same.

A diagonal block of the earlier law is cut as the new curvature needs it. Any other block is met by one piece of
curvature over the same weights, by diagonal pieces inside it, or, if one of the two is dense, by whatever has few
enough weights to be written out. Weights about which the new data say nothing keep their block; weights without spread
keep none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bayesformer.laplace.absorb import absorb, dense_of
from bayesformer.laplace.estimate import Curvature
from bayesformer.laplace.structures import CurvatureBlock, DenseCurvature, DiagonalCurvature
from bayesformer.laws import Block, Dense, Diagonal, GaussianLaw

WRITTEN_OUT = 4096  # weights up to which blocks of different forms are added as dense matrices

Placed = tuple[Tensor, Block]
"""A block and where its weights lie in θ, (p,) int64."""


def combine(old: GaussianLaw, found: Curvature, scale: float, num_old: int) -> GaussianLaw:
    """The law of precision P_old + h H_new, with the mean and buffers of the old one."""
    return _Combination(old, found, scale, num_old).law()


class _Combination:
    """One call of `combine`: what meets what, and the blocks that come of it."""

    def __init__(self, old: GaussianLaw, found: Curvature, scale: float, num_old: int) -> None:
        self.old, self.scale = old, scale
        self.counts = {"num_old": num_old, "num_new": found.num_data}
        everywhere = torch.arange(old.size, device=old.mean.device)
        self.blocks = [(everywhere[place], block) for place, block in zip(old.places, old.blocks, strict=True)]
        self.owner = torch.full((old.size,), -1, device=old.mean.device)
        for number, (where, _) in enumerate(self.blocks):
            self.owner[where] = number
        self.pieces = [
            piece
            for place, structure in zip(found.places, found.structures, strict=True)
            if (piece := self._with_spread(everywhere[_on(place, everywhere)], structure)) is not None
        ]

    def law(self) -> GaussianLaw:
        """The combined law, its blocks in the order of θ."""
        placed = [*self._over_diagonals(), *self._over_others()]
        placed.sort(key=lambda item: int(item[0][0]))
        places = tuple(compact(where) for where, _ in placed)
        return GaussianLaw(self.old.mean, places, tuple(block for _, block in placed), self.old.buffers)

    def _with_spread(self, where: Tensor, structure: CurvatureBlock) -> tuple[Tensor, CurvatureBlock] | None:
        """A piece of curvature at the weights that have spread; None if it has none of them."""
        kept = self.owner[where] >= 0
        if bool(kept.all()):
            return where, structure
        if not bool(kept.any()):
            return None
        if isinstance(structure, DiagonalCurvature):
            return where[kept], DiagonalCurvature(structure.values[kept])
        if isinstance(structure, DenseCurvature):
            return where[kept], DenseCurvature(structure.matrix[kept][:, kept])
        raise ValueError(
            f"prior must have spread in all weights of a {_name(structure)} block of the new curvature, or in none; "
            f"it has in {int(kept.sum())} of {len(where)}. Use structure='diag', or the structure of the prior."
        )

    def _over_diagonals(self) -> list[Placed]:
        """Pieces of curvature whose weights have diagonal old blocks, and what of these no piece is about."""
        diagonal = [number for number, (_, block) in enumerate(self.blocks) if isinstance(block, Diagonal)]
        is_diagonal = torch.isin(self.owner, torch.tensor(diagonal, device=self.owner.device, dtype=self.owner.dtype))
        variance, rest = self.old.variance(), is_diagonal.clone()
        found: list[Placed] = []
        for where, structure in self.pieces:
            if bool(is_diagonal[where].all()):
                found.append((where, self._absorbed(Diagonal(variance[where]), structure)))
                rest[where] = False
            elif bool(is_diagonal[where].any()) and not isinstance(structure, DiagonalCurvature):
                found.append(self._written_out(where, structure))
                rest[where] = False
        left = rest.nonzero().flatten()
        return [*found, (left, Diagonal(variance[left]))] if len(left) else found

    def _over_others(self) -> list[Placed]:
        """Old blocks that are not diagonal, each with the pieces of curvature that meet it."""
        found: list[Placed] = []
        done: set[int] = set()
        for number, (where, block) in enumerate(self.blocks):
            if isinstance(block, Diagonal):
                continue
            met = [piece for piece in self.pieces if bool((self.owner[piece[0]] == number).any())]
            outer = [piece for piece in met if bool((self.owner[piece[0]] != number).any())]
            if outer:  # one piece over several old blocks
                for piece in outer:
                    mixed = bool(torch.isin(self.owner[piece[0]], self._diagonal_numbers()).any())
                    if id(piece[0]) not in done and not mixed:
                        found.append(self._written_out(*piece))
                        done.add(id(piece[0]))
            elif not met:
                found.append((where, block))
            else:
                found.append((where, self._met(where, block, met)))
        return found

    def _diagonal_numbers(self) -> Tensor:
        numbers = [number for number, (_, block) in enumerate(self.blocks) if isinstance(block, Diagonal)]
        return torch.tensor(numbers, device=self.owner.device, dtype=self.owner.dtype)

    def _met(self, where: Tensor, block: Block, met: Sequence[tuple[Tensor, CurvatureBlock]]) -> Block:
        """An old block with the pieces of curvature inside it."""
        if len(met) == 1 and torch.equal(met[0][0], where):
            return self._absorbed(block, met[0][1])
        position = torch.full_like(self.owner, -1)
        position[where] = torch.arange(len(where), device=where.device)
        if all(isinstance(structure, DiagonalCurvature) for _, structure in met):
            values = torch.zeros(len(where), dtype=self.old.mean.dtype, device=where.device)
            for place, structure in met:
                values[position[place]] = structure.diagonal().to(values)
            return self._absorbed(block, DiagonalCurvature(values))
        if isinstance(block, Dense):
            matrix = torch.zeros(len(where), len(where), dtype=self.old.mean.dtype, device=where.device)
            for place, structure in met:
                inside = position[place]
                matrix[inside.unsqueeze(1), inside] = structure.dense().to(matrix)
            return self._absorbed(block, DenseCurvature(matrix))
        raise self._refusal(block, met[0][1])

    def _written_out(self, where: Tensor, structure: CurvatureBlock) -> Placed:
        """A dense piece of curvature over several old blocks, which all lie inside it."""
        numbers = self.owner[where].unique().tolist()
        inside = sum(len(self.blocks[number][0]) for number in numbers) == len(where)
        blocks = [self.blocks[number][1] for number in numbers]
        if not inside or not isinstance(structure, DenseCurvature) or len(where) > WRITTEN_OUT:
            other = next((block for block in blocks if not isinstance(block, Diagonal)), blocks[0])
            raise self._refusal(other, structure)
        position = torch.full_like(self.owner, -1)
        position[where] = torch.arange(len(where), device=where.device)
        precision = torch.zeros(len(where), len(where), dtype=self.old.mean.dtype, device=where.device)
        for number in numbers:
            own, block = self.blocks[number]
            eye = torch.eye(len(own), dtype=precision.dtype, device=precision.device)
            precision[position[own].unsqueeze(1), position[own]] = block.precision_times(eye)
        return where, dense_of(precision, structure, self.scale)

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


def compact(where: Tensor) -> slice | Tensor:
    """Places (p,) as a slice where they are neighbours in order."""
    start, stop = int(where[0]), int(where[-1]) + 1
    line = torch.arange(start, stop, device=where.device) if stop - start == len(where) else None
    return slice(start, stop) if line is not None and torch.equal(line, where) else where


def _on(place: slice | Tensor, like: Tensor) -> slice | Tensor:
    return place.to(like.device) if isinstance(place, Tensor) else place


def _name(structure: CurvatureBlock) -> str:
    return type(structure).__name__.removesuffix("Curvature")
