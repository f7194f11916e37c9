"""The Laplace posterior whose prior is an earlier Gaussian posterior over the same weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesformer.core.doubts import recorded
from bayesformer.core.types import Batch, LogJoint, Transform
from bayesformer.core.vectors import THETA
from bayesformer.laplace.choosing import settled
from bayesformer.laplace.combining import combine
from bayesformer.laplace.estimate import Curvature
from bayesformer.laplace.evidence import check_curvature, log_evidence
from bayesformer.laplace.mode_search import FoundMode, mode_doubts, nearest_mode, output_numbers, space_with_spread
from bayesformer.laws import GaussianLaw
from bayesformer.posterior import Posterior
from bayesformer.train.members import Fitted, Stage, build_optimiser, fit_stage
from bayesformer.train.prototype import Prototype, Start
from bayesformer.train.recipe import earlier_law, find_modes, posterior_of, subset_stage, vector_prior
from bayesformer.train.training import Training

if TYPE_CHECKING:
    from bayesformer.laplace.method import Laplace

BATCH = 256  # examples whose gradients are summed at a time


def trained_mode(method: Laplace, prototype: Prototype) -> tuple[FoundMode, Fitted]:
    """The maximum of log p(D_new | θ) - ½ (θ - m)ᵀ P (θ - m), from m; weights without spread stay where they are.

    Gauss-Newton steps go on to it where they are cheap, unless a temperature makes the posterior's mode another one.
    """
    law = earlier_law(prototype)
    space = space_with_spread(prototype.space, law)
    modes = find_modes(prototype, "laplace", None, 0.0)
    part = subset_stage(prototype, modes, space.names)
    fixed = law.variance()[part.place] == 0
    stage = Stage(
        prototype,
        "laplace-update",
        prototype.problem.training,
        build=_Holding(fixed, law.mean[part.place]) if bool(fixed.any()) else build_optimiser,
        prior=vector_prior(prototype, None, part.space),
        validation=prototype.validation,
        starts=part.starts,
        skeletons=part.skeletons,
        identity={"prior": "an earlier posterior"},
    )
    found = fit_stage(stage, 1)
    theta = law.mean.clone()
    theta[part.place] = found.theta[0]
    start = Start(theta, {name: value[0] for name, value in found.buffers.items()})
    return (nearest_mode(method, prototype, start, None) if method.temperature == 1 else FoundMode(start, None)), found


class _Holding:
    """Builds the optimiser that leaves some weights at their values: single weights without spread."""

    def __init__(self, fixed: Tensor, values: Tensor) -> None:
        self.index = fixed.nonzero().flatten()
        self.values = values[self.index]

    def __call__(self, log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:
        inner = build_optimiser(log_joint, training, steps, num_data)

        def update(state: Any, batch: Batch, inplace: bool = False) -> tuple[Any, Any]:
            state, aux = inner.update(state, batch, inplace=inplace)
            with torch.no_grad():
                state.params[THETA][..., self.index] = self.values
            return state, aux

        return Transform(inner.init, update)


def newton_mode(method: Laplace, prototype: Prototype, seed: int) -> FoundMode:
    """θ = m + Σ_new ∇ log p(D_new | m): one Gauss-Newton step, exact for a model that is linear in its weights."""
    law = earlier_law(prototype)
    start = find_modes(prototype, "laplace", None, 0.0).start(0)
    after = _combined(method, prototype, curvature_at(method, prototype, start, seed))
    mode, score = law.mean.clone(), score_at(prototype, start) / method.temperature
    for place, block in zip(after.places, after.blocks, strict=True):
        mode[place] += block.times(score[place])
    return FoundMode(Start(mode, start.buffers), None)


def score_at(prototype: Prototype, at: Start) -> Tensor:
    """(P,): the gradient of the log-likelihood of all data in the weights."""
    shell = prototype.skeleton.shell()
    shell.load(at.theta)
    shell.load_buffers(at.buffers)
    shell.module.eval()
    assert shell.grad is not None
    for batch in prototype.whole.in_order(BATCH, shell.theta.device):
        with torch.enable_grad():
            value = prototype.likelihood.log_prob(shell(batch.inputs).to(shell.theta), batch.targets, batch.mask)
            value.sum().backward()
    return shell.grad / prototype.whole.readings


def curvature_at(method: Laplace, prototype: Prototype, mode: Start, seed: int) -> Curvature:
    """The curvature of the new data, at the weights of a subnetwork if the earlier law is over one."""
    law = earlier_law(prototype)
    place = law.places[0] if law.places else None
    index = place.cpu() if method.structure == "subnetwork" and isinstance(place, Tensor) else None
    found = method.estimate(prototype, mode, seed, index)
    check_curvature(found.structures, [", ".join(names) for names in found.names])
    return found


def _combined(method: Laplace, prototype: Prototype, found: Curvature) -> GaussianLaw:
    earlier = prototype.problem.prior
    assert earlier is not None
    num_old = int(earlier.facts.get("num_data", found.num_data))
    return combine(earlier_law(prototype), found, 1 / method.temperature, num_old)


def posterior_after(
    method: Laplace, prototype: Prototype, around: FoundMode, seed: int, facts: Mapping[str, Any]
) -> Posterior:
    """The posterior around the mode, of precision P_old + h H_new.

    Its facts count the data and the evidence of the earlier posterior in, where that knows them.
    """
    started, earlier, mode = time.perf_counter(), prototype.problem.prior, around.start
    assert earlier is not None
    old = earlier_law(prototype)
    found = curvature_at(method, prototype, mode, seed)
    combined = _combined(method, prototype, found)
    blocks = tuple(settled(block) for block in combined.blocks)
    buffers = {name: value[None] for name, value in mode.buffers.items()}
    law = GaussianLaw(mode.theta, combined.places, blocks, buffers)
    gained = evidence_gained(old, law, found.log_likelihood / method.temperature)
    known = {
        **facts,
        "num_data": int(earlier.facts.get("num_data", 0)) + found.num_data,
        "curvature": found.kind,
        "log_likelihood": found.log_likelihood,
        "updates": int(earlier.facts.get("updates", 0)) + 1,
        "seconds": float(facts.get("seconds", 0.0)) + time.perf_counter() - started,
    }
    if "log_evidence" in earlier.facts:
        known["log_evidence"] = float(earlier.facts["log_evidence"]) + gained
    if method.temperature == 1:
        doubts, numbers = mode_doubts(method, prototype, law, around, None)
        about = output_numbers(method, prototype, law, mode, None, 1.0)
        known |= {**numbers, **about[1], **recorded(doubts + about[0])}
    how: dict[str, Any] = {"predictive": method.predictive, "link": method.link, "default_draws": method.draws}
    made = posterior_of(prototype, law, known, **how)
    return replace(made, frozen={**earlier.frozen, **made.frozen})


def evidence_gained(old: GaussianLaw, new: GaussianLaw, log_likelihood: float) -> float:
    """log p(D_new | D_old), with the new mean as the point around which the log joint is quadratic."""
    after = torch.stack([block.log_det_precision() for block in new.blocks]).sum()
    before = torch.stack([block.log_det_precision() for block in old.blocks]).sum()
    return float(log_evidence(log_likelihood, after, before, old.distance(new.mean)))
