"""Gaussians over weights that start at a mode, in coordinates of the posterior's own size.

`training` finds the mode; what follows has a budget of its own, in epochs with a floor in steps. The coordinates
θ = θ* + W φ (`coordinates.py`) are stretched by √τ for a posterior of temperature τ: then φ is standard normal if the
posterior is the Gaussian that its curvature at the mode stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from bayesformer.core.doubts import Doubt, recorded
from bayesformer.core.types import Transform
from bayesformer.core.vectors import THETA
from bayesformer.inference.affine import AffineMap, Root
from bayesformer.inference.linear_algebra import power_iteration
from bayesformer.laws import Block, Diagonal, Eigenbasis, GaussianLaw
from bayesformer.laws.roots import StackedRoot
from bayesformer.model.skeleton import Skeleton
from bayesformer.posterior import Posterior
from bayesformer.priors.setting import PriorSetting
from bayesformer.train.coordinates import EXAMPLES, POWER, Kind, at_joint_mode, centred, find_coordinates
from bayesformer.train.full_batch import FullBatch
from bayesformer.train.linearity import linearised_spread, of_linearity
from bayesformer.train.members import BuildTransform, Stage, facts_of, fit_stage
from bayesformer.train.output_spread import compared_with_full
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import find_modes, posterior_of, shortened, subset_stage, vector_prior
from bayesformer.train.rounding import rounding_facts
from bayesformer.train.training import Training

Auto = Literal["auto"]


class AroundMode:
    """The mode of a problem and the coordinates around it, ready for a second stage.

    Args:
        method: whose settings `subset`, `draws` and `predictive` are used.
        prototype: the problem.
        prior: of the weights, as the method has it.
        kind: of the coordinates.
        warm_up: the share of the training that looks for the mode; "auto" is all of it.
    """

    def __init__(
        self, method: Any, prototype: Prototype, prior: PriorSetting | None, kind: Kind, warm_up: float | Auto = "auto"
    ) -> None:
        self.method, self.prototype, self.prior = method, prototype, prior
        self.name = type(method).__name__.lower()
        self.warm_up = warm_up
        prototype.refuse_reentrant(self.name)
        self.modes = find_modes(prototype, self.name, prior, 1.0 if warm_up == "auto" else warm_up)
        if warm_up == "auto":
            self.modes = at_joint_mode(prototype, self.modes, method.subset, prior)
        part = subset_stage(prototype, self.modes, method.subset)
        self.coordinates = find_coordinates(part, prior, kind=kind)
        self.part = centred(part, [self.coordinates])

    @property
    def vector_prior(self) -> Any:
        """The prior over the inferred weights."""
        return vector_prior(self.prototype, self.prior, self.part.space)

    def full_batch(self) -> FullBatch:
        """U of all data over the inferred weights, in evaluation mode."""
        skeleton: Skeleton = self.prototype.skeleton if self.part.skeletons is None else self.part.skeletons[0]
        return FullBatch(self.prototype, skeleton, self.part.starts[0], self.vector_prior)

    def calm_root(self) -> Root:
        """A root whose law is in no direction wider than the curvature's: at the scale of the diagonal, over √λmax.

        Where most weights are the prior's, 1 / H_ii is the prior's width in each of them, and draws of all together
        lose what the network has learned (a transformer of 50,000 weights: -46 nats per series instead of -26).
        """
        found = self.coordinates
        root, largest = at_diagonal_scale(found.root, found.curvature_diagonal), found.largest
        if found.kind != "diag":
            times = self.full_batch().hessian(found.center, EXAMPLES)
            largest = power_iteration(
                lambda v: root.times_root(times(root.colour(v))), found.center, iterations=3 * POWER
            ).value
        return at_diagonal_scale(found.root, found.curvature_diagonal * max(largest, 1.0))

    def compared(self, law: GaussianLaw) -> tuple[list[Doubt], dict[str, float]]:
        """Doubts about the spread of outputs and weights under a law where the posterior is near a Gaussian.

        Of networks about how far from linear they are under its draws.
        """
        found, heat = self.coordinates, getattr(self.method, "temperature", 1.0)
        if found.regime != "gaussian":
            ratio = linearised_spread(self.full_batch(), law, self.prototype.problem.seed)
            return of_linearity(ratio), {} if ratio is None else {"linearised_spread": ratio}
        return compared_with_full(self.full_batch(), found.center, law, temperature=heat, precision=found.precision)

    def training(self, epochs: int | Auto, own: int, least: int) -> Training:
        """How the second stage is trained: for a number of epochs that was given, else for `own` and `least` steps.

        Without either, where `warm_up` leaves a share of the training, that share. `max_steps` bounds this stage, too.
        """
        whole = self.prototype.problem.training.evened(self.prototype.problem.num_data)
        if epochs != "auto":
            return replace(whole, epochs=epochs)
        if self.warm_up != "auto":
            return shortened(whole, 1 - self.warm_up)
        per_epoch = Stage(self.prototype, self.name, replace(whole, epochs=1, max_steps=None)).steps
        return replace(whole, epochs=max(own, -(-least // per_epoch)))

    def run(
        self,
        build: BuildTransform,
        law: Callable[[Any], GaussianLaw],
        training: Training,
        *,
        prior_in_objective: bool = True,
        replacement: bool = False,
        held: tuple[str, ...] | None = None,
        check: Callable[[GaussianLaw], Sequence[Doubt]] | None = None,
    ) -> Posterior:
        """The second stage: an algorithm whose last state gives a Gaussian over the inferred weights.

        Args:
            build: makes the transform, whose state may be in coordinates (`started`).
            law: from its last state to a law over the inferred weights θ.
            training: its length.
            prior_in_objective: whether the log joint holds the prior.
            replacement: whether batches are drawn with replacement.
            held: modules in evaluation mode; None: those of the prototype.
            check: doubts about the law that was found.
        """
        prototype, method = self.prototype, self.method
        stage = Stage(
            prototype,
            self.name,
            training,
            build=build,
            prior=self.vector_prior if prior_in_objective else None,
            starts=self.part.starts,
            skeletons=self.part.skeletons,
            replacement=replacement,
            held=held,
            identity={"prior": repr(self.prior), "settings": repr(method)},
        )
        fitted = fit_stage(stage, 1)
        stages = [fitted] if self.modes.stage is None else [self.modes.stage, fitted]
        inner = law(fitted.states[0])
        found = self.part.law(inner, fitted)
        beside, numbers = ([], {}) if check is None else self.compared(inner)
        doubts = () if check is None else (*check(inner), *beside)
        facts = facts_of(self.name, method, prototype, *stages) | rounding_facts(prototype.skeleton, found)
        facts |= {"coordinates": self.coordinates.facts} | ({} if check is None else recorded(doubts))
        facts |= numbers
        return posterior_of(prototype, found, facts, default_draws=method.draws, predictive=method.predictive)


def tempered_map(center: Tensor, root: Root, temperature: float) -> AffineMap:
    """θ = center + √τ W φ; at τ = 0, where nothing has a size, as at 1."""
    one = temperature if temperature > 0 else 1.0

    def tempered(block: Block) -> Block:
        return block.stretched(torch.full_like(block.diagonal(), one))

    if isinstance(root, StackedRoot):
        return AffineMap(center, StackedRoot(root.places, tuple(map(tempered, root.blocks))))
    assert isinstance(root, Block)
    block = tempered(root)
    return AffineMap(center, block, block.diagonal().sqrt() if isinstance(block, Diagonal) else None)


def at_diagonal_scale(root: Root, diagonal: Tensor) -> Root:
    """The axes q of a root, each with the variance 1 / Σ_i q_i² H_ii, for the diagonal (P,) of H.

    That is the root itself for a diagonal one, a diagonal one for a dense one, and keeps a Kronecker basis.
    """
    if not isinstance(root, StackedRoot):
        return Diagonal(diagonal.reciprocal())
    blocks: list[Block] = []
    for place, block in zip(root.places, root.blocks, strict=True):
        own = diagonal[place]
        if not isinstance(block, Eigenbasis):
            blocks.append(Diagonal(own.reciprocal()))
            continue
        squared = (q if q is None else q.square() for q in (block.out_vectors, block.in_vectors))
        basis = Eigenbasis(block.precisions, *squared)
        blocks.append(replace(block, precisions=basis.rotate(own.view(block.shape))))
    return StackedRoot(root.places, tuple(blocks))


def started(transform: Transform, coordinates: AffineMap) -> Transform:
    """The transform with its state in φ, from the centre, whatever θ it is given to start from."""
    return Transform(lambda _: transform.init({THETA: coordinates.origin()}), transform.update)
