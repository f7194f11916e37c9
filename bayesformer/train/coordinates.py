"""Coordinates in units of the posterior's standard deviation, θ = θ* + W φ, and what is found on the way to them.

    found = find_coordinates(subset_stage(prototype, modes, "*"), "normal(0, 1)")
    found.center, found.root, found.largest, found.decrement, found.rise, found.regime

With WᵀHW ≈ I, H = Σ_n J_nᵀ Λ_n J_n + Π at the mode θ*, every step size of a sampler or of variational inference is a
pure number, whatever N, the data and the model are. Whether that helps is tested: draws θ* + W z of the Gaussian that H
stands for should raise U by P/2 on average. Where they raise it by more than twice that, and the outputs are not linear
in the weights, the curvature at the mode says little of the posterior ("network"), and only the prior's scale is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from bayesformer.core.seeds import generator
from bayesformer.inference.affine import Root
from bayesformer.inference.linear_algebra import power_iteration
from bayesformer.laws import Diagonal
from bayesformer.model.space import Choice
from bayesformer.priors.setting import PriorSetting
from bayesformer.train.full_batch import FullBatch
from bayesformer.train.metric import FLAT, covariance_root, kronecker_root
from bayesformer.train.newton import DENSE, FEW, cheap_matrix, polish, steps_allowed
from bayesformer.train.prototype import Prototype, Start
from bayesformer.train.recipe import Modes, SubsetStage, subset_stage, vector_prior

Kind = Literal["dense", "kron", "diag", "prior"]
Regime = Literal["gaussian", "network"]

RISE = 2.0  # ρ above which the regime is a network's: 1.3 at most seen for linear models, 4.9 at least for others
RISE_DRAWS = 16  # for ρ: its error is √(2 / (16 P))
POWER = 10  # products for the largest curvature, where there is no matrix
EXAMPLES = 512  # for the largest curvature of a network
SMALLEST = 1e-12


@dataclass(frozen=True)
class Coordinates:
    """θ = center + root φ, with the numbers that decide how a method runs in them."""

    center: Tensor  # (P,), the mode θ* of the inferred subset
    root: Root  # W with WᵀHW ≈ I
    kind: Kind
    largest: float  # the largest eigenvalue of WᵀHW
    decrement: float  # δ, the distance to the mode in posterior standard deviations; NaN where it was not asked for
    rise: float | None  # ρ, the mean rise of U under draws θ* + W z over P/2: 1 for a Gaussian; None where not tested
    regime: Regime
    curvature_diagonal: Tensor  # (P,), the diagonal of H, prior included
    prior_precision: Tensor  # (P,), the diagonal of Π
    epochs: float  # spent here, in epochs of gradient evaluations
    smallest: float | None = None  # the smallest eigenvalue of WᵀHW; None where H was never written down
    precision: Tensor | None = None  # (P, P), H at the centre in float64, where it was written down
    heavy: float = 0.0  # share of the weights of which a prior with heavy tails is at least half of H_ii

    @property
    def facts(self) -> dict[str, object]:
        """The numbers, for the facts of a posterior."""
        names = ("kind", "regime", "decrement", "rise", "largest", "smallest")
        return {**{name: getattr(self, name) for name in names}, "search_epochs": self.epochs}


def find_coordinates(
    part: SubsetStage,
    prior: PriorSetting | None,
    *,
    kind: Kind | Literal["auto"] = "auto",
    chain: int = 0,
    test: bool = True,
    dense_up_to: int = FEW,
) -> Coordinates:
    """Coordinates around the mode that a chain of `part` starts from, which a few Gauss-Newton steps bring nearer.

    Args:
        part: the inferred weights and where they start.
        prior: as the method has it; an earlier posterior of the problem takes its place.
        kind: of W: "dense", "kron" or "diag" (of the Gauss-Newton matrix), "prior" (Π^-½); "auto" is the prior in a
            network's regime, else dense up to 500 weights and Kronecker above.
        chain: whose start.
        test: whether the regime is tested by draws; otherwise it is a network's unless the outputs are linear.
        dense_up_to: weights up to which "auto" is dense.
    """
    refuse_too_large(kind, part.space.size)
    part.prototype.refuse_reentrant("this method")
    batch = full_batch(part, prior, chain)
    return _Search(batch, part.starts[chain].theta, kind, test, dense_up_to).found()


def determined_shares(found: Coordinates) -> Tensor | None:
    """(P,): how much of the precision along each axis of W is the data's, 1 - (Wᵀ Π W)_qq; None above 2000 weights."""
    size = len(found.center)
    if size > DENSE:
        return None
    rows = found.root.times_root(torch.diag(found.prior_precision.sqrt()))  # Π^½ W
    return (1 - rows.square().sum(0)).clamp(SMALLEST, 1)


