"""Which law do the weights of trained networks follow? Fits of five families to a layer, and how sure they are.

The weights of a layer over all networks are put into cells that are narrow everywhere, in the tails too; a fit is one
to the means of the cells, weighted by their counts. A bootstrap over networks then only adds up other counts: networks
are independent, weights of one network are not.

    normal, laplace:   closed forms
    others:            scale mixtures of normals, by EM:  u = u(z),  loc = Σ u x / Σ u,  scale² = mean of u (x - loc)²
    Student's t:       the same for every number of degrees of freedom on a grid, of which the best is taken
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.core.seeds import generator
from bayesformer.priors.distributions import FAMILIES, Distribution

CELLS = 600
BARS = 100  # of the histogram that squared errors are taken to
STEPS = 40  # of EM
DEGREES = (*(round(0.5 * 1.18**i, 4) for i in range(45)), 1e4)  # .5 to 727, and as good as normal
NORMAL_FROM = 100.0  # degrees of freedom that nothing tells from a normal law
LEVEL = 0.9  # of intervals


class Cells(NamedTuple):
    """The weights of a layer, network by network, as counts: in narrow cells, and in the bars of a histogram."""

    means: Tensor  # (K,), of the weights in each cell
    counts: Tensor  # (N, K)
    edges: Tensor  # (BARS + 1,)
    bars: Tensor  # (N, BARS)


class Fits(NamedTuple):
    """Fits of one family to R samples."""

    loc: Tensor  # (R,), as are the others
    scale: Tensor
    df: Tensor  # of Student's t; NaN otherwise
    log_density: Tensor  # mean over weights
    squared_error: Tensor  # of the density to the heights of the histogram, summed over bars


@dataclass(frozen=True)
class LayerFit:
    """What is known of the law of a layer's weights."""

    weights: int
    networks: int
    fits: dict[str, dict[str, float]]  # family -> loc, scale, df, log_density, squared_error
    by_likelihood: str
    by_squared_error: str
    support: dict[str, dict[str, float]]  # criterion -> family -> share of bootstrap samples in which it is best
    df: float
    df_interval: tuple[float, float]
    scale_interval: tuple[float, float]  # of the family that is best by likelihood

    def law(self) -> Distribution:
        """The law that fits best by likelihood; centred on 0 unless its centre is a tenth of its scale away."""
        return law_of(self.by_likelihood, self.fits[self.by_likelihood])


def law_of(family: str, fit: dict[str, float]) -> Distribution:
    """A fitted law, with three digits."""
    loc, scale, df = (float(f"{fit[name]:.3g}") for name in ("loc", "scale", "df"))
    loc = loc if abs(loc) > 0.1 * scale else 0.0
    if family == "student_t" and df < NORMAL_FROM:
        return FAMILIES[family](df, loc, scale)  # type: ignore[call-arg]
    return FAMILIES["normal" if family == "student_t" else family](loc, scale)  # type: ignore[call-arg]


def cells_of(weights: Tensor) -> Cells:
    """Cells of the weights (N, size) of one layer; their edges are quantiles, dense in both tails."""
    values = weights.double()
    ordered = values.flatten().sort().values
    levels = torch.special.ndtr(torch.linspace(-4.5, 4.5, CELLS + 1, dtype=torch.float64))
    inner = ordered[(levels * (len(ordered) - 1)).round().long()].unique()
    place = torch.bucketize(values, inner[1:-1].contiguous())  # (N, size)
    count = max(len(inner) - 1, 1)
    counts = torch.zeros(len(values), count, dtype=torch.float64).scatter_add_(1, place, torch.ones_like(values))
    sums = torch.zeros(count, dtype=torch.float64).scatter_add_(0, place.flatten(), values.flatten())
    edges = histogram_edges(ordered)
    bar = torch.bucketize(values, edges) - 1
    inside = ((bar >= 0) & (bar < BARS)).double()
    bars = torch.zeros(len(values), BARS, dtype=torch.float64).scatter_add_(1, bar.clamp(0, BARS - 1), inside)
    kept = counts.sum(0) > 0
    return Cells(sums[kept] / counts.sum(0)[kept], counts[:, kept], edges, bars)


