"""The top eigenpairs of the curvature of all parameters followed, without the matrix.

Where the rows of Sᵀ J are few they are stacked, and their Gram matrix gives the pairs exactly. Otherwise a block
Krylov method (Musco & Musco 2015) multiplies a few random vectors by H, pass after pass over the data, and takes
the best pairs of the space they span:

    V = orth[Ω, H Ω, H² Ω, ...],   Vᵀ H V = Q diag(s) Qᵀ,   U = V Q

with a pass per block, until the eigenvalues asked for no longer move.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayesformer.core.seeds import generator
from bayesformer.data.in_memory import batch_to
from bayesformer.jacobians import columns
from bayesformer.laplace.dense_curvature import ExampleRows
from bayesformer.laplace.passes import BatchPass, CurvaturePiece, Sweep
from bayesformer.laplace.structures import LowRankCurvature

STACKED = 2**28  # numbers of stacked rows at most: 1 GiB in float32
ROWS = 4096  # and as many of them: their Gram matrix is decomposed
OVERSAMPLING = 8
PASSES, TOLERANCE = 8, 1e-4  # over the data at most; change of the eigenvalues, of the largest, that ends it


def fit(sweep: Sweep, rank: int) -> list[CurvaturePiece]:
    """One block over all parameters, of `rank` eigenpairs or as many as there are."""
    names = sweep.names
    size = sum(sweep.size(name) for name in names)
    rank = min(rank, size)
    rows = _rows(sweep)
    if rows <= ROWS and rows * size <= STACKED:
        vectors, values = _by_gram(sweep, names, rank)
    else:
        vectors, values = _by_krylov(sweep, names, size, rank)
    return [CurvaturePiece(tuple(names), sweep.place(names), LowRankCurvature(vectors, values))]


def _rows(sweep: Sweep) -> int:
    """How many rows Sᵀ J has over all data; more than `ROWS` where the number of data is not known."""
    examples = sweep.data.rows
    if examples is None:
        return ROWS + 1
    values = sweep.run(batch_to(sweep.data.first(1), sweep.device)).values
    return examples * columns.count(sweep.kind, sweep.likelihood, values, sweep.samples)


def _by_gram(sweep: Sweep, names: list[str], rank: int) -> tuple[Tensor, Tensor]:
    found: list[Tensor] = []

    def add(step: BatchPass) -> None:
        rows_of = ExampleRows(step, sweep)
        found.extend(rows_of(names, gradients) for gradients in step.gradients())

    sweep.each(add)
    stacked = torch.cat(found)  # (M, p)
    gram = (stacked @ stacked.mT).double()
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    kept = values > values[0].clamp_min(0) * len(values) * torch.finfo(stacked.dtype).eps
    if not kept.any():
        return _nothing(sweep, names)
    values, vectors = values[kept], vectors[:, kept]
    return stacked.mT @ (vectors * values.rsqrt()).to(stacked), values.to(stacked)


def _nothing(sweep: Sweep, names: list[str]) -> tuple[Tensor, Tensor]:
    """No curvature at all: one direction with value 0."""
    vectors = sweep.zeros(sum(sweep.size(name) for name in names), 1)
    vectors[0] = 1
    return vectors, sweep.zeros(1)


def _by_krylov(sweep: Sweep, names: list[str], size: int, rank: int) -> tuple[Tensor, Tensor]:
    width = min(rank + OVERSAMPLING, size)
    source = generator(sweep.seed, "low rank")
    noise = torch.randn(size, width, generator=source, dtype=torch.float64, device=source.device)
    block = torch.linalg.qr(noise.to(sweep.zeros(0)))[0]
    basis, images = block, _times(sweep, names, block)
    values, vectors = _best(basis, images, rank)
    for _ in range(PASSES - 1):
        block = _new_directions(images[:, -width:], basis)
        if block.shape[1] == 0:
            break
        basis, images = torch.cat([basis, block], 1), torch.cat([images, _times(sweep, names, block)], 1)
        before = values
        values, vectors = _best(basis, images, rank)
        still = len(before) == len(values) and bool((values - before).abs().max() <= TOLERANCE * values.max())
        if still or basis.shape[1] == size:
            break
    return basis @ vectors, values


def _times(sweep: Sweep, names: list[str], vectors: Tensor) -> Tensor:
    """H V (p, k) in one pass over the data."""
    product = torch.zeros_like(vectors)

    def add(step: BatchPass) -> None:
        rows_of = ExampleRows(step, sweep)
        for gradients in step.gradients():
            rows = rows_of(names, gradients)
            product.addmm_(rows.mT, rows @ vectors)

    sweep.each(add)
    return product


def _new_directions(block: Tensor, basis: Tensor) -> Tensor:
    """Orthonormal columns of what the basis does not span yet; twice, as once leaves rounding."""
    scale = block.norm(dim=0).max()
    for _ in range(2):
        block = block - basis @ (basis.mT @ block)
    left, singular, _ = torch.linalg.svd(block, full_matrices=False)
    kept = singular > scale * torch.finfo(block.dtype).eps * len(block) ** 0.5
    left = left[:, kept][:, : len(block) - basis.shape[1]]
    left = left - basis @ (basis.mT @ left)
    return torch.linalg.qr(left)[0] if left.shape[1] else left


def _best(basis: Tensor, images: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    inner = (basis.mT @ images).double()
    values, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
    values, vectors = values.flip(0)[:rank].clamp_min(0), vectors.flip(1)[:, :rank]
    return values.to(basis), vectors.to(basis)
