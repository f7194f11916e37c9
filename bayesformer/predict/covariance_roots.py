"""From a Gaussian over weights and the Jacobian of some outputs to roots W of their covariance: V = Σ W Wᵀ.

The Jacobian J comes one site at a time, as slopes g (C, B, ...) of C outputs of each of B examples in the site's own
output. A block Σ of the covariance is applied there and then, so that no more than one layer's share is ever in memory,
except for blocks that span several parameters. What is computed depends on the site and the block:

    site         block                    root of an example, (C, q)                                    function
    linear       diagonal                 Σ_r g_r a_rᵀ, times the standard deviations                   matrix_roots
    linear       Kronecker, complete      the same in the eigenbases of both factors, times D^-½        matrix_roots
    linear       any other                rows of Σ_r g_r a_rᵀ times a root of Σ                        matrix_roots
    embedding    diagonal, or Kronecker   slopes summed by token, times the standard deviations there   table_roots
                 with a diagonal first factor
    element      diagonal or dense, few   rows of all such parameters joined, or stacked, first         short_roots
    any          any                      rows of J times a root of Σ                                   row_roots
    several      any                      rows of J summed over the sites, then the same                _rows
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bayesformer.core.slices import as_slice, cache_sized_slices
from bayesformer.jacobians.sites import ElementSite, EmbeddingSite, LinearSite, Site
from bayesformer.laws import Block, Dense, Deviations, Diagonal, GaussianLaw, KroneckerBasis, Law
from bayesformer.model.space import Space

SHORT = 256  # numbers of a vector that is handled together with others
SIMPLE = Diagonal | Dense

Uses: TypeAlias = dict[str, list[tuple[Site, Tensor]]]
"""The sites of each parameter in a pass, with the slopes there."""

Roots: TypeAlias = Iterator[tuple[slice, Tensor]]
"""Some examples, and J times a root of Σ for them, (b, C, q): the Gram matrices of these are J Σ Jᵀ."""


def site_roots(site: Site, slopes: Tensor, block: Block, joint: bool = False) -> Roots:
    """From `slopes` (C, B, ...) in a site's output, by the kind of the site.

    `joint` keeps roots comparable between examples: the rows of a table that occur are not the same ones in each.
    """
    if isinstance(site, LinearSite):
        return matrix_roots(site, slopes, block, joint)
    if isinstance(site, EmbeddingSite) and not joint:
        return table_roots(site, slopes, block)
    return row_roots(site, slopes, block, joint)


class _Scaling(NamedTuple):
    """A block over a matrix (out, in) whose root is a product entry by entry, after a change of basis."""

    scale: Tensor  # (out, in), standard deviations
    out_basis: Tensor | None = None  # (out, out)
    in_basis: Tensor | None = None  # (in, in)


def _scaling(site: LinearSite, block: Block, shape: tuple[int, int]) -> _Scaling | None:
    """The block in that form, in the orientation of the site's product; None if it has no such form."""
    if isinstance(block, Diagonal):
        sd = block.sd
        return _Scaling(sd.view(shape[::-1]).mT if site.turned else sd.view(shape))
    if isinstance(block, KroneckerBasis) and block.complete:
        scale = block.scales
        if site.turned:
            return _Scaling(scale.mT, block.in_vectors, block.out_vectors)
        return _Scaling(scale, block.out_vectors, block.in_vectors)
    return None


def matrix_roots(site: LinearSite, slopes: Tensor, block: Block, joint: bool) -> Roots:
    """Of a weight used at R positions, from G = Σ_r g_r a_rᵀ."""
    inputs, out = site.inputs, slopes.shape[-1]
    width = block.size + slopes[0, 0].numel()  # a product and its rows
    form = _scaling(site, block, (out, inputs.shape[-1]))
    if form is None:
        for some in _slices(slopes, width, joint):
            matrices = _products(slopes[:, some], inputs[some])
            yield some, block.times_root((matrices.mT if site.turned else matrices).flatten(-2))
        return
    inputs = inputs if form.in_basis is None else inputs @ form.in_basis
    products, scale = _products, form.scale
    if form.out_basis is not None and slopes.shape[2] > inputs.shape[-1]:
        # More positions than inputs: there are fewer rows to change the basis of after the sum over positions.
        products, scale = _products_by_inputs, scale.mT.contiguous()
    for some in _slices(slopes, width, joint):
        yield some, products(slopes[:, some], inputs[some], form.out_basis).mul_(scale).flatten(-2)


