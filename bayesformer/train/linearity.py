"""Whether the outputs are linear in the weights as far as a Gaussian over the weights reaches.

    ratio = √( Σ_k (f(μ + Δ_k) - f(μ))² / Σ_k (J Δ_k)² )

over draws μ + Δ_k of the Gaussian, J the Jacobian at its mean μ, the median over outputs of a few examples. The same
draws are in both sums, so that their noise is not in the ratio. Where it is far from 1, sampled and linearised
predictions differ, and at least one of them is wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayesformer.core.doubts import Doubt
from bayesformer.data.in_memory import batch_to
from bayesformer.laws import GaussianLaw
from bayesformer.train.full_batch import FullBatch

DRAWS, EXAMPLES = 4, 32
NUMBERS = 2**24  # of a forward pass of all examples, at most: fewer of a large model are taken
VISIBLE = 1e-5  # of the outputs' size: smaller deviations are lost in float32's rounding of f(μ + Δ) - f(μ)
APART, HUGE = 2.0, 1e30


def linearised_spread(batch: FullBatch, law: GaussianLaw, seed: int) -> float | None:
    """The ratio for a law over the inferred weights of a batch; None where the outputs' spread cannot be seen."""
    made, device = batch.prototype, batch.shell.theta.device
    if batch.shell.theta.dtype.itemsize < torch.float32.itemsize:
        return None
    examples = batch_to(made.data.first(max(1, min(EXAMPLES, NUMBERS // max(1, made.example_numbers)))), device)

    def outputs(theta: Tensor) -> Tensor:
        batch.shell.load(theta)
        return made.likelihood.identified(made.trial(batch.shell, examples).double())

    middle = outputs(law.mean)
    moved, straight = torch.zeros_like(middle), torch.zeros_like(middle)
    for draw in range(DRAWS):
        away = law.row(draw, seed) - law.mean
        moved += (outputs(law.mean + away) - middle).square()
        straight += made.likelihood.identified(batch.tangent(law.mean, examples.inputs, away).double()).square()
    seen = (straight / DRAWS).sqrt() > VISIBLE * middle.square().mean().sqrt()
    ratio = (moved / straight).sqrt()[seen].nan_to_num(HUGE, HUGE)  # outputs of draws may overflow
    return float(ratio.median()) if len(ratio) else None


def of_linearity(ratio: float | None) -> list[Doubt]:
    """A doubt where draws spread less than half or more than twice as much as the linearised network's."""
    if ratio is None or 1 / APART <= ratio <= APART:
        return []
    sentence = (
        f"Outputs under draws of the weights spread {ratio:.2g} times as much as linearised ones: at least one of "
        "the two ways of predicting is wrong here. Compare with Sghmc() or Nuts()."
    )
    return [Doubt("linearisation", sentence, ratio, 1 / APART if ratio < 1 else APART)]
