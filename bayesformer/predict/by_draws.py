"""Predictions by draws of the weights: a forward pass for each, or several in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bayesformer.core.types import Draws, Params
from bayesformer.data.inputs import inputs_to, leaves
from bayesformer.data.unlabelled import InputBatches
from bayesformer.likelihoods.links import Link
from bayesformer.likelihoods.predictive import Predictive
from bayesformer.likelihoods.token_predictive import TokenPredictive, join_tokens
from bayesformer.predict.assemble import (
    ROUND,
    ROUND_NUMBERS,
    Convert,
    assemble,
    pass_numbers,
    rounds_of,
    tensors_of,
)
from bayesformer.predict.mean_passes import TRIAL_EXAMPLES
from bayesformer.predict.request import Request, check_draws
from bayesformer.predict.sampled import DrawPlan, Sampler
from bayesformer.predict.token_reduction import empty_reduction, reduced_rounds

if TYPE_CHECKING:
    from bayesformer.posterior import Posterior


def drawn_outputs(posterior: Posterior, data: InputBatches, request: Request) -> Draws:
    """Network outputs under draws of the weights, (L, N, ...)."""
    return Draws(_assembled(posterior, data, request, lambda outputs: {"values": outputs})["values"])


def drawn_predictive(posterior: Posterior, data: InputBatches, request: Request) -> Predictive:
    """The predictive distribution of all examples; that of a language model is reduced as it is made."""
    if posterior.reduces(request):
        return join_tokens(list(_reduced_parts(posterior, data, request)))
    latest: list[Any] = []
    tensors = _assembled(posterior, data, request, _converter(posterior, request.link, latest))
    return posterior.tempered(replace(latest[0], **tensors))


def drawn_parts(posterior: Posterior, data: InputBatches, request: Request) -> Iterator[Predictive]:
    """Predictives of some examples at a time, in order: of `batch_size` where that is given."""
    most = request.batch_size or ROUND
    if posterior.reduces(request):
        yield from _reduced_parts(posterior, data, request, most)
        return
    latest: list[Any] = []
    convert = _converter(posterior, request.link, latest)
    with _sampling(posterior, data, request) as (sampler, numbers, size):
        examples = min(most, ROUND, ROUND_NUMBERS // (sampler.count * numbers))
        for part in rounds_of(sampler, data.in_order(size, posterior.device), convert, max(1, examples)):
            yield posterior.tempered(replace(latest[0], **part))


def draw_plan(posterior: Posterior, count: int, seed: int) -> DrawPlan:
    """How so many draws of a posterior are computed."""
    noisy = bool(posterior.noisy_draws)
    attention = not noisy and count > 1 and posterior.has_stochastic_attention  # one draw alone is its mean attention
    return DrawPlan(posterior.law, noisy, attention, seed, posterior.dropout_rate, posterior.held)


def _assembled(posterior: Posterior, data: InputBatches, request: Request, convert: Convert) -> Params:
    with _sampling(posterior, data, request) as (sampler, _, size):
        return assemble(sampler, data.in_order(size, posterior.device), convert, data.num_data)


def _reduced_parts(
    posterior: Posterior, data: InputBatches, request: Request, most: int = ROUND
) -> Iterator[TokenPredictive]:
    """Reduced predictives of some examples at a time, at most so many, in order."""
    with _sampling(posterior, data, request) as (sampler, numbers, size):
        make = lambda asked: empty_reduction(  # noqa: E731
            posterior.likelihood, asked, request.link, posterior.tempering, request.top
        )
        yield from reduced_rounds(sampler, data.labelled(size, posterior.device), numbers, make, most)


@contextmanager
def _sampling(posterior: Posterior, data: InputBatches, request: Request) -> Iterator[tuple[Sampler, int, int]]:
    """The draws made ready on a shell of one's own; outputs of one example; examples per pass."""
    count = posterior.draws if request.draws is None else request.draws
    check_draws(count, None if posterior.noisy_draws else posterior.law.available)
    posterior.check_base()
    trial_inputs = inputs_to(data.first(TRIAL_EXAMPLES), posterior.device)
    wanted = request.examples_per_batch(posterior.device)
    examples = min(wanted, data.num_data or ROUND)
    with posterior.shells.borrow() as shell:
        plan = draw_plan(posterior, count, request.seed)
        sampler = Sampler(shell, plan, count, trial_inputs, request.strategy, posterior.known, examples)
        numbers = _numbers(sampler, data)
        most = pass_numbers(None if data.num_data is None else count * data.num_data * numbers)
        yield sampler, numbers, max(1, min(wanted, most // numbers))


def _numbers(sampler: Sampler, data: InputBatches) -> int:
    """Outputs of one example, counted by a trial pass on the first."""
    one = inputs_to(data.first(1), sampler.device)
    key = ("numbers", *(tuple(x.shape[1:]) for x in leaves(one) if isinstance(x, Tensor)))
    if key not in sampler.known:
        sampler.known[key] = max(1, sampler.trial(one).numel())
    return int(sampler.known[key])


def _converter(posterior: Posterior, link: Link | None, latest: list[Any]) -> Convert:
    """From outputs to the tensors of a predictive; the predictive itself is put into `latest`."""

    def convert(outputs: Tensor) -> Params:
        predictive = posterior.likelihood.predictive(Draws(outputs), link)
        latest[:] = [predictive]
        return tensors_of(predictive)

    return convert
