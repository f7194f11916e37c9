"""Anchored optima: starts of chains that are near draws of a network's posterior, unlike its modes.

A draw θ_a of the prior is the anchor, and the weights that minimise -Σ log p(y | x, θ) + ½ (θ-θ_a)ᵀ Π (θ-θ_a) are the
start. For a linear model with Gaussian noise this spreads the starts as the prior does where the data say nothing
(Pearce et al. 2020, without their noise on the targets); a mode has no spread there at all.

The search begins at the anchor for up to 500 weights. Larger networks begin where they were built: a transformer is
saturated at a draw of N(0, 1), and some had not learned their data when the search ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bayesformer.core.draws import drawing_from
from bayesformer.core.seeds import generator
from bayesformer.core.types import LogJoint, Transform
from bayesformer.inference import optimise, schedules
from bayesformer.model.skeleton import Skeleton
from bayesformer.priors.distributions import Distribution
from bayesformer.train.members import Fitted, Stage, fit_stage
from bayesformer.train.newton import FEW
from bayesformer.train.prototype import Prototype, Start
from bayesformer.train.training import Training
from bayesformer.train.vector_prior import GaussianPrior, NamedPrior, VectorPrior

BATCH = 20  # examples: many small steps go farther in one epoch than few large ones
RATE, GENTLE_RATE = 0.1, 0.03  # of Adam, for networks of linear layers, and for all others
REACH = 0.12  # of Adam's rate, at most, in standard deviations of the prior
LINEAR_LAYERS = 3  # up to which a network of linear layers is trained at the larger rate
WARM_UP = 0.05  # share of the steps
DRAWN = 1000  # draws that tell the scale of a law which does not name one


class AnchoredPrior:
    """-½ (θ - a)ᵀ Π (θ - a) with Π diagonal: a prior of weights around an anchor, without its constant."""

    def __init__(self, anchor: Tensor, diagonal: Tensor) -> None:
        self.anchor, self.diagonal = anchor, diagonal

    def log_prob(self, theta: Tensor) -> Tensor:
        """Minus half the squared distance to the anchor, () or (L,)."""
        return -0.5 * ((theta - self.anchor).square() * self.diagonal).sum(-1)

    def write(self, theta: Tensor, grad: Tensor, scale: float) -> Tensor:
        """Put -Π (θ - a), times the scale, into `grad`; the value times the scale is returned."""
        away = theta - self.anchor
        torch.mul(away, self.diagonal, out=grad)
        value = -0.5 * scale * (away * grad).sum(-1)
        grad.mul_(-scale)
        return value

    def precision(self, theta: Tensor) -> Tensor:
        """(P,): the diagonal of Π, which is the same at every θ."""
        return self.diagonal.expand_as(theta)

    def precision_times(self, theta: Tensor, rows: Tensor) -> Tensor:  # noqa: ARG002
        """(..., P): every entry times its precision."""
        return rows * self.diagonal

    def heavy(self, theta: Tensor) -> Tensor:
        """(P,): none, for it is a Gaussian."""
        return torch.zeros_like(theta, dtype=torch.bool)


def prior_scale(prior: VectorPrior, theta: Tensor) -> Tensor:
    """(P,): a standard deviation of every weight under the prior, in which chains measure distances.

    The `scale` of a law that has one, also where its tails are heavier than a normal's. A flat prior has none: the root
    mean square of the weights θ it is over takes its place, or 1 where these are 0.
    """
    found = torch.ones_like(theta)
    if isinstance(prior, GaussianPrior):
        for place, block in zip(prior.law.places, prior.law.blocks, strict=True):
            found[place] = block.diagonal().clamp_min(torch.finfo(theta.dtype).tiny).sqrt()
    elif isinstance(prior, NamedPrior):
        for place, law in prior.stretches:
            found[place] = _scale(law, theta[place])
    return found


def _scale(law: Distribution | None, weights: Tensor) -> float:
    if law is None:
        return float(weights.square().mean().sqrt()) or 1.0
    own = getattr(law, "scale", None)
    if own is not None:
        return float(own)
    with drawing_from(generator(0, "scale", device=weights.device)):
        return float(law.sample(weights.new_empty(DRAWN)).std())


def prior_draw(prior: VectorPrior, theta: Tensor, source: torch.Generator, temperature: float = 1.0) -> Tensor:
    """(P,): weights drawn from the prior; those of a flat one stay as they are in θ.

    A temperature τ narrows the draws around the centre by √τ, as a normal prior to the power 1/τ is.
    """
    drawn, width = theta.clone(), temperature**0.5
    with drawing_from(source):
        if isinstance(prior, GaussianPrior):
            for place, block in zip(prior.law.places, prior.law.blocks, strict=True):
                rank = block.times_root(torch.zeros_like(drawn[place])).shape[-1]
                noise = torch.empty(rank, dtype=theta.dtype, device=theta.device).normal_(generator=source)
                drawn[place] = prior.law.mean[place] + width * block.colour(noise)
        elif isinstance(prior, NamedPrior):
            for place, law in prior.stretches:
                if law is not None:
                    center = getattr(law, "loc", 0.0)
                    drawn[place] = center + width * (law.sample(theta[place]) - center)
    return drawn


def is_flat(prior: VectorPrior, theta: Tensor) -> Tensor:
    """(P,), boolean: where the prior has no curvature at all."""
    return prior.precision(theta) == 0


def anchored_rate(module: nn.Module, scale: Tensor) -> float:
    """Adam's learning rate: .1 for up to three linear layers and nothing else with weights, else .03.

    At most .12 standard deviations of a typical weight's prior.
    """
    owners = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
    plain = all(type(part) is nn.Linear for part in owners) and len(owners) <= LINEAR_LAYERS
    return min(RATE if plain else GENTLE_RATE, REACH * float(scale.median()))


@dataclass(frozen=True)
class AnchoredAdam:
    """Builds Adam with β = (.9, .99), 5 % warm-up and a cosine to 0, for one chain."""

    lr: float

    def __call__(self, log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:  # noqa: ARG002
        """The ascent for this many steps, without clipping."""
        rate = schedules.warmup_cosine(self.lr, max(1, round(WARM_UP * steps)), steps)
        return optimise.build(log_joint, optimise.Adam(rate, betas=(0.9, 0.99)))


def anchored_optima(
    prototype: Prototype,
    label: str,
    prior: VectorPrior,
    starts: Sequence[Start],
    epochs: int,
    skeletons: Sequence[Skeleton] | None = None,
    settings: str = "",
    temperature: float = 1.0,
    places: Sequence[slice] = (),
) -> Fitted:
    """One optimum per start, each around its own draw of the prior.

    Dropout is off, as it is for chains. Running averages move, since they would be wrong so far from the start.
    Adapters are anchored where they start: a draw of the prior would overwhelm the base that they adapt.

    Args:
        prototype: the model and its data.
        label: of the stage and its checkpoints.
        prior: over the inferred weights.
        starts: buffers, and weights: where the search begins in large networks; of a flat prior they are the anchors.
        epochs: for each optimum.
        skeletons: one per start where fixed weights differ.
        settings: what a checkpoint of it must agree in.
        temperature: of the posterior.
        places: of the adapters' weights in θ.
    """
    problem, device = prototype.problem, prototype.skeleton.device
    sources = [generator(problem.seed, "anchor", chain, device=device) for chain in range(len(starts))]
    anchors = [prior_draw(prior, s.theta, source, temperature) for s, source in zip(starts, sources, strict=True)]
    for anchor, start in zip(anchors, starts, strict=True):
        for place in places:
            anchor[place] = start.theta[place]
    priors = []
    for anchor in anchors:
        scale = prior_scale(prior, anchor)
        priors.append(AnchoredPrior(anchor, scale.square().reciprocal().masked_fill(is_flat(prior, anchor), 0)))
    training = replace(problem.training, epochs=epochs, batch_size=min(BATCH, problem.num_data), max_steps=None)
    begin = anchors if anchors[0].numel() <= FEW else [start.theta for start in starts]
    stage = Stage(
        prototype,
        label,
        training,
        build=AnchoredAdam(anchored_rate(prototype.prepared, scale)),
        priors=priors,
        starts=[Start(b.clone(), s.buffers) for b, s in zip(begin, starts, strict=True)],
        skeletons=skeletons,
        held=without_noise(prototype),
        alone="every chain has an anchor of its own",
        identity={"settings": settings},
    )
    return fit_stage(stage, len(starts))


def without_noise(prototype: Prototype) -> tuple[str, ...]:
    """All modules but those that training moves buffers of: held in evaluation mode, a pass has no dropout."""
    moving = {name.rpartition(".")[0] for name in prototype.probed.buffers_changed} - set(prototype.held)
    return tuple(name for name, _ in prototype.prepared.named_modules() if name not in moving)