def histogram_edges(ordered: Tensor) -> Tensor:
    """Edges of a histogram of the sorted values, at most five quartile ranges beyond the quartiles: with an outlier all
    others would be one bar."""
    last = len(ordered) - 1
    low, high = ordered[round(0.25 * last)].item(), ordered[round(0.75 * last)].item()
    reach = 5 * (high - low)
    low, high = max(ordered[0].item(), low - reach), min(ordered[-1].item(), high + reach)
    if high <= low:  # as good as all values are equal
        low, high = low - 0.5, high + 0.5
    return torch.linspace(low, high, BARS + 1, dtype=torch.float64)


def fit_layer(weights: Tensor, resamples: int = 100, seed: int = 0) -> LayerFit:
    """Fit every family to the weights (N, ...) of one layer in N networks, and to bootstrap samples of the networks."""
    networks = len(weights)
    if networks < 2:
        raise ValueError(f"weights must be those of at least 2 networks; got {networks}.")
    cells = cells_of(weights.detach().flatten(1))
    drawn = torch.randint(networks, (resamples, networks), generator=generator(seed, "weights", "bootstrap"))
    share = torch.zeros(1 + resamples, networks, dtype=torch.float64)
    share[0] = 1.0  # the sample itself, then its resamples
    share[1:].scatter_add_(1, drawn, torch.ones(resamples, networks, dtype=torch.float64))
    fits = {family: fit_family(family, cells, share) for family in FAMILIES}
    t = fits["student_t"]
    count = networks * weights[0].numel()
    one_more = 0.5 * math.log(count) / count  # parameter, by Schwarz's criterion per weight
    winners = {
        "likelihood": _winners({name: -fit.log_density for name, fit in fits.items()}, one_more),
        "squared_error": _winners(
            {name: fit.squared_error for name, fit in fits.items()}, 0.01 * fits["normal"].squared_error
        ),
    }
    names = list(fits)
    best = names[int(winners["likelihood"][0])]
    return LayerFit(
        weights=weights[0].numel(),
        networks=networks,
        fits={name: {key: value[0].item() for key, value in fit._asdict().items()} for name, fit in fits.items()},
        by_likelihood=best,
        by_squared_error=names[int(winners["squared_error"][0])],
        support={
            criterion: {name: (found[1:] == i).double().mean().item() for i, name in enumerate(names)}
            for criterion, found in winners.items()
        },
        df=t.df[0].item(),
        df_interval=interval(t.df[1:]),
        scale_interval=interval(fits[best].scale[1:]),
    )


def interval(values: Tensor) -> tuple[float, float]:
    """The central interval of bootstrap values, at `LEVEL`."""
    low, high = torch.quantile(values, torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=values.dtype)).tolist()
    return low, high


def _winners(costs: dict[str, Tensor], extra: Tensor | float) -> Tensor:
    """(R,): which family costs least, where Student's t, which has the others' limits within it, pays `extra`."""
    table = torch.stack([cost + extra if name == "student_t" else cost for name, cost in costs.items()])
    return table.argmin(0)


def fit_family(family: str, cells: Cells, share: Tensor) -> Fits:
    """The maximum likelihood fit of a family to samples that hold network n `share[r, n]` times."""
    weight = share @ cells.counts
    weight = weight / weight.sum(1, keepdim=True)  # (R, K)
    x = cells.means
    if family == "normal":
        loc, scale = _normal(x, weight)
        df = torch.full_like(loc, math.nan)
    elif family == "laplace":
        loc, scale = _laplace(x, weight)
        df = torch.full_like(loc, math.nan)
    elif family == "student_t":
        loc, scale, df = _student(x, weight)
    else:
        loc, scale = _by_em(x, weight, MIXING[family])
        df = torch.full_like(loc, math.nan)
    density = _log_density(family, loc, scale, df)
    centres = (cells.edges[1:] + cells.edges[:-1]) / 2
    heights = share @ cells.bars
    every = (share @ cells.counts).sum(1, keepdim=True)  # those outside of the histogram, too
    heights = heights / every / (cells.edges[1] - cells.edges[0])
    error = (density(centres).exp() - heights).square().sum(1)
    return Fits(loc, scale, df, (weight * density(x)).sum(1), error)


