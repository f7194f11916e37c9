"""What the recipes of methods share: a mode, a stage on a subset of the weights around it, and the posterior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bayesformer.core.doubts import Doubt, with_doubts
from bayesformer.core.types import Params
from bayesformer.laws import GaussianLaw, Law, MixtureLaw, Samples
from bayesformer.laws.samples import shared
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Choice, Space
from bayesformer.posterior import Posterior
from bayesformer.priors.setting import PriorSetting, prior_of
from bayesformer.train.members import BuildTransform, Fitted, Stage, facts_of, fit_stage
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype, Start
from bayesformer.train.rounding import rounding_facts
from bayesformer.train.training import Training
from bayesformer.train.vector_prior import FlatPrior, GaussianPrior, NamedPrior, VectorPrior

AUGMENTED = Doubt(
    "random data",
    "Examples differ from reading to reading (augmentation, or a sampler that draws them): the posterior is of the "
    "log-likelihood averaged over readings, which is narrower or wider than that of the data. Give data without "
    "augmentation, or the dataset without its sampler, where the spread matters.",
)
FEWEST_STEPS = 400  # of the search for a mode, unless its length was given
MODE_SHARE = 0.5  # of the epochs, to find the mode of the other weights where a subset is inferred


def vector_prior(prototype: Prototype, setting: PriorSetting | None, space: Space | None = None) -> VectorPrior:
    """The prior over the weights of a space: the problem's earlier posterior if there is one, else as the setting says.

    `space` is all that is learned, or a part of it.
    """
    whole, part = prototype.space, space or prototype.space
    earlier = prototype.problem.prior
    if earlier is not None:
        return GaussianPrior(_narrowed(earlier_law(prototype), whole, part))
    return FlatPrior() if setting is None else NamedPrior(prior_of(setting), part, whole.names)


def earlier_law(prototype: Prototype) -> GaussianLaw:
    """The law of the problem's earlier posterior, checked to be a Gaussian over the same weights."""
    earlier = prototype.problem.prior
    assert earlier is not None
    if not isinstance(earlier.law, GaussianLaw):
        raise ValueError(
            f"prior must be a posterior that is a Gaussian over the weights; got one of {type(earlier.law).__name__} "
            f"({earlier.facts.get('method', {}).get('name', 'unknown')})."
        )
    if earlier.space.names != prototype.space.names or earlier.space.shapes != prototype.space.shapes:
        raise ValueError(
            "prior must be a posterior over the same weights as are learned now; "
            f"got {len(earlier.space.names)} weights, {len(prototype.space.names)} are learned."
        )
    return earlier.law


def _narrowed(law: GaussianLaw, whole: Space, part: Space) -> GaussianLaw:
    """The law over a part of the weights, given that the others stay at the mean."""
    if part == whole:
        return law
    inside = torch.zeros(whole.size, dtype=torch.bool, device=law.mean.device)
    where = whole.places(part, law.mean.device)
    inside[where] = True
    position = torch.cumsum(inside, 0) - 1
    places, blocks = [], []
    for place, block in zip(law.places, law.blocks, strict=True):
        index = torch.arange(whole.size, device=law.mean.device)[place]
        if bool(inside[index].all()):
            places.append(position[index])
            blocks.append(block)
        elif bool(inside[index].any()):
            raise ValueError(
                "subset must take whole blocks of the earlier posterior that is the prior; "
                f"it takes a part of a {type(block).__name__} block of {block.size} weights."
            )
    return GaussianLaw(law.mean[where], tuple(places), tuple(blocks), law.buffers)


def refuse_earlier(problem: Problem, name: str) -> None:
    """For methods whose own parameters are other than the weights that an earlier posterior is over."""
    if problem.prior is not None:
        raise ValueError(
            f"prior must be left out for {name}, whose parameters are those of a random network and not the weights "
            "that an earlier posterior is over; use map, vi, ivon, swag, ekf, laplace or a sampler."
        )