def _products(slopes: Tensor, inputs: Tensor, basis: Tensor | None = None) -> Tensor:
    """(C, b, R, out), (b, R, in) -> (b, C, out, in): Σ_r g_r a_rᵀ, the slopes in another basis (out, out) first."""
    columns, batch, positions, out = slopes.shape
    if positions == 1:  # an outer product, not a matrix product of inner size 1
        rows = slopes.squeeze(2).transpose(0, 1)
        return (rows if basis is None else rows @ basis).unsqueeze(-1) * inputs.unsqueeze(1)
    rows = slopes.permute(1, 2, 0, 3).reshape(-1, out)  # one copy in long rows; the product needs no other
    rows = rows if basis is None else rows @ basis
    return (rows.view(batch, positions, -1).mT @ inputs).view(batch, columns, out, -1)


def _products_by_inputs(slopes: Tensor, inputs: Tensor, basis: Tensor | None = None) -> Tensor:
    """The same as (b, C, in, out), in the other basis only after the sum."""
    columns, batch, positions, out = slopes.shape
    rows = slopes.permute(1, 2, 0, 3).reshape(batch, positions, -1)
    sums = (inputs.mT @ rows).view(-1, out)
    sums = sums if basis is None else sums @ basis
    return sums.view(batch, -1, columns, out).transpose(1, 2).contiguous()


def table_roots(site: EmbeddingSite, slopes: Tensor, block: Block) -> Roots:
    """Of an embedding table, whose rows are 0 but for the tokens that occur.

    A token that occurs often has its slopes summed where it first occurs; the rest of the table is left out.
    """
    if isinstance(block, Diagonal):
        deviations, basis = block.sd.view(site.part.shape[0], -1), None
    elif isinstance(block, KroneckerBasis) and block.complete and block.out_vectors is None:
        deviations, basis = block.scales, block.in_vectors
    else:
        yield from row_roots(site, slopes, block, joint=False)
        return
    for some in _slices(slopes, slopes[0, 0].numel(), joint=False):
        tokens, own = site.tokens[some], slopes[:, some]  # (b, R), (C, b, R, D)
        same = tokens.unsqueeze(-1) == tokens.unsqueeze(-2)  # (b, R, R)
        first = ~same.tril(-1).any(-1)
        summed = same.to(own) @ (own if basis is None else own @ basis)
        yield some, (summed * (deviations[tokens] * first.unsqueeze(-1))).transpose(0, 1).flatten(-2)


def row_roots(site: Site, slopes: Tensor, block: Block, joint: bool) -> Roots:
    """Of any parameter: every row of J times a root of Σ."""
    for some in _slices(slopes, block.size, joint):
        yield some, block.times_root(site.values(slopes, some).transpose(0, 1))


def short_roots(members: list[tuple[SIMPLE, Tensor]]) -> Roots:
    """Of short vectors (biases, gains) from their rows of J, (C, B, p) each.

    Those of one form are joined, since one by one they cost more in calls than in sums.
    """
    alike: dict[tuple[type, int], list[tuple[Any, Tensor]]] = defaultdict(list)
    for block, rows in members:
        alike[type(block), 0 if isinstance(block, Diagonal) else block.size].append((block, rows))
    for (kind, _), group in alike.items():
        blocks, each = [block for block, _ in group], [rows for _, rows in group]
        if kind is Diagonal:
            root = torch.cat(each, -1) * torch.cat([block.sd for block in blocks])
            yield slice(0, root.shape[1]), root.transpose(0, 1)
        else:
            tril = torch.stack([block.tril for block in blocks])
            found = torch.bmm(torch.stack(each).flatten(1, 2), tril).view(-1, *each[0].shape)  # (n, C, B, p)
            yield slice(0, found.shape[2]), found.permute(2, 1, 0, 3).flatten(2)


class PlacedBlock(NamedTuple):
    """A block and where its weights lie."""

    block: Block
    names: tuple[str, ...]  # the parameters it touches
    columns: slice | Tensor  # (p,): its weights among those of these parameters, one after another
    stretch: slice | None  # in θ, if they lie in one stretch
    whole: bool  # these parameters and nothing else, in their own order
    band: tuple[int, slice] | None = None  # if it is some whole rows (axis 0) or columns (1) of one matrix: which


