"""Second moments of deviations, added up draw by draw, and a root of them over the outputs."""

from __future__ import annotations

import torch
from torch import Tensor

WIDEST = 2048  # numbers of a signal up to which their moments are a matrix; beyond, variances only


class SecondMoment:
    """Σ_k d_k d_kᵀ over draws, examples and positions, about 0 and about each example's own mean over the draws.

    Deviations are (B, S, D) each: B examples, S positions. Sums are in float64 on the CPU.
    """

    def __init__(self, size: int) -> None:
        self.square = size <= WIDEST
        shape = (size, size) if self.square else (size,)
        self.total = torch.zeros(shape, dtype=torch.float64, device="cpu")
        self.of_means = torch.zeros_like(self.total)
        self.count = 0  # examples x positions

    def add(self, deviations: Tensor, sums: Tensor | None = None) -> None:
        """Add one draw of some examples."""
        flat = deviations.flatten(0, 1)
        self.total += self._products(flat)
        if sums is not None:
            sums += deviations

    def close(self, sums: Tensor, draws: int) -> None:
        """Note the sum over `draws` draws of those examples."""
        flat = sums.flatten(0, 1)
        self.of_means += self._products(flat) / draws
        self.count += len(flat)

    def about_zero(self, draws: int) -> Tensor:
        """The mean of d dᵀ, (D, D), or of d² where only variances are kept, (D,)."""
        return self.total / (draws * self.count)

    def central(self, draws: int) -> Tensor:
        """The covariance over draws, averaged over examples and positions, in the same form."""
        return (self.total - self.of_means) / ((draws - 1) * self.count)

    def _products(self, flat: Tensor) -> Tensor:
        found = flat.mT @ flat if self.square else flat.square().sum(0)
        return found.cpu().double()


def root_of(moment: Tensor, weight: Tensor | None) -> Tensor:
    """(C, r): a root A of W S Wᵀ (of S without W), largest columns first; of a vector of variances, none (C, 0)."""
    if moment.dim() == 1:
        return moment.new_zeros(len(moment), 0)
    values, vectors = torch.linalg.eigh((moment + moment.mT) / 2)
    root = vectors * values.clamp_min(0).sqrt()
    root = root if weight is None else weight.cpu().double() @ root
    if root.shape[1] > 1:  # columns of A become orthogonal, so that few of them hold most
        inner, turn = torch.linalg.eigh(root.mT @ root)
        root = root @ turn[:, inner.argsort(descending=True)]
    return root


def variances_of(moment: Tensor, root: Tensor) -> Tensor:
    """(C,): the diagonal of W S Wᵀ, by its root or as it was kept."""
    return moment if moment.dim() == 1 else root.square().sum(-1)