def polished(part: SubsetStage, prior: PriorSetting | None, chain: int = 0) -> tuple[SubsetStage, float | None]:
    """The stage with one chain nearer to its mode by Gauss-Newton steps, and the decrement δ that is left.

    For models that are linear in the weights, or have at most 500; others stay as they are, and their δ is None.
    """
    batch = full_batch(part, prior, chain)
    linear = batch.is_objective and batch.is_linear()
    dense = cheap_matrix(batch, linear)
    if not dense and not linear:
        return part, None
    start = part.starts[chain]
    found = polish(batch, start.theta.clone(), dense=dense, most=steps_allowed(batch, linear))
    starts = list(part.starts)
    starts[chain] = Start(found.theta, start.buffers)
    return replace(part, starts=starts), found.decrement


def at_joint_mode(prototype: Prototype, modes: Modes, subset: Choice, prior: PriorSetting | None) -> Modes:
    """Modes of which the weights outside a subset, which stay where they are, have been found as well.

    Gauss-Newton steps on all learned weights, where `polished` makes any: steps on the subset alone would find its mode
    given the others as Adam left them, several posterior standard deviations from their own.
    """
    if modes.stage is None or prototype.space.select(subset) == prototype.space:
        return modes
    whole = subset_stage(prototype, modes, "*")
    rows = [polished(whole, prior, chain)[0].starts[chain].theta for chain in range(len(modes.theta))]
    return replace(modes, theta=torch.stack(rows))


def full_batch(part: SubsetStage, prior: PriorSetting | None, chain: int = 0) -> FullBatch:
    """U of the weights of one chain, with the method's prior or the earlier posterior that takes its place."""
    skeleton = part.prototype.skeleton if part.skeletons is None else part.skeletons[chain]
    return FullBatch(part.prototype, skeleton, part.starts[chain], vector_prior(part.prototype, prior, part.space))


def centred(part: SubsetStage, found: Sequence[Coordinates]) -> SubsetStage:
    """The same stage with every chain at the centre of its coordinates; one coordinates serve all chains."""
    own = [found[min(chain, len(found) - 1)].center for chain in range(len(part.starts))]
    starts = [Start(center.clone(), start.buffers) for center, start in zip(own, part.starts, strict=True)]
    return replace(part, starts=starts)


def refuse_too_large(kind: str, size: int, instead: str = "kind='kron' or 'diag'") -> None:
    """An error before work begins where a dense matrix of this many weights would not be used, with what to use."""
    if kind == "dense" and size > DENSE:
        gib = 8 * size * size / 2**30
        raise ValueError(
            f"dense coordinates must have at most {DENSE} weights; got {size}, whose matrix takes {gib:.1f} GiB. "
            f"Use {instead}, or a smaller subset."
        )