def shortened(training: Training, share: float) -> Training:
    """The same training with a share of its epochs and steps, at least one."""
    steps = training.max_steps
    return replace(
        training,
        epochs=max(1, round(training.epochs * share)),
        max_steps=None if steps is None else max(1, round(steps * share)),
    )


def is_proper(prototype: Prototype, subset: Choice) -> bool:
    """Whether a subset leaves some of the learned weights out; an error if it takes none."""
    return prototype.space.select(subset) != prototype.space


@dataclass(frozen=True)
class Modes:
    """Where the second stage of a fit starts: weights and buffers of every chain."""

    theta: Tensor  # (C, P)
    buffers: Params  # each (C, ...), or (1, ...)
    stage: Fitted | None  # the training that found them; None where the starts themselves are taken

    def start(self, chain: int) -> Start:
        """The weights and buffers of one chain."""
        own = {name: value[chain if len(value) > 1 else 0] for name, value in self.buffers.items()}
        return Start(self.theta[chain], own)

    @property
    def distinct(self) -> bool:
        """Whether chains have modes of their own."""
        return len(self.theta) > 1 and not bool((self.theta == self.theta[:1]).all())

    def repeated(self, chains: int) -> Modes:
        """The one mode for several chains."""
        return replace(self, theta=self.theta[:1].repeat(chains, 1))


def find_modes(prototype: Prototype, name: str, prior: PriorSetting | None, share: float, chains: int = 1) -> Modes:
    """The modes that Adam finds in a share of the training; with share 0 the starts themselves."""
    if share == 0:
        starts = [prototype.start(chain) for chain in range(chains)]
        theta = torch.stack([_earlier_or(prototype, start).theta for start in starts])
        return Modes(theta, {k: torch.stack([s.buffers[k] for s in starts]) for k in starts[0].buffers}, None)
    prototype.data.require_passes(2)  # whatever asks for a mode reads the data again after it
    starts_ = None
    if prototype.problem.prior is not None:
        starts_ = [_earlier_or(prototype, prototype.start(chain)) for chain in range(chains)]
    stage = Stage(
        prototype,
        f"{name}-mode",
        mode_training(prototype, share),
        prior=vector_prior(prototype, prior),
        validation=prototype.validation,
        starts=starts_,
        identity={"prior": repr(prior)},
    )
    found = fit_stage(stage, chains)
    return Modes(found.theta, found.buffers, found)


