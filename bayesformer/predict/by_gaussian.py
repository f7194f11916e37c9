"""Predictions by outputs that are Gaussian: linearised, streamlined or by moments of one pass, for Gaussian laws."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bayesformer.core.doubts import warn_of
from bayesformer.core.types import GaussianOutputs, Outputs
from bayesformer.data.inputs import inputs_to
from bayesformer.data.unlabelled import InputBatches, TensorInputs
from bayesformer.laws import GaussianLaw
from bayesformer.likelihoods.predictive import CategoricalPredictive, Predictive
from bayesformer.likelihoods.token_predictive import TokenPredictive, join_tokens
from bayesformer.predict.assemble import PASS_NUMBERS
from bayesformer.predict.mean_passes import TRIAL_EXAMPLES
from bayesformer.predict.request import Request, check_draws
from bayesformer.predict.streamlined import Calibration
from bayesformer.predict.streamlined.calibrate import INPUTS, calibrate
from bayesformer.predict.streamlined.rule_settings import ROWS
from bayesformer.predict.streamlined.variance_check import EXAMPLES, one_pass_doubt, variance_ratio
from bayesformer.predict.token_reduction import drawn_in_groups, empty_reduction

if TYPE_CHECKING:
    from bayesformer.posterior import Posterior

log = logging.getLogger("bayesformer")


def gaussian_outputs(posterior: Posterior, data: InputBatches, request: Request) -> Outputs:
    """Network outputs as a Gaussian, of all examples."""
    return _outputs(posterior, data, request, _calibration(posterior, data, request))


def gaussian_predictive(posterior: Posterior, data: InputBatches, request: Request) -> Predictive:
    """The predictive distribution of all examples; that of a language model is reduced as it is made."""
    if posterior.reduces(request):
        parts = gaussian_parts(posterior, data, request)
        return join_tokens([part for part in parts if isinstance(part, TokenPredictive)])
    return _of_outputs(posterior, gaussian_outputs(posterior, data, request), request)


def gaussian_parts(posterior: Posterior, data: InputBatches, request: Request) -> Iterator[Predictive]:
    """Predictives of one batch after another, in order."""
    calibration = _calibration(posterior, data, request)
    if posterior.reduces(request):
        yield from _reduced_parts(posterior, data, request, calibration)
        return
    for part in data.in_order(request.examples_per_batch(posterior.device), posterior.device):
        yield _of_outputs(posterior, _outputs(posterior, TensorInputs(part), request, calibration), request)


def check_gaussian(posterior: Posterior, way: str) -> None:
    """Refuse a way of predicting that needs a Gaussian over the weights where the law is none."""
    if not isinstance(posterior.law, GaussianLaw):
        kind = type(posterior.law).__name__ if posterior.law.available is None else f"{posterior.law.available} draws"
        what = "a random network" if posterior.noisy_draws else kind
        raise ValueError(
            f"predictive={way!r} needs a posterior that is a Gaussian over the weights; this one is {what}. "
            "Use predictive='sampled'."
        )


def calibrate_on(posterior: Posterior, inputs: Any, rows: int = ROWS) -> Calibration:
    """The calibration of streamlined prediction, made on these inputs, with so many passes of the rule "leading"."""
    posterior.check_base()
    given = inputs_to(inputs, posterior.device)
    with posterior.mean_passes.streamliner(given) as (streamliner, noisy):
        return calibrate(streamliner, given, noisy=noisy, rows=rows)


def _calibration(posterior: Posterior, data: InputBatches, request: Request) -> Calibration | None:
    """For streamlined prediction, the calibration that the posterior has or one made now.

    A function of the posterior and these inputs alone: one made on training inputs is kept, with its doubts said.
    """
    check_gaussian(posterior, request.way)
    if request.way != "streamlined":
        return None
    found = posterior.known_calibration
    if found is None and posterior.examples is None:
        rows = ROWS if request.settings is None else request.settings.outputs
        made = calibrate_on(posterior, data.first(INPUTS), rows)
        _say_uncalibrated(posterior, made)
        return made
    if found is None:
        found = posterior.known["calibration"] = calibrate_on(posterior, posterior.examples)
        warn_of(found.doubts)
    rows = ROWS if request.settings is None else request.settings.outputs
    if found.rule == "leading" and rows != found.rows:
        return _calibration_with(posterior, data, rows)
    return found


def _say_uncalibrated(posterior: Posterior, made: Calibration) -> None:
    """Say once that every call makes a calibration of its own, and what the first one found."""
    if "uncalibrated" in posterior.known:
        return
    posterior.known["uncalibrated"] = True
    log.warning(
        "this posterior has no calibration of streamlined prediction, and keeps no training inputs to make one: every "
        "call makes its own on the inputs it is given, so that answers depend on these and take longer. "
        "posterior.calibrated(data) makes one for all calls; a posterior that was calibrated before save() has it."
    )
    warn_of(made.doubts)


def _calibration_with(posterior: Posterior, data: InputBatches, rows: int) -> Calibration:
    """The same with another number of backward passes: by training inputs, else by those that were asked about."""
    if posterior.examples is None:
        return calibrate_on(posterior, data.first(INPUTS), rows)
    name = f"calibration with {rows}"
    if name not in posterior.known:
        posterior.known[name] = calibrate_on(posterior, posterior.examples, rows)
    return posterior.known[name]


def _outputs(posterior: Posterior, data: InputBatches, request: Request, calibration: Calibration | None) -> Outputs:
    posterior.check_base()
    passes, trial_inputs = posterior.mean_passes, data.first(TRIAL_EXAMPLES)
    batches = data.in_order(request.examples_per_batch(posterior.device), posterior.device)
    if request.way == "linearised":
        with passes.linearised(trial_inputs) as linearised:
            return linearised.over(batches, data.num_data)
    if calibration is not None:
        with passes.streamliner(trial_inputs) as (streamliner, _):
            return streamliner.over(batches, calibration, request.settings, data.num_data)
    from bayesformer.predict.one_pass import one_pass_outputs

    with passes.passing(trial_inputs) as noisy, passes.shells.borrow() as shell:
        found = one_pass_outputs(shell.module, posterior.space, posterior.law, batches, request.settings, data.num_data)
    if not noisy:
        _doubt_one_pass(posterior, data, found)
    return found


def _doubt_one_pass(posterior: Posterior, data: InputBatches, outputs: GaussianOutputs) -> None:
    """Say once if variances of one pass are far from those of draws, by the first inputs that were asked about."""
    if "one_pass" in posterior.known:
        return
    some = inputs_to(data.first(EXAMPLES), posterior.device)
    with posterior.mean_passes.streamliner(some) as (streamliner, _):
        doubt = one_pass_doubt(variance_ratio(streamliner, some, outputs, posterior.likelihood))
    posterior.known["one_pass"] = doubt
    warn_of([] if doubt is None else [doubt])


def _of_outputs(posterior: Posterior, found: Outputs, request: Request) -> Predictive:
    """The predictive of Gaussian outputs, by the link and the number of draws that hold here."""
    link, count = _link_and_draws(posterior, request)
    return posterior.tempered(posterior.likelihood.predictive(found, link, count, request.seed))


def _link_and_draws(posterior: Posterior, request: Request) -> tuple[Any, int]:
    count = posterior.default_draws if request.draws is None else request.draws
    check_draws(count, None)
    return posterior.link if request.link is None else request.link, count


def _reduced_parts(
    posterior: Posterior, data: InputBatches, request: Request, calibration: Calibration | None
) -> Iterator[TokenPredictive]:
    """Reduced predictives, batch by batch and, where the outputs are drawn, a few draws at a time."""
    link, count = _link_and_draws(posterior, request)
    with posterior.mean_passes.shells.borrow() as shell, torch.no_grad():
        each = max(1, shell(inputs_to(data.first(1), posterior.device)).numel())
    size = max(1, min(request.examples_per_batch(posterior.device), PASS_NUMBERS // each))
    few = replace(request, batch_size=size)
    for asked in data.labelled(size, posterior.device):
        found = _outputs(posterior, TensorInputs(asked.inputs), few, calibration)
        reduction = empty_reduction(posterior.likelihood, asked, None, 1.0, request.top)
        for some, own_seed in drawn_in_groups(size * each, count, link, request.seed):
            made = posterior.tempered(posterior.likelihood.predictive(found, link, some, own_seed))
            assert isinstance(made, CategoricalPredictive)
            reduction.add_predictive(made)
        yield reduction.result()