class _Search:
    """The steps of `find_coordinates` on one full batch."""

    def __init__(self, batch: FullBatch, theta: Tensor, kind: str, test: bool, dense_up_to: int) -> None:
        self.batch, self.kind, self.test, self.dense_up_to = batch, kind, test, dense_up_to
        self.theta = theta.clone()
        self.linear = batch.is_objective and batch.is_linear()
        self.dense = cheap_matrix(batch, self.linear) or kind == "dense"
        self.precision: Tensor | None = None  # (P, P), H in float64
        self.decrement = float("nan")
        self.rise: float | None = None

    def found(self) -> Coordinates:
        """Run the search: polish the mode, test the regime, choose the kind of W, compute W and extreme eigenvalues.

        The mode is polished by Gauss-Newton steps, only for linear models and those whose (P, P) matrix is affordable.
        """
        if self.dense or self.linear:
            found = polish(self.batch, self.theta, dense=self.dense, most=steps_allowed(self.batch, self.linear))
            self.theta, self.decrement, self.precision = found.theta, found.decrement, found.precision
        regime = self._regime()
        kind = self._kind(regime)
        root = self._root(kind)
        return Coordinates(
            center=self.theta,
            root=root,
            kind=kind,
            largest=1.0 if kind == "dense" else self._largest(root, regime),
            decrement=self.decrement,
            rise=self.rise,
            regime=regime,
            curvature_diagonal=self.diagonal,
            prior_precision=self.prior,
            epochs=self.batch.epochs,
            smallest=1.0 if kind == "dense" else self._smallest(root),
            precision=self.precision,
            heavy=float((self.batch.prior.heavy(self.theta) & (2 * self.prior >= self.diagonal)).double().mean()),
        )

    @cached_property
    def data_diagonal(self) -> Tensor:
        """(P,): the diagonal of the data's Gauss-Newton matrix."""
        if self.precision is not None:
            own = self.precision.diagonal().to(self.theta) - self.batch.prior.precision(self.theta)
            return own.clamp_min(0)
        total, found = torch.zeros_like(self.theta), self.batch.curvature(self.theta, "diag")
        for place, block in zip(found.places, found.structures, strict=True):
            total[place] = block.diagonal()
        return total

    @cached_property
    def prior(self) -> Tensor:
        """(P,): the prior's precision, a little above 0 where it is flat."""
        own = self.batch.prior.precision(self.theta)
        if bool((own > 0).all()):
            return own
        return own.clamp_min(FLAT * float((self.data_diagonal + own).mean()) or 1.0)

    @property
    def diagonal(self) -> Tensor:
        """(P,): the diagonal of H, prior included."""
        return self.data_diagonal + self.prior

    def _regime(self) -> Regime:
        """By ρ of dense draws, or of Kronecker draws where the outputs are linear in the weights.

        Outputs that are linear make U convex: whitening at the mode then is right whatever ρ is, and ρ is measured
        for what it says of the Gaussian itself. Where the outputs are not linear and H too large, it is a network's.
        """
        if not self.test or (self.precision is None and not self.linear):
            return "gaussian" if self.linear else "network"
        root = self._root("kron" if self.precision is None else "dense")
        source = generator(self.batch.prototype.problem.seed, "regime", device=self.theta.device)
        base, rises = self.batch.potential(self.theta), []
        for _ in range(RISE_DRAWS):
            noise = torch.randn(len(self.theta), generator=source, dtype=self.theta.dtype, device=self.theta.device)
            rises.append(self.batch.potential(self.theta + root.colour(noise)) - base)
        self.rise = 2 * sum(rises) / (RISE_DRAWS * self.batch.size)
        return "gaussian" if self.linear or self.rise <= RISE else "network"

    def _kind(self, regime: Regime) -> Kind:
        if self.kind != "auto":
            return self.kind  # type: ignore[return-value]
        if regime == "network":
            return "prior"
        return "dense" if self.batch.size <= self.dense_up_to else "kron"

    def _root(self, kind: str) -> Root:
        if kind == "kron":
            return self.kronecker
        if kind == "dense":
            assert self.precision is not None
            return covariance_root(self.precision, self.theta)
        return Diagonal((self.prior if kind == "prior" else self.diagonal).reciprocal())

    @cached_property
    def kronecker(self) -> Root:
        """W in the Kronecker basis at the mode."""
        return kronecker_root(self.batch, self.theta)

    def _smallest(self, root: Root) -> float | None:
        """The smallest eigenvalue of WᵀHW, where H is there."""
        if self.precision is None:
            return None
        once = root.times_root(self.precision.to(self.theta))  # (P, P), rows H W
        whole = root.times_root(once.mT)  # Wᵀ H W
        return float(torch.linalg.eigvalsh(whole.double())[0])

    def _largest(self, root: Root, regime: Regime) -> float:
        """The largest eigenvalue of WᵀHW, by power iteration; of a network, from some of its examples."""
        if self.precision is not None:
            whole = self.precision.to(self.theta)
            found = power_iteration(lambda v: root.times_root(whole @ root.colour(v)), self.theta)
            return max(found.value, SMALLEST)
        times = self.batch.hessian(self.theta, EXAMPLES if regime == "network" else None)
        found = power_iteration(lambda v: root.times_root(times(root.colour(v))), self.theta, iterations=POWER)
        return max(found.value, SMALLEST)


__all__ = [
    "DENSE",
    "FEW",
    "Coordinates",
    "centred",
    "determined_shares",
    "find_coordinates",
    "full_batch",
    "polished",
    "refuse_too_large",
]