class CovarianceRoots:
    """The blocks of a Gaussian over weights, ready to meet the sites of a forward pass.

    Diagonal blocks are cut into one per parameter; the deviations of SWAG, which join all weights, are kept apart in
    `factor`, (p, K) for each parameter.
    """

    def __init__(self, space: Space, law: Law) -> None:
        if not isinstance(law, GaussianLaw):
            raise ValueError(
                f"weights must follow a Gaussian to be linearised; got {type(law).__name__}. Use predictive='sampled'."
            )
        self.space, self.places, self.device = space, space.slices, law.mean.device
        self.blocks: list[PlacedBlock] = []
        self.factor: dict[str, Tensor] = {}
        for place, block in zip(law.places, law.blocks, strict=True):
            if isinstance(place, slice) and isinstance(block, Diagonal | Deviations):
                self._by_parameter(place, block)
            else:
                self.blocks.append(self._placed(place, block))

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that have any spread."""
        found = {name for placed in self.blocks for name in placed.names} | set(self.factor)
        return tuple(name for name in self.places if name in found)

    def __call__(self, sites: Sequence[Site], slopes: Sequence[Tensor], joint: bool = False) -> Roots:
        """Roots of all blocks one after another; `slopes` from backpropagation.

        With `joint` all examples come at once, and their roots are those of one covariance over all of them.
        """
        uses: Uses = defaultdict(list)
        for site, slope in zip(sites, slopes, strict=True):
            uses[site.name].append((site, slope))
        short: list[tuple[SIMPLE, Tensor]] = []
        for placed in self.blocks:
            used = [use for name in placed.names for use in uses[name]]
            if not used:
                continue  # a parameter that this pass did not use has a Jacobian of 0
            if (alone := self._alone(placed, used)) is None:
                yield from self._of_several(placed, uses, used[0][1], joint)
                continue
            (site, slope), block = alone, placed.block
            if not joint and isinstance(site, ElementSite) and isinstance(block, SIMPLE) and block.size <= SHORT:
                short.append((block, site.values(slope)))
            else:
                yield from site_roots(site, slope, block, joint)
        yield from short_roots(short)
        yield from self._of_deviations(uses, joint)

    def _alone(self, placed: PlacedBlock, used: Sequence[tuple[Site, Tensor]]) -> tuple[Site, Tensor] | None:
        """The one site where the weights of a block meet the data, with its slopes; None if there is no such site.

        A block over some outputs of a linear layer (the queries of a packed weight) has the slopes of those alone.
        """
        site, slope = used[0]
        if len(used) > 1:
            return None
        if placed.stretch is not None and self.stretch(site) == placed.stretch:
            return site, slope
        if isinstance(site, LinearSite) and site.part.index is None and placed.band is not None:
            axis, lines = placed.band
            if axis == (1 if site.turned else 0):
                return site, slope[..., lines]
        return None

    def stretch(self, site: Site) -> slice | None:
        """Where the weights of a site lie in θ, if in one stretch."""
        ends, start = site.part.ends, self.places[site.name].start
        return None if ends is None else slice(start + ends[0], start + ends[1])

    def _of_several(self, placed: PlacedBlock, uses: Uses, like: Tensor, joint: bool) -> Roots:
        """Of a block that meets several sites, or a part of one: by the rows of J of its parameters."""
        for some in _slices(like, placed.block.size, joint):
            rows = torch.cat([self._rows(name, uses[name], like, some) for name in placed.names], -1)
            columns = placed.columns.to(rows.device) if isinstance(placed.columns, Tensor) else placed.columns
            yield some, placed.block.times_root(rows[..., columns])

    def _of_deviations(self, uses: Uses, joint: bool) -> Roots:
        """Of the deviations that join all weights: J Fᵀ, (b, C, K)."""
        used = [use for name in self.factor for use in uses[name]]
        if used:
            for some in _slices(used[0][1], self.space.size, joint):
                parts = [self._rows(name, uses[name], used[0][1], some) @ f for name, f in self.factor.items()]
                yield some, sum(parts[1:], parts[0])

    def _rows(self, name: str, uses: list[tuple[Site, Tensor]], like: Tensor, some: slice) -> Tensor:
        """(b, C, p): the Jacobian of a parameter for some examples, summed over its uses."""
        if not uses:
            place, few = self.places[name], like[0, some]
            return like.new_zeros(len(few), len(like), place.stop - place.start)
        found = [site.per_example(slope, some) for site, slope in uses]
        rows = [x.reshape(*x.shape[:2], -1) for x in found]
        return sum(rows[1:], rows[0]).transpose(0, 1)

    # Where the blocks lie.

    def _by_parameter(self, place: slice, block: Diagonal | Deviations) -> None:
        """Variances in one stretch of θ, parameter by parameter; what deviations add is kept beside them."""
        variance = block.variance if isinstance(block, Diagonal) else block.sd.square()
        _check_size(place.stop - place.start, block)
        for name, whole in self.places.items():
            start, stop = max(whole.start, place.start), min(whole.stop, place.stop)
            if start >= stop:
                continue
            inner = slice(start - place.start, stop - place.start)
            if bool(variance[inner].any()):
                self.blocks.append(self._placed(slice(start, stop), Diagonal(variance[inner])))
            if isinstance(block, Deviations) and bool(block.factor[:, inner].any()):
                rows = block.factor.new_zeros(len(block.factor), whole.stop - whole.start)
                rows[:, start - whole.start : stop - whole.start] = block.factor[:, inner]
                self.factor[name] = rows.mT

    def _placed(self, place: slice | Tensor, block: Block) -> PlacedBlock:
        size = self.space.size
        every = range(size) if isinstance(place, slice) else torch.arange(size, device="cpu")
        where: Any = every[place if isinstance(place, slice) else place.cpu()]
        _check_size(len(where), block)
        return self._neighbours(where, block) if isinstance(where, range) else self._scattered(where, block)

    def _neighbours(self, where: range, block: Block) -> PlacedBlock:
        """One stretch: nothing as long as the vector of weights is made, which may be a vocabulary's."""
        names = tuple(n for n, s in self.places.items() if s.start < where.stop and where.start < s.stop)
        first, last = self.places[names[0]].start, self.places[names[-1]].stop
        whole = (where.start, where.stop) == (first, last)
        columns = slice(where.start - first, where.stop - first)
        band = self._band(names, columns)
        return PlacedBlock(block, names, columns, slice(where.start, where.stop), whole, band)

    def _scattered(self, where: Tensor, block: Block) -> PlacedBlock:
        names = tuple(n for n, s in self.places.items() if bool(((where >= s.start) & (where < s.stop)).any()))
        columns = torch.cat([torch.arange(self.places[n].start, self.places[n].stop, device="cpu") for n in names])
        position = torch.zeros(self.space.size, dtype=torch.int64, device="cpu")
        position[columns] = torch.arange(len(columns), device="cpu")
        start = int(where[0])
        stretch = torch.equal(where, torch.arange(start, start + len(where), device="cpu"))
        whole = torch.equal(where, columns)
        own, line = position[where], slice(start, start + len(where)) if stretch else None
        return PlacedBlock(block, names, own, line, whole, self._band(names, as_slice(own)))

    def _band(self, names: tuple[str, ...], columns: slice | Tensor) -> tuple[int, slice] | None:
        """The axis of a matrix (n, m), and the lines along it that a block consists of; None if it does not."""
        shape = self.space.shapes[self.space.names.index(names[0])]
        if len(names) > 1 or len(shape) != 2:
            return None
        if isinstance(columns, slice):
            start, rest = divmod(columns.start, shape[1])
            count, left = divmod(columns.stop - columns.start, shape[1])
            return None if rest or left else (0, slice(start, start + count))
        first, count = int(columns[0]), len(columns) // shape[0]
        lines = first + torch.arange(count, device="cpu")
        places = torch.arange(shape[0], device="cpu").unsqueeze(-1) * shape[1] + lines
        return (1, slice(first, first + count)) if torch.equal(columns, places.flatten()) else None


def gram(root: Tensor, width: int) -> Tensor:
    """(b, S, K, K): W Wᵀ among the K = `width` outputs of each position, from (b, S · K, q)."""
    grouped = root.reshape(-1, width, root.shape[-1])
    return (grouped @ grouped.mT).view(len(root), -1, width, width)


def _check_size(places: int, block: Block) -> None:
    if places != block.size:
        raise ValueError(f"places must be as many as a block has weights, {block.size}; got {places}.")


def _slices(slopes: Tensor, width: int, joint: bool) -> Iterator[slice]:
    """Slices of examples so small that `width` numbers of each column stay in the cache; all at once if `joint`."""
    columns, batch = slopes.shape[:2]
    return iter([slice(0, batch)]) if joint else cache_sized_slices(batch, columns * width)
