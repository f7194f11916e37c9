"""Kronecker-factored curvature (KFAC) of every matrix, and exact blocks for the small vectors beside them.

A matrix W (out, in) used at R positions, with inputs a and gradients g there, has H ≈ B ⊗ A. Eschenhagen et al. (2023):

    expand   A = 1/(N R) Σ_{n,r} a aᵀ,   B = Σ_{n,r} g gᵀ      exact for linear nets with a loss at every position
    reduce   A = 1/N Σ_n ā āᵀ,           B = Σ_n ĝ ĝᵀ          ā the mean and ĝ the sum over positions; exact for
                                                               linear nets whose positions are pooled

A is a mean and B a sum over data and columns, whatever the minibatches. Padding is left out of A and of its counts;
its g is 0 by itself. An embedding has one-hot inputs, so A is the vector of token frequencies (always as in expand).

Keys of an attention are an exception we make to reduce: adding the same to all keys of a query changes nothing, so
ĝ = 0 and reduce would say that nothing is known of them. Outputs whose gradients cancel over positions are expanded,
in a block of their own where the others of a packed weight are not.

Biases, gains, positions and class tokens get their exact block, dense up to `SMALL` numbers and diagonal above; so do
parameters that are no single matrix (tied to an embedding, or used in a way without a rule). A factor longer
than `LARGE` (a vocabulary), or as the user says, is kept by its top eigenpairs, or as a diagonal.

Matrices that see the same input, such as the low-rank A of queries, keys and values, have one and the same factor A: it
is summed up once, decomposed once, and held once.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bayesformer.core.slices import as_slice
from bayesformer.jacobians.site_groups import SiteGroup, site_groups
from bayesformer.laplace.diagonal_curvature import squares
from bayesformer.laplace.factors import DenseFactor, DiagonalFactor, Factor, InputFactor, SketchFactor
from bayesformer.laplace.passes import BatchPass, CurvaturePiece, Sweep
from bayesformer.laplace.structures import CurvatureBlock, DenseCurvature, DiagonalCurvature, KroneckerCurvature

SMALL, LARGE = 1024, 4096

Approximation = Literal["expand", "reduce"]
Large = Literal["low_rank", "diagonal"]


def fit(
    sweep: Sweep,
    approximation: Approximation | None = None,
    large: Large = "low_rank",
    rank: int = 64,
    weighted: bool = False,
    widest: int | None = None,
) -> list[CurvaturePiece]:
    """Kronecker-factored curvature B ⊗ A of every matrix and embedding, an exact block of every other parameter.

    Exact blocks are dense up to `SMALL` numbers and diagonal above.

    Args:
        sweep: the pass over the data.
        approximation: "expand" or "reduce", see above; by default "expand" for outputs per token, else "reduce".
        large: how a factor with more than `widest` rows is kept: by its top `rank` eigenpairs, or its diagonal.
        rank: the number of those eigenpairs.
        weighted: weight the inputs in A by the squared length of their gradients, Σ |g|² a aᵀ / Σ |g|². Both forms are
            exact if inputs and gradients are independent; this one is nearer if a classifier is sure of some examples.
        widest: `LARGE` by default.
    """
    accumulators: dict[tuple[str, int], list[Accumulator]] = {}
    cut = Cut(LARGE if widest is None else widest, large, rank)

    def add(step: BatchPass) -> None:
        reduce = not sweep.likelihood.per_token(step.values) if approximation is None else approximation == "reduce"
        own = _units(site_groups(step.sites))
        if not set(own) <= set(accumulators):
            trial = step.probe_gradients() if reduce else None
            new = {key: unit for key, unit in own.items() if key not in accumulators}
            accumulators.update({k: _accumulators(sweep, unit, trial, cut, weighted) for k, unit in new.items()})
            _share_inputs([(unit, one) for key, unit in new.items() for one in accumulators[key]])
        _part_inputs(accumulators, own)
        for key, unit in own.items():
            for accumulator in accumulators[key]:
                accumulator.forward(unit, step)
        for gradients in step.gradients():
            for key, unit in own.items():
                for accumulator in accumulators[key]:
                    accumulator.backward(unit, gradients)

    sweep.each(add)
    return _pieces(sweep, accumulators)


def _units(found: list[SiteGroup]) -> dict[tuple[str, int], list[SiteGroup]]:
    """Matrices and tables one by one, by name and start; all families of any other parameter together."""
    others = {group.name for group in found if group.kind not in {"linear", "embedding"}}
    units: dict[tuple[str, int], list[SiteGroup]] = {}
    for group in found:
        start = 0 if group.name in others else group.stretch.start
        units.setdefault((group.name, start), []).append(group)
    return units


def _accumulators(
    sweep: Sweep, unit: list[SiteGroup], trial: list[Tensor] | None, cut: Cut, weighted: bool
) -> list[Accumulator]:
    """What to sum up for a parameter; `trial` are gradients of any column, for reduce only."""
    like, first = sweep.zeros(0), unit[0]
    if len(unit) == 1 and first.kind == "linear":
        if trial is None:
            runs = [(slice(0, first.size // first.inputs().shape[-1]), False)]
        else:
            runs = _runs(first.gradient(first.pick(trial), "linear"))
        return [MatrixAccumulator(first, rows, pooled, like, cut, weighted) for rows, pooled in runs]
    if len(unit) == 1 and first.kind == "embedding":
        return [TableAccumulator(first, like)]
    size = sweep.size(first.name)
    return [DenseAccumulator(size, like) if size <= SMALL else DiagonalAccumulator(size, like)]


def _runs(g: Tensor) -> list[tuple[slice, bool]]:
    """Neighbouring outputs to treat alike, and whether by reduce. Cancelling lies in the model, not in the data."""
    if g.shape[2] == 1:
        return [(slice(0, g.shape[-1]), True)]
    summed, spread = g.sum(2).square().sum((0, 1)), g.square().sum((0, 1, 2))
    cancels = ((summed <= torch.finfo(g.dtype).eps * spread) & (spread > 0)).tolist()
    ends = [0, *(i for i in range(1, len(cancels)) if cancels[i] != cancels[i - 1]), len(cancels)]
    return [(slice(a, b), not cancels[a]) for a, b in pairwise(ends)]


def _share_inputs(new: list[tuple[list[SiteGroup], Accumulator]]) -> None:
    """Give matrices that are seen for the first time, with the same input, one factor of it."""
    leaders: list[tuple[Tensor, MatrixAccumulator]] = []
    for unit, one in new:
        if not isinstance(one, MatrixAccumulator) or one.weighted:
            continue
        a = unit[0].inputs()
        leader = next((other for b, other in leaders if other.reduce == one.reduce and _same(a, b)), None)
        if leader is None:
            leaders.append((a, one))
        else:
            one.inner, one.leader = leader.inner, leader


def _part_inputs(
    accumulators: dict[tuple[str, int], list[Accumulator]], own: dict[tuple[str, int], list[SiteGroup]]
) -> None:
    """Give matrices whose inputs are not the same any more a factor each, with what was common before."""
    inputs = {id(one): unit[0].inputs() for key, unit in own.items() for one in accumulators[key] if _is_matrix(one)}
    for one in (one for every in accumulators.values() for one in every):
        if not isinstance(one, MatrixAccumulator) or one.leader is None:
            continue
        a, b = inputs.get(id(one)), inputs.get(id(one.leader))
        if (a is None) != (b is None) or (a is not None and b is not None and not _same(a, b)):
            one.inner, one.leader = deepcopy(one.inner), None


def _is_matrix(one: Accumulator) -> bool:
    return isinstance(one, MatrixAccumulator)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two inputs are the same numbers; casts to another precision make copies."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()) or torch.equal(a, b)


class Cut(NamedTuple):
    """How a factor that is longer than `widest` is kept."""

    widest: int
    large: Large
    rank: int

    def factor(self, size: int, like: Tensor) -> Factor:
        """The sum for a side of this length."""
        if size <= self.widest:
            return DenseFactor(size, like)
        return (
            SketchFactor(size, like, min(self.rank, size)) if self.large == "low_rank" else DiagonalFactor(size, like)
        )


class Accumulator:
    """What is summed up for some weights of one parameter."""

    def __init__(self, stretch: slice) -> None:
        self.stretch = stretch

    def places(self) -> Tensor:
        """Its weights in the flat parameter, in order."""
        return torch.arange(self.stretch.start, self.stretch.stop, device="cpu")

    def forward(self, unit: list[SiteGroup], step: BatchPass) -> None:
        """Add what depends on the inputs of a minibatch; called once for each."""

    def backward(self, unit: list[SiteGroup], gradients: list[Tensor]) -> None:
        """Add what depends on the gradients of some columns; called once for each group of columns."""
        raise NotImplementedError

    def structure(self) -> CurvatureBlock:
        """The curvature of the weights at `places`, after the last minibatch."""
        raise NotImplementedError

    @property
    def lost(self) -> float:
        """Share of the trace of a factor that the structure leaves out."""
        return 0.0


class MatrixAccumulator(Accumulator):
    """B ⊗ A of those outputs of a matrix that `rows` picks."""

    def __init__(
        self, group: SiteGroup, rows: slice, reduce: bool, like: Tensor, cut: Cut, weighted: bool = False
    ) -> None:
        super().__init__(group.stretch)
        self.rows, self.reduce, self.weighted = rows, reduce, weighted
        self.leader: MatrixAccumulator | None = None  # another matrix with the same input, which adds to its factor
        self.turned = bool(group.sites[0].turned)  # type: ignore[attr-defined]
        self.inputs = group.inputs().shape[-1]
        self.inner = InputFactor(cut.factor(self.inputs, like), like)
        self.outer = cut.factor(rows.stop - rows.start, like)

    def places(self) -> Tensor:
        """Its rows of W, or columns of Wᵀ."""
        whole = super().places()
        if self.turned:
            return whole.view(self.inputs, -1)[:, self.rows].flatten()
        return whole.view(-1, self.inputs)[self.rows].flatten()

    def forward(self, unit: list[SiteGroup], step: BatchPass) -> None:
        """Add the inputs of a minibatch to A: all positions, or their mean for reduce; weighted ones wait for g."""
        if self.leader is not None:
            return
        a = unit[0].inputs()  # (B, R, in)
        kept = step.valid if step.valid is not None and step.valid.shape == a.shape[:2] else None
        if self.reduce:
            own = (
                a.mean(1) if kept is None else (a * kept.unsqueeze(-1)).sum(1) / kept.sum(1, keepdim=True).clamp_min(1)
            )
        elif self.weighted:
            own = a.flatten(0, 1)  # (B R, in): gradients of padding are 0
        else:
            own = a.flatten(0, 1) if kept is None else a[kept]
        if self.weighted:
            self.waiting = own
            return
        self.inner.add(own, len(own))

    def backward(self, unit: list[SiteGroup], gradients: list[Tensor]) -> None:
        """Add the gradients of some columns to B: all positions, or their sum for reduce."""
        g = unit[0].gradient(unit[0].pick(gradients), "linear")[..., self.rows]
        g = g.sum(2) if self.reduce else g.flatten(1, 2)  # (S, B, out) or (S, B R, out)
        self.outer.add(g.flatten(0, 1))
        if self.weighted:
            weights = g.square().sum((0, 2))
            self.inner.add(weights.sqrt().unsqueeze(-1) * self.waiting, weights.sum())

    def structure(self) -> KroneckerCurvature:
        """By eigenpairs; the first factor is that of the parameter's first axis."""
        outer, inner = self.outer.pairs(1.0), self.inner.pairs()
        first, second = (inner, outer) if self.turned else (outer, inner)
        return KroneckerCurvature(first[0], second[0], first[1], second[1])

    @property
    def lost(self) -> float:
        """The larger of the shares that the two factors leave out."""
        return max(self.outer.lost, self.inner.lost)


