"""Chains of SGHMC and BAOAB where the posterior is a network's: `inference.stiff_baoab`, from anchored optima."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bayesformer.core.doubts import Doubt, recorded, warn_of
from bayesformer.core.memory import room_for
from bayesformer.core.types import LogJoint, Transform
from bayesformer.inference import stiff_baoab
from bayesformer.inference.linear_algebra import power_iteration
from bayesformer.inference.stiff_baoab import StiffSettings, StiffState
from bayesformer.layers import has_random_parts
from bayesformer.model.starting import adapter_weights
from bayesformer.posterior import Posterior
from bayesformer.predict.self_check import worth_of_outputs
from bayesformer.train.anchored import anchored_optima, prior_scale
from bayesformer.train.collect import Collect
from bayesformer.train.coordinates import centred, full_batch
from bayesformer.train.full_batch import FullBatch
from bayesformer.train.members import Fitted, Stage, facts_of, fit_stage
from bayesformer.train.network_plan import FEWEST_ROWS, NetworkPlan, doubt_of_length, forecast, plan
from bayesformer.train.objective import Objective
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import (
    Modes,
    SubsetStage,
    find_modes,
    is_proper,
    mode_training,
    posterior_of,
    subset_stage,
    vector_prior,
)
from bayesformer.train.training import Training
from bayesformer.train.vector_prior import VectorPrior
from bayesformer.train.whole_data import WholeDataObjective

if TYPE_CHECKING:
    from bayesformer.methods.chain_run import ChainRun

FRICTION = 0.3
TIMES = 5  # the training's epochs, for weights that start fresh
PRODUCTS, EXAMPLES = 5, 100  # for the largest curvature before the chains run
LOST, JUDGED = 2.0, 8  # loss of log-likelihood that is doubted, and at about how many draws it is measured
PILOT, FEWEST_STEPS = 60, 20  # steps that tell whether batches heat a chain, and below which they cannot
BOILING = 2.0  # temperature along stiff directions above which they do
HOT = 1.2  # kinetic temperature above which the spread is too wide
ASKED = 32  # examples at which the draws are compared
SAFE = 6.0  # the forecast was right within this factor on all problems it was tried on
log = logging.getLogger("bayesformer")


@dataclass(frozen=True)
class NetworkBuild:
    """Builds the chain of one member; the metric is the prior's scale."""

    prototype: Prototype
    plan: NetworkPlan
    temperature: float
    friction: float
    burn_in: float

    def __call__(self, log_joint: LogJoint, training: Training, steps: int, num_data: int) -> Transform:  # noqa: ARG002
        """The transform of a log joint over all data, in evaluation mode."""
        assert isinstance(log_joint, Objective)
        log_joint.shell.module.eval()
        settings = StiffSettings(
            temperature=self.temperature / num_data,
            longest=self.plan.longest,
            friction=self.friction,
            rows=self.plan.rows,
            burn_in=round(self.burn_in * steps),
        )
        scale = prior_scale(log_joint.prior, log_joint.shell.theta) * math.sqrt(self.temperature)
        return stiff_baoab.build(
            WholeDataObjective(log_joint, self.prototype.data, self.prototype.product_examples), scale, settings
        )


def why_not(run: ChainRun) -> str | None:
    """Why this recipe cannot be used: gradients at two weights must be those of one function, and of all data."""
    made = run.prototype
    rules = (
        (run.method.temperature == 0, "at temperature 0 there is nothing to sample"),
        (bool(run.method.cycles or run.method.decay), "its step size follows the curvature, not a schedule"),
        (run.method.warm_up is not None, "a warm_up was given"),
        (has_random_parts(made.prepared), "layers or attention of the model are random"),
        (made.evaluation_randomness.kind != "none", "the model draws random numbers in evaluation mode"),
        (made.data.resumable != "exact", "a stream cannot be read again every few steps"),
    )
    return next((reason for holds, reason in rules if holds), None)


