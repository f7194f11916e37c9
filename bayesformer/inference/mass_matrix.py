"""Mass matrices of Hamiltonian dynamics: M⁻¹ near the posterior's covariance, estimated in windows of the warm-up.

The kinetic energy is ½ pᵀ M⁻¹ p and momenta are p ~ N(0, M). With M⁻¹ = Σ the dynamics are those of a target with unit
covariance. M⁻¹ is a vector (P,), the variances, or a matrix (P, P).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bayesformer.core.draws import normal_like

Metric: TypeAlias = Literal["diagonal", "dense"]
METRICS = ("diagonal", "dense")

FIRST, LAST, WINDOW = 75, 50, 25  # transitions at the beginning, at the end and in the first window, as in Stan
SHORTEST = 20  # transitions of warm-up below which only the step size is adapted
PRIOR_COUNT, PRIOR_SCALE = 5, 1e-3  # of the regularisation, as in Stan


class MassMatrix(NamedTuple):
    """M⁻¹ and what momenta are drawn by."""

    inverse: Tensor  # M⁻¹: (P,) or (P, P)
    root: Tensor  # lower triangular L (P, P), L Lᵀ = M⁻¹; (0,) for a diagonal

    def velocity(self, momentum: Tensor) -> Tensor:
        """(P,): M⁻¹ p, the direction in which the weights move."""
        return self.inverse * momentum if self.inverse.dim() == 1 else self.inverse @ momentum

    def draw(self) -> Tensor:
        """(P,): a momentum p ~ N(0, M), from the generator in force."""
        if self.inverse.dim() == 1:
            return normal_like(self.inverse) * self.inverse.rsqrt()
        noise = normal_like(self.inverse[0]).unsqueeze(-1)
        return torch.linalg.solve_triangular(self.root.mT, noise, upper=True).squeeze(-1)  # L⁻ᵀ z


class Moments(NamedTuple):
    """Running mean and sum of squared deviations of the draws in a window (Welford 1962)."""

    seen: Tensor  # (), how many, float64 on the CPU
    mean: Tensor  # (P,)
    squares: Tensor  # Σ (x - mean)², (P,), or Σ (x - mean)(x - mean)ᵀ, (P, P)


def unit(like: Tensor, metric: Metric) -> MassMatrix:
    """M = I for weights like these (P,)."""
    if metric == "diagonal":
        return MassMatrix(torch.ones_like(like), like.new_empty(0))
    eye = torch.eye(len(like), dtype=like.dtype, device=like.device)
    return MassMatrix(eye, eye.clone())


def no_moments(like: Tensor, metric: Metric) -> Moments:
    """Before the first draw of a window of weights like these (P,)."""
    squares = torch.zeros_like(like) if metric == "diagonal" else like.new_zeros(len(like), len(like))
    return Moments(torch.zeros((), dtype=torch.float64, device="cpu"), torch.zeros_like(like), squares)


def add(moments: Moments, draw: Tensor) -> Moments:
    """The moments with one more draw (P,)."""
    seen = moments.seen + 1
    before = draw - moments.mean
    mean = moments.mean + before / seen.item()
    after = draw - mean
    if moments.squares.dim() == 1:
        return Moments(seen, mean, torch.addcmul(moments.squares, before, after))
    return Moments(seen, mean, torch.addr(moments.squares, after, before))


def estimate(moments: Moments) -> MassMatrix:
    """M⁻¹ from the n draws of a window: their covariance S, drawn a little towards small variances,

        M⁻¹ = n/(n + 5) S + 10⁻³ 5/(n + 5) g I,

    as Stan does, with the geometric mean g of the variances in the place of 1, so that units do not matter. A matrix
    of P weights from n < 2 P draws is nearly singular: its correlations are shrunk by n/(n + P) first.
    """
    n, squares = moments.seen.item(), moments.squares
    variances = (squares if squares.dim() == 1 else squares.diagonal()) / (n - 1)
    tiny = torch.finfo(variances.dtype).tiny
    scale = variances.clamp_min(tiny).log().mean().exp()
    share, floor = n / (n + PRIOR_COUNT), PRIOR_SCALE * PRIOR_COUNT / (n + PRIOR_COUNT) * scale
    if squares.dim() == 1:
        return MassMatrix((share * variances + floor).clamp_min(tiny), variances.new_empty(0))
    matrix = squares / (n - 1)
    matrix = (matrix + matrix.mT) / 2
    if n < 2 * len(matrix):
        kept = n / (n + len(matrix))
        matrix = kept * matrix + (1 - kept) * torch.diag(variances)
    matrix = share * matrix
    matrix.diagonal().add_(floor.clamp_min(tiny))
    return MassMatrix(matrix, torch.linalg.cholesky(matrix))


def window_ends(warm_up: int) -> tuple[int, ...]:
    """Transitions, counted from 1, after which the mass matrix is set from the window before, as in Stan.

    Three stages: 75 transitions that only find the typical set, windows of 25, 50, 100, ... draws (the last is
    stretched to the end), 50 transitions for the final step size. A warm-up of less than 150 has 15 %, 75 % and 10 % of
    its length for them; one of less than 20 leaves the mass as it is.
    """
    if warm_up < SHORTEST:
        return ()
    first, last, window = FIRST, LAST, WINDOW
    if first + last + window > warm_up:
        first, last = int(0.15 * warm_up), int(0.1 * warm_up)
        window = warm_up - first - last
    ends, end = [], first
    while end < warm_up - last:
        end += window
        window *= 2
        if end + window > warm_up - last:  # the next window would not fit
            end = warm_up - last
        ends.append(end)
    return tuple(ends)


def first_of_windows(warm_up: int) -> int:
    """Transitions before the first window, whose draws do not count."""
    ends = window_ends(warm_up)
    if not ends:
        return warm_up
    return FIRST if warm_up >= FIRST + LAST + WINDOW else int(0.15 * warm_up)