class TableAccumulator(Accumulator):
    """diag(frequencies) ⊗ B of an embedding (V, D)."""

    def __init__(self, group: SiteGroup, like: Tensor) -> None:
        super().__init__(group.stretch)
        vocabulary, width = group.sites[0].part.shape
        self.frequencies, self.outer = like.new_zeros(vocabulary), DenseFactor(width, like)

    def forward(self, unit: list[SiteGroup], step: BatchPass) -> None:
        """Count how often each token occurs, padding left out."""
        tokens = unit[0].tokens()
        kept = tokens[step.valid] if step.valid is not None and step.valid.shape == tokens.shape else tokens.flatten()
        for site in unit[0].sites:
            if site.padding is not None:  # type: ignore[attr-defined]
                kept = kept[kept != site.padding]  # type: ignore[attr-defined]
        self.frequencies += kept.bincount(minlength=len(self.frequencies))

    def backward(self, unit: list[SiteGroup], gradients: list[Tensor]) -> None:
        """Add the gradients of some columns at all positions to B."""
        self.outer.add(unit[0].gradient(unit[0].pick(gradients), "embedding").flatten(0, 2))

    def structure(self) -> KroneckerCurvature:
        """The vector of frequencies needs no eigenvectors."""
        values, vectors = self.outer.pairs(1.0)
        return KroneckerCurvature(self.frequencies / self.frequencies.sum().clamp_min(1), values, None, vectors)