def _normal(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    loc = weight @ x
    return loc, (weight * (x - loc[:, None]).square()).sum(1).sqrt().clamp_min(TINY)


def _laplace(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    loc = x[(weight.cumsum(1) < 0.5).sum(1).clamp(max=len(x) - 1)]
    return loc, (weight * (x - loc[:, None]).abs()).sum(1).clamp_min(TINY)


TINY = 1e-12  # least scale: weights that are all equal have none

MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    # u(z) of the EM steps: minus the score over z.
    "cauchy": lambda z: 2 / (1 + z * z),
    "logistic": lambda z: torch.where(z.abs() < 1e-6, torch.full_like(z, 0.5), torch.tanh(z / 2) / z),
}


def _by_em(x: Tensor, weight: Tensor, mixing: Callable[[Tensor], Tensor], steps: int = STEPS) -> tuple[Tensor, Tensor]:
    """Location and scale of a scale mixture of normals, for weights (..., K); starts from the quartiles."""
    below = weight.cumsum(-1)
    quartile = [x[(below < level).sum(-1).clamp(max=len(x) - 1)] for level in (0.25, 0.5, 0.75)]
    loc, scale = quartile[1], ((quartile[2] - quartile[0]) / 2).clamp_min(TINY)
    for _ in range(steps):
        u = mixing((x - loc[..., None]) / scale[..., None]) * weight
        loc = (u * x).sum(-1) / u.sum(-1)
        scale = (u * (x - loc[..., None]).square()).sum(-1).sqrt().clamp_min(TINY)
    return loc, scale


def _student(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Student's t: EM for every number of degrees of freedom on the grid, of which the most likely is taken."""
    found = []
    for nu in DEGREES:
        loc, scale = _by_em(x, weight, lambda z, nu=nu: (nu + 1) / (nu + z * z))  # type: ignore[misc]
        density = _log_density("student_t", loc, scale, torch.full_like(loc, nu))
        found.append((weight * density(x)).sum(1))
    levels = torch.stack(found)  # (V, R)
    df = _peak(torch.tensor(DEGREES, dtype=x.dtype).log(), levels).exp()
    loc, scale = _by_em(x, weight, lambda z: (df[:, None] + 1) / (df[:, None] + z * z))
    return loc, scale, df


def _peak(places: Tensor, levels: Tensor) -> Tensor:
    """(R,): where the parabola through the highest of the levels (V, R) and its neighbours has its peak."""
    middle = levels.argmax(0).clamp(1, len(places) - 2)
    (a, b, c), (fa, fb, fc) = (
        [values[middle + i] if values.dim() == 1 else values.gather(0, (middle + i)[None])[0] for i in (-1, 0, 1)]
        for values in (places, levels)
    )
    above = (b - a).square() * (fb - fc) - (b - c).square() * (fb - fa)
    below = (b - a) * (fb - fc) - (b - c) * (fb - fa)
    peak = b - 0.5 * above / torch.where(below == 0, torch.ones_like(below), below)
    return torch.where(below == 0, b, peak.clamp(a, c))


def _log_density(family: str, loc: Tensor, scale: Tensor, df: Tensor) -> Callable[[Tensor], Tensor]:
    """From points (K,) to log densities (R, K)."""

    def density(points: Tensor) -> Tensor:
        z = (points - loc[:, None]) / scale[:, None]
        if family == "student_t":
            nu = df[:, None]
            half = (nu + 1) / 2
            constant = torch.lgamma(half) - torch.lgamma(nu / 2) - 0.5 * torch.log(nu * math.pi)
            return constant - half * torch.log1p(z * z / nu) - scale.log()[:, None]
        return FAMILIES[family]().log_prob(z) - scale.log()[:, None]

    return density
