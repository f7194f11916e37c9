"""The shape of a layer's weights over networks: modes, quantiles, and correlations between weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesformer.core.seeds import generator
from bayesformer.study.weight_laws import histogram_edges

POINTS = 201  # of curves
SUBSAMPLE = 4000  # weights that a kernel density is made of
PROMINENCE = 0.05  # of a mode, over the height of the highest
QUANTILES = 60
CORRELATED = 32  # weights of a layer whose correlations are computed
NULLS = 200  # samples of independent weights that correlations are held against


@dataclass(frozen=True)
class LayerShape:
    """Curves and matrices of one layer for figures, and what they amount to."""

    edges: list[float]
    heights: list[float]  # density of the histogram between the edges
    grid: list[float]
    density: list[float]  # kernel estimate on the grid
    modes: list[float]  # places of its peaks
    normal_quantiles: list[float]
    quantiles: list[float]  # of the weights, standardised by median and quartiles
    correlations: list[list[float]]  # (K, K), over networks
    null: list[list[float]]  # of independent normal weights of as many networks
    correlation: float  # root mean square off the diagonal
    null_interval: tuple[float, float]  # of the same for independent normal weights, 95 %


def shape_of(weights: Tensor, seed: int = 0) -> LayerShape:
    """The shape of the weights (N, ...) of one layer in N networks."""
    flat = weights.detach().double().flatten(1)
    ordered = flat.flatten().sort().values
    edges = histogram_edges(ordered)
    counts = torch.histogram(ordered.clone(), edges)[0]
    heights = counts / len(ordered) / (edges[1] - edges[0])
    grid, density = kernel_density(flat, seed)
    normal, own = quantile_pairs(ordered)
    chosen = torch.linspace(0, flat.shape[1] - 1, min(CORRELATED, flat.shape[1])).round().long().unique()
    found = correlations(flat[:, chosen])
    nulls = [null_correlations(len(flat), len(chosen), seed, i) for i in range(NULLS)]
    levels = torch.tensor([off_diagonal(null) for null in nulls], dtype=torch.float64)
    low, high = torch.quantile(levels, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return LayerShape(
        edges=_short(edges),
        heights=_short(heights),
        grid=_short(grid),
        density=_short(density),
        modes=_short(peaks(grid, density)),
        normal_quantiles=_short(normal),
        quantiles=_short(own),
        correlations=[_short(row, 2) for row in found],
        null=[_short(row, 2) for row in nulls[0]],
        correlation=off_diagonal(found),
        null_interval=(low, high),
    )


def kernel_density(weights: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A Gaussian kernel estimate on a grid, with Silverman's width; of so many weights as networks give evenly."""
    each = max(1, SUBSAMPLE // len(weights))
    index = torch.randint(weights.shape[1], (len(weights), each), generator=generator(seed, "weights", "kernel"))
    sample = weights.gather(1, index).flatten()
    levels = torch.tensor([0.25, 0.75], dtype=sample.dtype)
    low, high = torch.quantile(sample, levels).tolist()
    spread = min(sample.std().item(), (high - low) / 1.349) or sample.std().item() or 1.0
    width = 0.9 * spread * len(sample) ** -0.2
    edges = histogram_edges(weights.flatten().sort().values)
    grid = torch.linspace(edges[0].item(), edges[-1].item(), POINTS, dtype=sample.dtype)
    z = (grid[:, None] - sample) / width
    return grid, torch.exp(-0.5 * z * z).mean(1) / (width * math.sqrt(2 * math.pi))


def peaks(grid: Tensor, density: Tensor) -> Tensor:
    """Places of the peaks that rise above both sides by a twentieth of the highest; at least one."""
    from scipy.signal import find_peaks

    padded = torch.cat([density.new_zeros(1), density, density.new_zeros(1)])  # a peak may be at an end
    found, _ = find_peaks(padded.numpy(), prominence=PROMINENCE * density.max().item())
    places = torch.as_tensor(found, dtype=torch.int64) - 1
    return grid[places] if len(places) else grid[density.argmax()][None]


def quantile_pairs(ordered: Tensor) -> tuple[Tensor, Tensor]:
    """Quantiles of the standard normal law, and of sorted values in units in which a normal law has the same ones."""
    levels = (torch.arange(QUANTILES, dtype=torch.float64) + 0.5) / QUANTILES
    ends = torch.tensor([1e-4, 1e-3, 5e-3], dtype=torch.float64)
    levels = torch.cat([ends, levels, 1 - ends.flip(0)])
    own = ordered[(levels * (len(ordered) - 1)).round().long()]
    low, middle, high = (ordered[round(level * (len(ordered) - 1))] for level in (0.25, 0.5, 0.75))
    unit = ((high - low) / 1.349).clamp_min(1e-300)
    return torch.special.ndtri(levels), (own - middle) / unit


def correlations(weights: Tensor) -> Tensor:
    """(K, K): correlations of K weights over N networks, (N, K); 0 with a weight that never varies."""
    centred = weights - weights.mean(0)
    unit = centred / centred.norm(dim=0).clamp_min(1e-300)
    return unit.mT @ unit


def null_correlations(networks: int, count: int, seed: int, draw: int) -> Tensor:
    """Correlations of independent normal weights, of as many networks."""
    source = generator(seed, "weights", "null", draw)
    return correlations(torch.randn(networks, count, generator=source, dtype=torch.float64))


def off_diagonal(matrix: Tensor) -> float:
    """The root mean square of the entries off the diagonal; NaN if there are none."""
    count = len(matrix)
    if count < 2:
        return math.nan
    rest = matrix.square().sum() - matrix.diagonal().square().sum()
    return (rest / (count * (count - 1))).sqrt().item()


def off_diagonal_histogram(matrix: list[list[float]], edges: list[float]) -> list[float]:
    """Histogram of the entries above the diagonal: len(edges) - 1 densities, for equally spaced edges.

    Entries outside the edges count in the total, so that the integral is the share of entries inside.
    """
    table = torch.tensor(matrix, dtype=torch.float64)
    index = torch.triu_indices(len(table), len(table), offset=1)
    values = table[index[0], index[1]]
    counts = torch.histogram(values, torch.tensor(edges, dtype=torch.float64))[0]
    return (counts / max(len(values), 1) / (edges[1] - edges[0])).tolist()


def _short(values: Tensor, digits: int = 4) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values.tolist()]
