"""Where an ensemble, one chain and parallel chains go, on a posterior of two wells whose masses are known.

    python -m bayesformer.study.double_well docs/double_well.svg

The density is exp(-h (θ² - 1)² + t θ) up to a constant, a barrier of about h nats between wells at -1 and 1, which is
far too high for a chain of this length to cross. Prints the share of every method in the right well, and its standard
deviation within a well over the true one.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.bench.report.axis import Scale
from bayesformer.bench.report.plot import Plot
from bayesformer.bench.report.standalone import Key, write_figure
from bayesformer.core.draws import drawing_from
from bayesformer.core.seeds import generator
from bayesformer.core.types import Batch, Params
from bayesformer.inference import baoab, optimise

HEIGHT, TILT = 8.0, 0.4
MEMBERS, STEPS, BURN_IN = 200, 600, 100
LR, FRICTION, RATE = 0.1, 1.0, 0.05  # of the chains, and the learning rate of the ensemble
SPREAD = 0.5  # of starts: further out a step of the chains overshoots
EDGES = 61


class DoubleWell:
    """The log density of θ (L, 1), every row a chain or a member of its own."""

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log density per row, (L,), and θ as the outputs."""
        del batch
        return self.log_density(params["theta"]).squeeze(-1), params["theta"]

    def value_and_grad(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor, Params]:
        """Log density per row, θ, and the gradient in closed form."""
        theta = params["theta"]
        return *self(params, batch), {"theta": -4 * HEIGHT * theta * (theta.square() - 1) + TILT}

    @staticmethod
    def log_density(theta: Tensor) -> Tensor:
        """-h (θ² - 1)² + t θ, entry by entry."""
        return -HEIGHT * (theta.square() - 1).square() + TILT * theta


class Wells(NamedTuple):
    """Of draws or of the density itself: the share in the right well, and the standard deviation within a well."""

    right: float
    within: float  # root of the mean of the wells' variances, weighted by their shares


def truth() -> Wells:
    """Those of the density itself, by a sum over a fine grid."""
    theta = torch.linspace(-3, 3, 60_001, dtype=torch.float64, device="cpu")
    return wells(theta, DoubleWell.log_density(theta).exp())


def wells(theta: Tensor, weight: Tensor | None = None) -> Wells:
    """Of values (L,) with weights (L,), equal ones unless given."""
    theta = theta.double()
    share = torch.ones_like(theta) if weight is None else weight
    share = share / share.sum()
    variance = 0.0
    for side in (theta > 0, theta <= 0):
        part = share * side
        if side.any():
            mean = (part * theta).sum() / part.sum()
            variance += (part * (theta - mean).square()).sum().item()
    return Wells((share * (theta > 0)).sum().item(), math.sqrt(variance))


def ensemble(starts: Tensor) -> Tensor:
    """(L,): where Adam takes every start (L, 1)."""
    transform = optimise.build(DoubleWell(), optimise.Adam(RATE))
    state = transform.init({"theta": starts})
    for _ in range(STEPS):
        state, _ = transform.update(state, None)
    return state.params["theta"].flatten()


def chains(starts: Tensor, steps: int, seed: int) -> Tensor:
    """(draws,): all draws after burn-in of one BAOAB chain per start (L, 1)."""
    transform = baoab.build(DoubleWell(), LR, 1.0, FRICTION)
    state, kept = transform.init({"theta": starts}), []
    with drawing_from(generator(seed, "double well")):
        for step in range(steps):
            state, _ = transform.update(state, None)
            if step >= BURN_IN:
                kept.append(state.params["theta"].flatten())
    return torch.cat(kept)


def compared(seed: int = 0) -> dict[str, Tensor]:
    """Draws by what made them; starts are N(0, .25), and the one chain begins in the lesser well."""
    starts = SPREAD * torch.randn(MEMBERS, 1, generator=generator(seed, "starts"), device="cpu")
    lesser = torch.full((1, 1), -1.0, device="cpu")
    return {
        f"ensemble of {MEMBERS}": ensemble(starts),
        "one chain": chains(lesser, 10 * STEPS, seed),
        f"{MEMBERS} parallel chains": chains(starts, STEPS, seed + 1),
    }


def figure(draws: dict[str, Tensor], path: Path) -> Path:
    """One panel per method: histogram of its draws, and the true density as a dashed line."""
    grid = torch.linspace(-1.8, 1.8, 241, dtype=torch.float64, device="cpu")
    density = DoubleWell.log_density(grid).exp()
    density = density / torch.trapezoid(density, grid)
    edges = torch.linspace(-1.8, 1.8, EDGES, device="cpu")
    x, y = Scale.over([-1.8, 1.8], pad=0), Scale.over([0.0, 2.2 * density.max().item()], pad=0)
    panels = []
    for i, (name, values) in enumerate(draws.items()):
        plot = Plot(x, y, 260, 190, "θ", clip=True)
        heights = torch.histogram(values.float(), edges, density=True).hist
        plot.histogram(edges.tolist(), heights.tolist(), f"softer m{i}", closed=True)
        plot.line(grid.tolist(), density.tolist(), "ink dash")
        panels.append((name, plot))
    return write_figure(path, panels, [Key("dashed: the posterior", "m", None)])


if __name__ == "__main__":
    found, exact = compared(), truth()
    print(f"posterior: {exact.right:.2f} in the right well, standard deviation within a well {exact.within:.3f}")
    for label, values in found.items():
        seen = wells(values)
        print(f"{label}: {seen.right:.2f} in the right well, {seen.within / exact.within:.2f} of the width")
    print(figure(found, Path(sys.argv[1])))
