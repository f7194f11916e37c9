"""Whether a Gaussian over weights that leaves out correlations has the outputs and the weights of the full curvature.

    r = median over training outputs f of √(∇fᵀ Σ ∇f / ∇fᵀ τ H⁻¹ ∇f)
    s = least over parameters of the median over their weights of √(Σ_ii / τ H⁻¹_ii)

with Σ the covariance that was found, H the whole curvature of U and τ the temperature. A diagonal Σ with the right
variances leaves out the correlations of the weights, which may add up in an output or cancel there. Predictions are
about other inputs than those of training: what the target of an output itself adds to the curvature, λ ∇f ∇fᵀ, is taken
out of H and of Σ⁻¹ before (Sherman & Morrison 1950: v becomes v / (1 - λ v)).

Outputs near the data may be right (r = 1) where weights are not: inputs far from 0, or nearly equal ones, tie weights
to each other, and what is known of each alone is far less than given the others. s sees that, where H is written down;
then predictions away from the data are too sure.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayesformer.core.doubts import Doubt
from bayesformer.inference.linear_algebra import conjugate_gradients
from bayesformer.laws import Dense, Diagonal, GaussianLaw
from bayesformer.model.space import Space
from bayesformer.train.full_batch import FullBatch
from bayesformer.train.metric import kronecker_root, precision_at
from bayesformer.train.newton import cheap_matrix

LOW, HIGH = 0.9, 1.2  # r of diagonal fits: .91 to 1.14 of regressions whose outputs are right, .71 to .89 and 1.25
# to 1.44 of last layers whose logits are not; narrow outputs claim what is not known, and are said sooner
OUTPUTS = 128  # whose gradients are taken: ratios differ by .1 to .2, so that their median is known to about .02
SOLVED = 32  # of them for which H⁻¹ ∇f is found by products
PRODUCTS = 6  # for each of these, at most: standard deviations then are .3 % too small, 1 % at worst
RESIDUAL = 0.05  # of conjugate gradients, over ∇f; the error of the variance is about its square
NARROW = 0.3  # s of diagonal fits: .40 to .50 where inputs have condition 10, .48 to .62 logistic, .03 to .19 at 1000
LEAST = 0.1  # of an output's precision that is not its own target's
NUMBERS = 2**22  # of all gradients


def compared_with_full(
    batch: FullBatch, theta: Tensor, law: GaussianLaw, *, temperature: float = 1.0, precision: Tensor | None = None
) -> tuple[list[Doubt], dict[str, float]]:
    """Doubts about outputs and weights, and the numbers r and s behind them, those that could be measured.

    Arguments as for `output_spread`; H is written down here where that is cheap.
    """
    if precision is None and _is_compared(law) and batch.is_objective and batch.is_linear():
        precision = precision_at(batch, theta) if cheap_matrix(batch, linear=True) else None
    doubts, numbers = [], {}
    ratio = output_spread(batch, theta, law, temperature=temperature, precision=precision)
    if ratio is not None:
        doubts, numbers = of_outputs(ratio), {"output_spread": ratio}
    if precision is not None and _is_compared(law) and temperature > 0:
        name, narrow = weight_spread(batch.space, law, precision * (1 / temperature))
        doubts, numbers = doubts + of_weights(name, narrow), numbers | {"weight_spread": narrow}
    return doubts, numbers


def weight_spread(space: Space, law: GaussianLaw, precision: Tensor) -> tuple[str, float]:
    """The parameter whose weights are narrowest beside the inverse of `precision` (P, P), and s there."""
    factor, failed = torch.linalg.cholesky_ex(precision)
    if failed:
        return space.names[0], float("nan")
    ratio = (law.variance().double() / torch.cholesky_inverse(factor).diagonal()).sqrt()
    found = {name: float(ratio[place].median()) for name, place in space.slices.items() if ratio[place].numel()}
    name = min(found, key=found.__getitem__)
    return name, found[name]


def output_spread(
    batch: FullBatch,
    theta: Tensor,
    law: GaussianLaw,
    *,
    temperature: float = 1.0,
    precision: Tensor | None = None,
) -> float | None:
    """r at the weights θ (P,); None where Σ is of another form, the outputs are not linear or H would cost too much.

    Args:
        batch: U over the inferred weights, with the prior that the law has.
        theta: where H and the gradients of outputs are taken.
        law: over the same weights.
        temperature: τ, with τ H⁻¹ the covariance that the law stands for.
        precision: (P, P), H where it is written down already: the outputs are then taken as they are.
    """
    if not _is_compared(law) or not temperature > 0:
        return None
    if precision is None:
        if not (batch.is_objective and batch.is_linear()):
            return None
        if cheap_matrix(batch, linear=True):
            precision = precision_at(batch, theta)
    if precision is None and not batch.is_cheap:
        return None
    if OUTPUTS * batch.size > NUMBERS:
        return None
    rows, curved = batch.output_slopes(theta, OUTPUTS)
    full = _by_matrix(precision, rows) if precision is not None else by_products(batch, theta, rows)
    ratio = (_own(law, rows, curved, temperature) / _without(full, curved)).sqrt()
    ratio = ratio[ratio.isfinite()]
    return float(ratio.median()) if len(ratio) else None


def _is_compared(law: GaussianLaw) -> bool:
    """Whether a law leaves something of a dense matrix over all weights out."""
    whole = len(law.blocks) == 1 and isinstance(law.blocks[0], Dense) and law.blocks[0].size == law.size
    return bool(law.blocks) and not whole


def _own(law: GaussianLaw, rows: Tensor, curved: Tensor, temperature: float) -> Tensor:
    """(R,): gᵀ Σ g / τ of every row g without its own share of Σ⁻¹, in the form that every block has."""
    total = torch.zeros_like(curved)
    for place, block in zip(law.places, law.blocks, strict=True):
        own = rows[:, place]
        if isinstance(block, Diagonal):
            each = block.diagonal().double() * own.double().square() / temperature
            total += _without(each, curved[:, None]).sum(1)
        else:
            total += _without((block.times(own).double() * own.double()).sum(1) / temperature, curved)
    return total


def _without(variance: Tensor, curved: Tensor) -> Tensor:
    """The variance of an output before its own target, which has the curvature λ, was seen."""
    return variance / (1 - curved * variance).clamp_min(LEAST)


def _by_matrix(precision: Tensor, rows: Tensor) -> Tensor:
    """(R,): gᵀ H⁻¹ g of every row g; not finite where H is not positive definite."""
    factor, failed = torch.linalg.cholesky_ex(precision)
    if failed:
        return torch.full_like(rows[:, 0], float("nan"), dtype=torch.float64)
    return torch.linalg.solve_triangular(factor, rows.mT.double(), upper=False).square().sum(0)


def by_products(batch: FullBatch, theta: Tensor, rows: Tensor) -> Tensor:
    """(R,): about gᵀ H⁻¹ g of every row g, without H: by a Kronecker metric that some rows correct.

    For these H⁻¹ g is found by conjugate gradients, and all are multiplied by the median of what that changes: it is
    nearly the same for all outputs, where the ratio to a diagonal Σ differs by a fifth from one to the next.
    """
    root, times = kronecker_root(batch, theta), batch.hessian(theta)
    near = root.times_root(rows).double().square().sum(1)
    found = []
    for row in rows[:SOLVED]:
        solved = conjugate_gradients(
            times,
            row,
            tolerance=RESIDUAL,
            iterations=PRODUCTS,
            precondition=lambda v: root.colour(root.times_root(v)),
        )
        found.append(float(row.double() @ solved.x.double()))
    exact = torch.tensor(found, dtype=torch.float64, device=theta.device)
    return near * (exact / near[:SOLVED]).median()


def of_weights(name: str, narrow: float) -> list[Doubt]:
    """A doubt where the weights of a parameter have less than .3 of their spread under the full curvature."""
    if not narrow < NARROW:
        return []
    sentence = (
        f"The weights of {name} have {narrow:.2f} of the standard deviation that the full curvature gives them, since "
        "this Gaussian leaves out how weights vary together: away from the data predictions are too sure. Centre and "
        "scale the inputs, or use Laplace(structure='full'), Vi(kind='dense') or Sghmc()."
    )
    return [Doubt("weights", sentence, narrow, NARROW)]


def of_outputs(ratio: float | None) -> list[Doubt]:
    """A doubt where outputs are narrower or wider than under the full curvature; None was not measured."""
    if ratio is None or LOW <= ratio <= HIGH:
        return []
    sentence = (
        f"Outputs near the data have {ratio:.2f} of the standard deviation that the full curvature gives them, since "
        "this Gaussian leaves out how the weights vary together, or (low_rank, subnetwork) most directions; elsewhere "
        "they may be off the other way. Use Vi(kind='dense'), Laplace(structure='full') or, for many weights, Sghmc()."
    )
    return [Doubt("outputs", sentence, ratio, LOW if ratio < LOW else HIGH)]