def mode_training(prototype: Prototype, share: float) -> Training:
    """A share of the training; where its length was left to the library, all of it and at least 400 steps.

    Few examples make few steps in 100 epochs, and Adam goes no farther than its rate in each.
    """
    training = prototype.problem.training
    if share < 1 or training.max_steps is not None or training.epochs != Training.epochs:
        return shortened(training, share)
    per_epoch = Stage(prototype, "mode", replace(training, epochs=1)).steps
    return replace(training, epochs=max(training.epochs, -(-FEWEST_STEPS // per_epoch)))


def _earlier_or(prototype: Prototype, start: Start) -> Start:
    """The mean of the earlier posterior where there is one, else the start itself."""
    if prototype.problem.prior is None:
        return start
    law = earlier_law(prototype)
    return Start(law.mean.clone(), {**start.buffers, **{k: v[0] for k, v in law.buffers.items()}})


@dataclass(frozen=True)
class SubsetStage:
    """A stage on a subset of the weights around modes, ready to run; the other weights stay at the mode."""

    prototype: Prototype
    modes: Modes
    space: Space  # of the subset
    place: slice | Tensor  # of the subset in the whole vector
    starts: Sequence[Start]
    skeletons: Sequence[Skeleton] | None

    def law(self, inner: GaussianLaw, fitted: Fitted, chain: int = 0) -> GaussianLaw:
        """A law over the subset as one over all learned weights, with the buffers of the end of the stage."""
        whole = inner if self.skeletons is None else inner.at(self.modes.theta[chain], self.place)
        own = {name: chain if len(value) > 1 else 0 for name, value in fitted.buffers.items()}
        return replace(whole, buffers={name: value[own[name]][None] for name, value in fitted.buffers.items()})

    def samples(self, fitted: Fitted) -> Samples:
        """States of chains (C, S, Q) as draws of all learned weights (C · S, P), each with its buffers."""
        draws = fitted.draws
        assert draws is not None
        if self.skeletons is not None:
            rows = self.modes.theta.unsqueeze(1).repeat(1, draws.shape[1], 1)
            rows[..., self.place] = draws
            draws = rows
        buffers = {name: value.flatten(0, 1) for name, value in fitted.draw_buffers.items()}
        return Samples(draws.flatten(0, 1), shared(buffers))


def subset_stage(prototype: Prototype, modes: Modes, subset: Choice) -> SubsetStage:
    """The subset of the weights around modes, chain by chain."""
    space = prototype.space.select(subset)
    chains = range(len(modes.theta))
    starts = [modes.start(chain) for chain in chains]
    place = prototype.space.places(space, modes.theta.device)
    if space == prototype.space:
        return SubsetStage(prototype, modes, space, place, starts, None)
    skeletons = [Skeleton(prototype.skeleton.plain(s.theta, s.buffers), space) for s in starts]
    inner = [Start(start.theta[place].clone(), start.buffers) for start in starts]
    return SubsetStage(prototype, modes, space, place, inner, skeletons)


def mode_share(method: Any, prototype: Prototype) -> float:
    """The share of the training that finds a mode: as the method says, and some of it where a subset is inferred."""
    return method.warm_up or (MODE_SHARE if is_proper(prototype, method.subset) else 0.0)


def fit_gaussian(
    method: Any,
    prototype: Prototype,
    build: BuildTransform,
    law: Callable[[Any], GaussianLaw],
    *,
    prior: PriorSetting | None,
    prior_in_objective: bool = True,
    training: Training | None = None,
    replacement: bool = False,
    held: tuple[str, ...] | None = None,
    members: int = 1,
) -> Posterior:
    """A mode first where asked for, then an algorithm whose last state gives a Gaussian over the subset.

    With several members each has a mode and a Gaussian of its own, and the law is their mixture.
    """
    name, problem = type(method).__name__.lower(), prototype.problem
    share = mode_share(method, prototype)
    modes = find_modes(prototype, name, prior, share, members)
    part = subset_stage(prototype, modes, method.subset)
    stage = Stage(
        prototype,
        name,
        training or shortened(problem.training, 1 - share),
        build=build,
        prior=vector_prior(prototype, prior, part.space) if prior_in_objective else None,
        starts=part.starts,
        skeletons=part.skeletons,
        replacement=replacement,
        held=held,
        alone=None if members == 1 else "the state of each member becomes a Gaussian of its own",
        identity={"prior": repr(prior), "settings": repr(method)},
    )
    fitted = fit_stage(stage, members)
    stages = [fitted] if modes.stage is None else [modes.stage, fitted]
    laws = tuple(part.law(law(state), fitted, member) for member, state in enumerate(fitted.states))
    found = laws[0] if members == 1 else MixtureLaw.of(laws)
    facts = facts_of(name, method, prototype, *stages) | rounding_facts(prototype.skeleton, laws[0])
    return posterior_of(prototype, found, facts, default_draws=method.draws, predictive=method.predictive)


def posterior_of(
    prototype: Prototype, law: Law, facts: dict[str, Any], *, bayesian: bool = True, **how: Any
) -> Posterior:
    """The posterior over the weights of a prototype; unless it is networks as trained, random data are a doubt."""
    if bayesian and prototype.data.is_random:
        facts = with_doubts(facts, [AUGMENTED])
    return Posterior(
        model=prototype.model,
        likelihood=prototype.likelihood,
        law=law,
        space=prototype.space,
        infer=prototype.chosen.names,
        preparation=prototype.preparation,
        held=prototype.noisy_held,
        frozen=prototype.own_frozen,
        facts=facts,
        examples=prototype.some_inputs if isinstance(law, GaussianLaw) else None,
        **how,
    )