class DenseAccumulator(Accumulator):
    """The exact block of a whole parameter, dense."""

    def __init__(self, size: int, like: Tensor) -> None:
        super().__init__(slice(0, size))
        self.factor = DenseFactor(size, like)

    def backward(self, unit: list[SiteGroup], gradients: list[Tensor]) -> None:
        """Add the outer product of every example's gradient with itself."""
        parts = [(group.stretch, group.per_example(group.pick(gradients)).flatten(0, 1)) for group in unit]
        if parts[0][0] == self.stretch:
            self.factor.add(parts[0][1])
            return
        rows = parts[0][1].new_zeros(len(parts[0][1]), self.stretch.stop)
        for stretch, values in parts:
            rows[:, stretch] = values
        self.factor.add(rows)

    def structure(self) -> DenseCurvature:
        """The sum (p, p) of all examples and columns."""
        return DenseCurvature(self.factor.total)


class DiagonalAccumulator(Accumulator):
    """The exact diagonal of a whole parameter."""

    def __init__(self, size: int, like: Tensor) -> None:
        super().__init__(slice(0, size))
        self.total = like.new_zeros(size)

    def backward(self, unit: list[SiteGroup], gradients: list[Tensor]) -> None:
        """Add the squares of every example's gradient."""
        for group in unit:
            self.total[group.stretch] += squares(group, group.pick(gradients))

    def structure(self) -> DiagonalCurvature:
        """The sum (p,) of all examples and columns."""
        return DiagonalCurvature(self.total)


def _pieces(sweep: Sweep, accumulators: dict[tuple[str, int], list[Accumulator]]) -> list[CurvaturePiece]:
    """Pieces in the order of θ, with zeros for weights that no pass has used: their posterior is the prior.

    Sums are given up one after another, so that they and the eigenvectors made of them are not in memory together.
    """
    pieces = []
    for name in sweep.names:
        if not sweep.size(name):
            continue  # a parameter without numbers has no curvature
        keys = [key for key in accumulators if key[0] == name]
        own = [accumulator for key in keys for accumulator in accumulators.pop(key)]
        found = [(accumulator.places(), accumulator.structure(), accumulator.lost) for accumulator in own]
        unused = torch.ones(sweep.size(name), dtype=torch.bool, device="cpu")
        for places, _, _ in found:
            unused[places] = False
        if unused.any():
            rest = unused.nonzero().flatten()
            found.append((rest, DiagonalCurvature(sweep.zeros(len(rest))), 0.0))
        for places, structure, lost in sorted(found, key=lambda item: int(item[0][0])):
            pieces.append(CurvaturePiece((name,), as_slice(places + sweep.starts[name]), structure, lost))
    return pieces
