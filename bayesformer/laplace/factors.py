"""Sums of outer products Σ x xᵀ, kept whole, as a diagonal, or as a sketch from which the top comes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from bayesformer.core.seeds import generator

OVERSAMPLING = 16


class Factor(Protocol):
    """A running sum of x xᵀ over rows x."""

    def add(self, rows: Tensor) -> None:
        """Add x xᵀ for every row x of (M, n)."""
        ...

    def pairs(self, scale: float) -> tuple[Tensor, Tensor | None]:
        """Eigenvalues (k,) and vectors (n, k) of scale · Σ x xᵀ; None for the identity."""
        ...

    @property
    def lost(self) -> float:
        """Share of the trace of the sum that `pairs` leaves out, 0 to 1."""
        ...


class DenseFactor:
    """The running sum in full, (n, n)."""

    lost = 0.0

    def __init__(self, size: int, like: Tensor) -> None:
        self.total = like.new_zeros(size, size)

    def add(self, rows: Tensor) -> None:
        """Add x xᵀ for every row x of (M, n), in one product."""
        self.total.addmm_(rows.mT, rows)

    def pairs(self, scale: float) -> tuple[Tensor, Tensor | None]:
        """By eigh in float64, cut off at 0."""
        values, vectors = torch.linalg.eigh(scale * self.total.double())
        # In the memory order of a file: a posterior then keeps these very vectors.
        return values.clamp_min(0).to(self.total.dtype), vectors.to(self.total.dtype).contiguous()


class DiagonalFactor:
    """The diagonal of the running sum alone, (n,)."""

    lost = 0.0  # of the trace; what is off the diagonal is left out

    def __init__(self, size: int, like: Tensor) -> None:
        self.total = like.new_zeros(size)

    def add(self, rows: Tensor) -> None:
        """Add the squares of every row of (M, n)."""
        self.total += rows.square().sum(0)

    def pairs(self, scale: float) -> tuple[Tensor, Tensor | None]:
        """The scaled diagonal as eigenvalues (n,), with the identity as eigenvectors."""
        return scale * self.total, None


class SketchFactor:
    """The top `rank` eigenpairs of the sum from one pass, by the Nyström method: memory n · (rank + 16).

        Y = Σ x (xᵀ Ω),   Σ x xᵀ ≈ Y (Ωᵀ Y)⁻¹ Yᵀ

    with Ω random orthonormal columns (Tropp et al. 2017, algorithm 3: shifted for stability). Exact where the sum
    has no more than rank + 16 directions. The trace is summed exactly, so that the error is known: what is left out
    is positive semidefinite, and `lost` is its trace over that of the sum.
    """

    def __init__(self, size: int, like: Tensor, rank: int) -> None:
        columns = min(size, rank + OVERSAMPLING)
        source = generator(0, "sketch", size)
        noise = torch.randn(size, columns, generator=source, dtype=torch.float64, device=source.device)
        self.rank = rank
        self.test = torch.linalg.qr(noise)[0].to(like)
        self.image = torch.zeros_like(self.test)
        self.trace, self.kept = like.new_zeros((), dtype=torch.float64), 0.0

    def add(self, rows: Tensor) -> None:
        """Add x (xᵀ Ω) for every row x of (M, n), in two thin products."""
        self.image += rows.mT @ (rows @ self.test)
        self.trace += rows.square().sum()

    def pairs(self, scale: float) -> tuple[Tensor, Tensor | None]:
        """The best `rank` of the approximation."""
        test, image = self.test.double(), scale * self.image.double()
        shift = torch.finfo(self.image.dtype).eps * image.norm()
        if shift == 0:
            return self.image.new_zeros(self.rank), self.test[:, : self.rank]
        image = image + shift * test
        inner = test.mT @ image
        values, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
        # A pseudo-inverse root: directions below rounding carry nothing.
        root = vectors * values.clamp_min(shift).rsqrt()
        left, singular, _ = torch.linalg.svd(image @ root, full_matrices=False)
        found = (singular.square() - shift).clamp_min(0)[: self.rank]
        self.kept = float(found.sum()) / scale
        return found.to(self.image.dtype), left[:, : self.rank].to(self.image.dtype).contiguous()

    @property
    def lost(self) -> float:
        """Share of the trace of the sum that the pairs leave out; 0 before they were asked for."""
        whole = float(self.trace)
        return max(0.0, 1 - self.kept / whole) if whole > 0 and self.kept else 0.0


class InputFactor:
    """A = Σ a aᵀ / count of the inputs of one matrix, or of several that have the same input, such as q, k and v.

    It is added to once and decomposed once, and all of them hold the very same eigenvectors.
    """

    def __init__(self, factor: Factor, like: Tensor) -> None:
        self.factor, self.count = factor, like.new_zeros(())  # Σ of the weights of the rows
        self.found: tuple[Tensor, Tensor | None] | None = None

    def add(self, rows: Tensor, weight: Tensor | float) -> None:
        """Add a aᵀ for every row a of (M, n), which count for `weight` together."""
        self.count += weight
        self.factor.add(rows)

    def pairs(self) -> tuple[Tensor, Tensor | None]:
        """Eigenvalues and vectors of A, computed when they are first asked for."""
        if self.found is None:
            self.found = self.factor.pairs(1 / (float(self.count) or 1.0))
        return self.found

    @property
    def lost(self) -> float:
        """Share of the trace of A that the pairs leave out."""
        return self.factor.lost
