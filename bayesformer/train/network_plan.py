"""How the epochs of sampling are spent where the posterior is a network's, and what they are worth, before they run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bayesformer.core.doubts import Doubt
from bayesformer.inference.stiff_baoab import PRODUCT_COST

FEW, SOME = 200, 400  # epochs over all chains below which there is one chain, and below which there are two
CHAINS = 4
HALF, FIFTH = (
    0.5,
    0.2,
)  # shares of the epochs that find the anchored optima: up to 5 times the training's, from 20 times
SMALLEST = 10  # examples in a batch, and steps between gradients over all data
ROWS, FEWEST_ROWS = 50, 16  # scores for the stiff directions
EVERY = 10  # steps between looks at the curvature
TIME_PER_DRAW = 3.0  # units of time, in the prior's metric, in which a network's function is forgotten
ALONG = 3.0  # how much stiffer the posterior is along a chain than at an anchored optimum
SHORT = 0.3  # independent draws below which outside the data half of the spread or more was missing
ENOUGH = 20.0  # independent draws that the advice is for


@dataclass(frozen=True)
class NetworkPlan:
    """Chains, their batches and their lengths. Epochs are those of gradient evaluations, over all chains."""

    epochs: float  # B, of optima and sampling together
    chains: int  # C
    optimum: int  # epochs of each anchored optimum; 0 where chains start elsewhere
    batch: int  # n
    longest: float  # K, steps between gradients over all data, at most
    rows: int  # S
    steps: int  # of each chain
    num_data: int  # N

    @property
    def cost(self) -> float:
        """Epochs of gradient evaluations in one step."""
        return step_cost(self.num_data, self.batch, self.longest, self.rows)

    @property
    def sampling(self) -> float:
        """Epochs of all chains after their starts are found."""
        return self.chains * self.steps * self.cost

    def worth(self, largest: float) -> float:
        """X, the independent draws of the function that all chains are worth, for λ = `largest` at the start.

        A draw takes 3 units of time in the prior's metric (HMC's integrated time is 1 to 6), a step 1/√(3λ).
        """
        return self.chains * self.steps / (TIME_PER_DRAW * math.sqrt(ALONG * largest))

    def needed(self, largest: float) -> float:
        """Epochs over all chains that would be worth 20 independent draws."""
        return ENOUGH * TIME_PER_DRAW * math.sqrt(ALONG * largest) * self.cost + self.chains * self.optimum


def step_cost(num_data: int, batch: int, longest: float, rows: int) -> float:
    """Epochs of gradient evaluations in one step: two batches, a share of all data, looks at the curvature.

    K starts at half of `longest` and grows to it where nothing heats: three quarters of it are counted.
    """
    gradients = 1.0 if longest == 1 else 2 * batch / num_data + 1 / (0.75 * longest)
    return gradients + (rows + PRODUCT_COST * batch) / (EVERY * num_data)


def plan(
    num_data: int,
    epochs: float,
    trained: int,
    *,
    fresh: bool,
    chains: int | None = None,
    batch: int | None = None,
    most_rows: int = ROWS,
    fewest_steps: int = 1,
    whole: bool = False,
) -> NetworkPlan:
    """The plan for a number of epochs over all chains.

    One chain below 200 epochs, two below 400, else four: spread arrives before the mean does, and fewer chains that
    find their optimum are better than more that do not. The optima take half of the epochs up to five times those of
    the training, a fifth from twenty times on. Batches and steps between gradients over all data are √N, at least 10;
    where that costs as much as a gradient over all data in every step, that is taken.

    Args:
        num_data: N.
        epochs: of gradient evaluations, over all chains.
        trained: epochs of the search for a mode, which the shares are measured by.
        fresh: whether chains start at anchored optima, which are then part of the epochs.
        chains: as given; None follows from the epochs.
        batch: examples per batch where the data decide it; None is √N.
        most_rows: scores for the stiff directions that fit in memory.
        fewest_steps: of each chain, as the draws that are kept need them.
        whole: whether every step takes a gradient over all data, whatever that costs.
    """
    count = chains or (1 if epochs < FEW else 2 if epochs < SOME else CHAINS)
    root = max(SMALLEST, round(math.sqrt(num_data)))
    size = min(batch or root, num_data)
    longest = max(float(SMALLEST), math.sqrt(num_data))
    if whole or 2 * size / num_data + 1 / longest >= 1:
        longest = 1.0
    rows = min(ROWS, max(FEWEST_ROWS, num_data // 10), most_rows, num_data)
    share = optimum_share(epochs / max(trained, 1)) if fresh else 0.0
    optimum = max(1, round(share * epochs / count)) if fresh else 0
    left = max(epochs / count - optimum, 0.0)
    steps = max(int(left / step_cost(num_data, size, longest, rows)), fewest_steps, 1)
    return NetworkPlan(epochs, count, optimum, size, longest, rows, steps, num_data)


def optimum_share(times: float) -> float:
    """Share of the epochs for the optima: a half up to 5 times the training's, a fifth from 20 times, between linearly
    in the logarithm."""
    way = min(max(math.log(max(times, 1e-9) / 5) / math.log(4), 0.0), 1.0)
    return HALF + (FIFTH - HALF) * way


def forecast(found: NetworkPlan, largest: float) -> str:
    """What the chains will be worth, in words."""
    return (
        f"This is a network: with {found.epochs:.0f} epochs the chains are worth about {found.worth(largest):.2g} "
        "independent draws. Spread inside the data is usually right from about 1; between and outside the data from "
        "about 4."
    )


def doubt_of_length(found: NetworkPlan, largest: float, name: str) -> list[Doubt]:
    """Whether the chains are too short to sample the posterior."""
    worth = found.worth(largest)
    if worth >= SHORT:
        return []
    return [
        Doubt(
            "length",
            f"Too short to sample this posterior: {found.epochs:.0f} epochs are worth about {worth:.2g} independent "
            "draws, and outside the data the spread is about half of the true one or less. "
            f"{name}.epochs={found.needed(largest):.0f} would do; Laplace(predictive='linearised') is better inside "
            "the data at this length.",
            worth,
            SHORT,
        )
    ]