def fit_network_chains(run: ChainRun) -> Posterior:
    """Anchored optima for weights that start fresh, else the mode; then chains with variance reduced gradients."""
    fixed = plan_of(run)
    run = replace(run, count=fixed.chains, earlier=run)
    part, trainings = starts_of(run, fixed)
    fixed, pilot = piloted(run, part, fixed)
    largest = largest_at(part, vector_prior(run.prototype, run.method.prior, part.space))
    log.info(forecast(fixed, largest))
    doubts = doubt_of_length(fixed, largest, run.name) + _of_model(run)
    warn_of(doubts)
    origins = [start.theta.clone() for start in part.starts]  # chains move the starts themselves
    fitted = fit_stage(chain_stage(run, part, fixed), fixed.chains)
    measured = _measured(fitted, fixed, largest) | {"pilot_temperature": pilot}
    doubts += _of_temperature(measured, fixed.chains * part.space.size)
    facts = facts_of(run.name, run.method, run.prototype, *trainings, fitted)
    facts |= {"chains": fixed.chains, "starts": _starts(run), "network": measured}
    made = posterior_of(run.prototype, part.samples(fitted), facts)
    measured |= worth_of_outputs(made, run.prototype.data.first(ASKED).inputs, fixed.chains)
    measured["loss"] = _loss(run, part, origins, fitted)
    doubts += _of_draws(measured) + _of_loss(measured["loss"])
    return posterior_of(run.prototype, made.law, facts | recorded(doubts))


def plan_of(run: ChainRun, whole: bool = False) -> NetworkPlan:
    """How the epochs are spent: as given, five times the training's for fresh weights, or once."""
    method, made = run.method, run.prototype
    trained = mode_training(made, 1.0).epochs
    epochs = trained * (TIMES if run.fresh else 1) if method.epochs == "auto" else method.epochs
    size = made.space.select(method.subset).size * made.space.dtype.itemsize
    draws = 1 if method.draws == "auto" else method.draws
    return plan(
        run.problem.num_data,
        epochs,
        trained,
        fresh=run.fresh,
        chains=None if method.chains == "auto" else method.chains,
        batch=made.data.batch_size,
        most_rows=max(FEWEST_ROWS, room_for(2 * size, made.skeleton.device)),
        fewest_steps=math.ceil(draws / (1 - method.burn_in)) + 1,
        whole=whole,
    )


def piloted(run: ChainRun, part: SubsetStage, fixed: NetworkPlan) -> tuple[NetworkPlan, float | None]:
    """The plan, or one with gradients over all data where a few steps of the first chain are hot in stiff directions.

    Friction is there along as many stiff directions as scores show, 50 at most. Where the data determine thousands
    (a classifier of many classes and weights), the noise of the batches heats all others: momenta along them were at 8
    to 14 times their temperature on digits, and the chain forgot in 60 steps what its start had learned.
    """
    steps = min(PILOT, fixed.steps // 10)
    if fixed.longest == 1 or steps < FEWEST_STEPS:
        return fixed, None
    copies = [replace(start, theta=start.theta.clone()) for start in part.starts]  # a chain moves its start
    stage = chain_stage(run, replace(part, starts=copies), replace(fixed, steps=steps))
    stage = replace(stage, label=f"{run.name}-pilot", collect=partial(Collect.spread, burn_in=0, count=1))
    heat = _measured(fit_stage(stage, 1), fixed, 1.0)["stiff_temperature"]
    if heat <= BOILING:
        return fixed, heat
    log.info("%s takes gradients over all data: batches of %d heat it %.1f times", run.name, fixed.batch, heat)
    return plan_of(run, whole=True), heat


def starts_of(run: ChainRun, fixed: NetworkPlan) -> tuple[SubsetStage, list[Fitted]]:
    """Where chains start, and the trainings that were made to find it."""
    made, method = run.prototype, run.method
    if not run.fresh:
        known = None if run.earlier is None else vars(run.earlier).get("coordinates")
        return (run.part if known is None or run.modes.distinct else centred(run.part, [known])), run.trainings
    # The weights outside a subset are at a mode; all others begin at the anchor, which is the start for adapters alone.
    share = 1.0 if is_proper(made, method.subset) else 0.0
    modes = find_modes(made, run.name, method.prior, share, fixed.chains)
    part = subset_stage(made, modes, method.subset)
    prior, label = vector_prior(made, method.prior, part.space), f"{run.name}-anchored"
    found = anchored_optima(
        made,
        label,
        prior,
        part.starts,
        fixed.optimum,
        part.skeletons,
        repr(method),
        method.temperature,
        [part.space.slices[name] for name in adapter_weights(made.prepared, part.space.names)],
    )
    at = Modes(found.theta, found.buffers, found)
    stages = run.trainings + [stage for stage in (modes.stage, found) if stage is not None]
    return replace(part, starts=[at.start(chain) for chain in range(fixed.chains)]), stages


def largest_at(part: SubsetStage, prior: VectorPrior) -> float:
    """λ at the start of the first chain, in the prior's metric, from some of the examples."""
    start, made = part.starts[0], part.prototype
    batch = FullBatch(made, made.skeleton if part.skeletons is None else part.skeletons[0], start, prior)
    scale, times = prior_scale(prior, start.theta), batch.hessian(start.theta, EXAMPLES)
    return max(power_iteration(lambda v: scale * times(scale * v), start.theta, iterations=PRODUCTS).value, 1.0)


def chain_stage(run: ChainRun, part: SubsetStage, fixed: NetworkPlan) -> Stage:
    """The stage that samples, all modules in evaluation mode."""
    made, method = run.prototype, run.method
    per_epoch = made.data.steps(fixed.batch) or math.ceil(fixed.num_data / fixed.batch)
    training = replace(
        run.problem.training,
        epochs=math.ceil(fixed.steps / per_epoch),
        batch_size=fixed.batch,
        max_steps=fixed.steps,
        evaluate_every=None,
    )
    friction = getattr(method, "friction", "auto")
    own = float(friction) * math.sqrt(run.problem.num_data) if friction != "auto" else FRICTION
    return replace(
        run.stage(part, training, NetworkBuild(made, fixed, method.temperature, own, method.burn_in)),
        held=tuple(name for name, _ in made.prepared.named_modules()),
        alone="every chain decides by itself when it looks at all data",
    )


def _measured(fitted: Fitted, fixed: NetworkPlan, largest: float) -> dict[str, Any]:
    """What the chains measured on their way, means over chains."""
    states = [state.measured for state in fitted.states if isinstance(state, StiffState)]

    def mean(values: list[Tensor]) -> float:
        return float(sum(float(value) for value in values) / len(values))

    return {
        "forecast": fixed.worth(largest),
        "temperature": mean([m.kinetic / m.steps.clamp_min(1) for m in states]),
        "stiff_temperature": mean([m.stiff / m.steps.clamp_min(1) for m in states]),
        "period": mean([m.period / m.steps.clamp_min(1) for m in states]),
        "largest_at_start": largest,
        "largest": max(float(m.largest) for m in states),
        "time": sum(float(m.time) for m in states),
        "planned_epochs": fixed.epochs,
        "optimum_epochs": fixed.chains * fixed.optimum,
        "sampling_epochs": sum(float(m.examples) for m in states) / fixed.num_data,
        "batch_size": fixed.batch,
        "rows": fixed.rows,
    }


def _loss(run: ChainRun, part: SubsetStage, origins: list[Tensor], fitted: Fitted) -> float:
    """Nats of log-likelihood over all data that draws lose against the starts, over what a Gaussian's lose at most.

    That is half the number of weights, or of targets where these are fewer: the data determine no more directions.
    """
    assert fitted.draws is not None
    losses, every = [], max(1, fitted.draws.shape[0] * fitted.draws.shape[1] // JUDGED)
    for chain, draws in enumerate(fitted.draws):  # (S, P)
        batch = full_batch(part, run.method.prior, chain)
        rows = [origins[chain], *draws[::every]]
        start, *others = (-batch.potential(row) - float(batch.prior.log_prob(row).double()) for row in rows)
        losses += [start - other for other in others]
        determined = min(batch.size, batch.targets)
    return 2 * sum(losses) / (len(losses) * determined * (run.method.temperature or 1.0))


def _of_loss(loss: float) -> list[Doubt]:
    """Whether the draws have lost what their starts had learned."""
    if not loss > LOST:
        return []
    return [
        Doubt(
            "draws",
            "The draws have lost what the network had learned: their log-likelihood is below that of their starts by "
            f"{loss:.1f} times as much as draws of a Gaussian posterior lose at most, so that predictions may be near "
            "chance. Chains of this length are too hot for so many weights: use Ensemble(), or "
            "Laplace(predictive='linearised').",
            loss,
            LOST,
        )
    ]


def _starts(run: ChainRun) -> str:
    if run.fresh:
        return "anchored optima, one per chain"
    return "the mode found from the given weights; chains of one start cannot see other modes"


def _of_model(run: ChainRun) -> list[Doubt]:
    """What the chains leave out or cannot see of the model and the data; said before they run."""
    made, doubts = run.prototype, _of_starts(run)
    if made.randomness.kind != "none":
        log.info("dropout is off while %s samples: the draws are of the network as it predicts", run.name)
    if made.moves_buffers:
        log.info("running averages are held while %s samples, at the values that training left", run.name)
    if not made.data.is_random:
        return doubts
    return [
        *doubts,
        Doubt(
            "random data",
            f"Examples differ from epoch to epoch (augmentation, or a sampler that draws them), and {run.name} "
            "corrects gradients by examples it saw before: the posterior is of neither. Give data without "
            "augmentation, or the dataset without its sampler.",
        ),
    ]


def _of_starts(run: ChainRun) -> list[Doubt]:
    """Whether the chains of a network all begin at one mode, and so cannot see others."""
    if run.fresh or run.modes.distinct:
        return []
    sentence = (
        "All chains begin at the mode of the weights that were given, and cannot see others: where there are no data "
        "the spread of small networks was about half of the posterior's. If these weights need not be kept, give a "
        "function that builds the model, or init='fresh'."
    )
    return [Doubt("starts", sentence)]


def _of_temperature(measured: dict[str, Any], numbers: int) -> list[Doubt]:
    """Whether the noise of the batches has heated the chains, by more than momenta fluctuate by themselves."""
    heat, limit = measured["temperature"], max(HOT, 1 + 3 * math.sqrt(2 / numbers))
    what = "kinetic temperature"
    if not heat > limit:
        heat, limit, what = measured["stiff_temperature"], BOILING, "temperature along stiff directions"
    if not heat > limit:
        return []
    return [
        Doubt(
            "temperature",
            f"The chain was too hot ({what} {heat:.2f} instead of 1), by batch noise or by steps too long for its "
            "curvature: its spread is too wide. Give it more epochs, whose starts are nearer to the posterior, or data "
            "in larger batches.",
            heat,
            limit,
        )
    ]


def _of_draws(measured: dict[str, Any]) -> list[Doubt]:
    """Whether the draws are worth less than the forecast by more than it is ever wrong."""
    found = [measured[name] for name in ("worth_inside", "worth_outside") if measured.get(name, math.nan) > 0]
    promised = measured["forecast"]
    if not found or promised < SAFE or min(found) >= promised / SAFE:
        return []
    return [
        Doubt(
            "effective draws",
            f"The draws are worth {min(found):.1f} independent ones, where {promised:.0f} were to be expected: the "
            "chains move too slowly. Give them more epochs.",
            min(found),
            promised / SAFE,
        )
    ]
