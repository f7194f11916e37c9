"""A posterior: a model, a likelihood and a law over the weights. Ask it with `predict`, keep it with `save`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from bayesformer.attention import AttentionMap, MapRecorder, families
from bayesformer.core.ambient_autocast import without_autocast
from bayesformer.core.doubts import Doubt, doubts_in, warn_of
from bayesformer.core.pool import Pool
from bayesformer.core.seeds import generator
from bayesformer.core.strategy import Strategy
from bayesformer.core.types import Draws, GaussianOutputs, Inputs, Outputs, Params
from bayesformer.data import as_batches, as_inputs
from bayesformer.data.inputs import inputs_to, leaves, map_inputs
from bayesformer.data.unlabelled import Asked, InputBatches, TensorInputs
from bayesformer.generation import Generation, SampledAnswers
from bayesformer.inference.diagnostics import chain_words
from bayesformer.laws import GaussianLaw, Law, Samples, buffers_of
from bayesformer.layers.preparation import Preparation, prepared_tree
from bayesformer.likelihoods import Likelihood, links
from bayesformer.likelihoods.language import batches_for, check_tokens, padding_token
from bayesformer.likelihoods.links import Link
from bayesformer.likelihoods.predictive import CategoricalPredictive, Predictive, Temperable
from bayesformer.likelihoods.token_predictive import TokenPredictive, join_tokens
from bayesformer.model.admission import check_count
from bayesformer.model.randomness import find_randomness
from bayesformer.model.shell import Shell
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Space
from bayesformer.predict import saving
from bayesformer.predict.adapter_files import check_exportable, export_adapters, with_adapter, write_mean
from bayesformer.predict.assemble import (
    PASS_NUMBERS,
    ROUND,
    ROUND_NUMBERS,
    Convert,
    assemble,
    pass_numbers,
    rounds_of,
    tensors_of,
)
from bayesformer.predict.conformal_sets import Conformal, conformal
from bayesformer.predict.decoder_feeding import fed
from bayesformer.predict.feature_gate import GatedPosterior, gated
from bayesformer.predict.linearised import Linearised
from bayesformer.predict.posterior_card import posterior_card
from bayesformer.predict.sampled import DrawPlan, Sampler
from bayesformer.predict.self_check import self_check
from bayesformer.predict.streamlined import Calibration, RuleSettings, Streamliner
from bayesformer.predict.streamlined.calibrate import INPUTS, calibrate
from bayesformer.predict.streamlined.variance_check import EXAMPLES, one_pass_doubt, variance_ratio
from bayesformer.predict.tempering import best_temperature, with_temperature
from bayesformer.predict.token_reduction import MISSING, TOP, TokenReduction, drawn_in_groups, reduced_rounds
from bayesformer.predict.variance_sources import layer_shares, squared_slopes
from bayesformer.predict.ways import Way, check_way

FEW_DRAWS = 8  # of the weights, for generating text and for adapters that are exported
TRIAL_EXAMPLES = 2  # examples of a trial pass
T = TypeVar("T")


@dataclass(frozen=True)
class Posterior:
    """A law over a model's inferred weights, and how it was made.

    It is a value: any number of threads may ask it at once, and the model that it was made from is never changed. With
    `noisy_draws`, the one set of weights is a network that is itself random (dropout stays on, weights or attention are
    drawn inside), and every forward pass is a draw; otherwise draws come from `law`. A model with stochastic attention
    draws it too in the pass of every draw of the weights; Gaussian outputs are those of mean attention.
    """

    model: nn.Module
    """the user's own"""
    likelihood: Likelihood
    law: Law
    space: Space = cast(Space, None)  # noqa: RUF009
    """the inferred weights; by default those of the model that require a gradient"""
    infer: tuple[str, ...] = ()
    """names of the inferred weights in the user's model; by default those of `space`"""
    preparation: Preparation = field(default_factory=Preparation)
    """what is changed in the model before it is called"""
    noisy_draws: int = 0
    dropout_rate: float | None = None
    """rate of every dropout in noisy passes in place of the model's own; None keeps those"""
    held: tuple[str, ...] = ()
    """modules in evaluation mode in noisy passes"""
    default_draws: int = 30
    """draws that `predict` takes from a law that can give any number"""
    predictive: Way = "sampled"
    """how `predict` gets outputs when it is not told"""
    link: Link | None = None
    """how it turns a Gaussian over outputs into probabilities; None is the likelihood's own way"""
    tempering: float = 1.0
    """temperature of everything it predicts, chosen by `calibrate`; 1 leaves the predictive as it is"""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """what is known of its making: method and settings, data fingerprint, N, strategy, whether it converged"""
    frozen: Params = field(default_factory=dict, repr=False)
    """weights outside the space that no model holds: those that a building function drew at random"""
    examples: Inputs | None = field(default=None, repr=False, compare=False)
    """some training inputs, for the calibration of streamlined prediction; in memory only, never in a file"""
    calibration: tuple[Law, Calibration] | None = field(default=None, repr=False, compare=False)
    """of streamlined prediction, with the law that it was made for; see `calibrated`"""
    walked: tuple[Any, Skeleton] | None = field(default=None, repr=False, compare=False)
    """the skeleton, made with the posterior so that later changes of the model are no part of it, and its origin"""

    def __post_init__(self) -> None:
        if vars(self)["space"] is None:
            object.__setattr__(self, "space", Space.of(self.model))
        if not self.infer:
            object.__setattr__(self, "infer", self.space.names)
        if self.law.size != self.space.size:
            raise ValueError(f"law must have {self.space.size} numbers per draw for this model; got {self.law.size}.")
        check_way(self.predictive)
        links.check_link(self.link)
        made = None if self.walked is None else self.walked[0]
        if made != self._origin:
            object.__setattr__(self, "walked", (self._origin, self._walk()))

    @property
    def _origin(self) -> tuple[Any, ...]:
        """What a skeleton is made of: another one is made where this is another."""
        return saving.origin_of(self.model, self.space, self.infer, self.preparation, self.frozen)

    @property
    def skeleton(self) -> Skeleton:
        """The prepared model as it was when the posterior was made, ready to make shells."""
        assert self.walked is not None
        return self.walked[1]

    def _walk(self) -> Skeleton:
        return Skeleton(prepared_tree(self.model, self.infer, self.preparation, self.frozen), self.space)

    @cached_property
    def shells(self) -> Pool[Shell]:
        """Shells for sampling, one per thread at a time."""
        return Pool(lambda: self.skeleton.shell(gradients=False))

    @cached_property
    def at_mean(self) -> Pool[Shell]:
        """Shells with the weights at their mean, in evaluation mode, which can be differentiated."""
        return Pool(self._mean_shell)

    def _mean_shell(self) -> Shell:
        shell = self.skeleton.shell()
        shell.load(self.law.mean)
        shell.load_buffers(buffers_of(self.law, 0))
        shell.module.eval()
        for parameter in shell.module.parameters():
            parameter.grad = None
        if self.law.buffers:  # a pass may change them, and the next starts from those of the law all the same
            shell.module.register_forward_pre_hook(lambda *_: shell.load_buffers(buffers_of(self.law, 0)))
        return shell

    @cached_property
    def _linearised(self) -> Pool[Linearised]:
        return Pool(lambda: Linearised(self._mean_shell().module, self.space, self.law))

    @cached_property
    def _streamliners(self) -> Pool[Streamliner]:
        return Pool(lambda: Streamliner(self._mean_shell(), self.law))

    @contextmanager
    def _passes_at_mean(self, inputs: Inputs) -> Iterator[bool]:
        """A context for passes at the mean of the law, in evaluation mode; yields whether they draw random numbers.

        A model that does so even then takes them from a stream of its own. What is made on its first batch must be
        made anew for each call, since that draws random numbers, too.
        """
        if "evaluation randomness" not in self._known:
            trial_inputs = inputs_to(map_inputs(inputs, lambda x: x[:TRIAL_EXAMPLES]), self.device)
            with self.at_mean.borrow() as shell, torch.no_grad():
                self._known["evaluation randomness"] = find_randomness(shell.module, lambda: shell(trial_inputs))
        found = self._known["evaluation randomness"]
        with found.passing(generator(0, "mean", device=self.device)):
            yield found.kind != "none"

    # The calibration of streamlined prediction.

    @without_autocast
    def calibrated(self, data: Any = None) -> Posterior:
        """The same posterior with the calibration of streamlined prediction, made on up to 32 of these inputs.

        By default on training inputs that were kept since the fit, as `predict` does by itself when it is first asked
        for predictive="streamlined"; a posterior that has none is calibrated anew by each call, on the inputs it is
        asked about. The calibration is saved with the posterior, and what it finds is part of `doubts`.
        """
        _check_gaussian(self, "streamlined")
        if data is None and self.examples is None:
            raise ValueError("data must be given to calibrate a posterior that keeps no training inputs; got None.")
        inputs = self.examples if data is None else self._inputs(data).first(INPUTS)
        return replace(self, calibration=(self.law, self._calibrate(inputs)))

    def _calibrate(self, inputs: Any) -> Calibration:
        self._check_base()
        given = inputs_to(inputs, self.device)
        with self._passes_at_mean(given) as noisy, self._lent(self._streamliners, noisy) as streamliner:
            return calibrate(streamliner, given, noisy=noisy)

    @property
    def _calibrated(self) -> Calibration | None:
        """The calibration that is there already, if any; that of another law does not count."""
        if self.calibration is not None and self.calibration[0] is self.law:
            return self.calibration[1]
        found: Calibration | None = self._known.get("calibration")
        return found

    def _calibration(self, data: InputBatches) -> Calibration:
        """The calibration: of this posterior, or made now; a function of the posterior and these inputs alone."""
        found = self._calibrated
        if found is None and self.examples is None:
            return self._calibrate(data.first(INPUTS))
        if found is None:
            found = self._known["calibration"] = self._calibrate(self.examples)
            warn_of(found.doubts)
        return found

    @staticmethod
    @contextmanager
    def _lent(pool: Pool[T], anew: bool) -> Iterator[T]:
        """An object of the pool, or a new one of its kind."""
        with (Pool(pool.make) if anew else pool).borrow() as one:
            yield one

    @property
    def theta(self) -> Tensor:
        """(L, P): the draws that were made; for a Gaussian, its mean as one row."""
        return self.law.theta if isinstance(self.law, Samples) else self.law.mean[None]

    @property
    def draws(self) -> int:
        """Draws used by `predict` when none are asked for."""
        return self.noisy_draws or self.law.available or self.default_draws

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return self.law.mean.device

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        """Why not to believe it as it stands: what the checks at the end of the fit found; empty if nothing."""
        found = self._calibrated
        return (*doubts_in(self.facts), *(() if found is None else found.doubts))

    @without_autocast
    def check(self, data: Any) -> tuple[Doubt, ...]:
        """The thorough checks, which a fit has no time for: doubts found on the data that it was fitted to.

        Of chains, the effective number of draws of outputs on the data and far off them, and the temperature by
        gradients of all data (one epoch per draw). Of Gaussians, the rise of the negative log joint under draws, how
        far they score below the mean, and whether linearised and sampled outputs spread alike.
        """
        return self_check(self, batches_for(self.model, as_batches(data, "data"), self.likelihood))

    @without_autocast
    def sample(self, draws: int | None = None, seed: int = 0) -> Params:
        """Weights by name, each with a leading draw axis."""
        count = (self.law.available or self.default_draws) if draws is None else draws
        self._check_draws(count, self.law.available)
        return self.space.views(self.law.rows(count, seed))

    def module(self, draw: int = 0, seed: int = 0) -> nn.Module:
        """A plain copy of the model with the weights and buffers of one draw, in evaluation mode."""
        self._check_base()
        last = None if self.law.available is None else self.law.available - 1
        if isinstance(draw, bool) or not isinstance(draw, int) or draw < 0 or (last is not None and draw > last):
            limit = "at least 0" if last is None else f"between 0 and {last}, the last of its draws"
            raise ValueError(f"draw must be a whole number, {limit}; got {draw!r}.")
        return self.skeleton.plain(self.law.row(draw, seed), buffers_of(self.law, draw)).eval()

    @without_autocast
    def attention_maps(self, inputs: Inputs, draws: int | None = None, seed: int = 0) -> list[AttentionMap]:
        """Mean and spread of every attention map over the draws that `predict` makes, layer by layer."""
        count = self.draws if draws is None else draws
        self._check_draws(count, None if self.noisy_draws else self.law.available)
        batch = next(self._inputs(inputs).in_order(2**62, self.device))
        with self.shells.borrow() as shell:
            sampler = Sampler(shell, self._plan(count, seed), count, batch, "looped")
            with MapRecorder(shell.module) as recorder:
                for draw in range(count):
                    recorder.begin()
                    sampler.one(draw, batch)
                return recorder.maps()

    @without_autocast
    def outputs(
        self,
        inputs: Any,
        draws: int | None = None,
        *,
        predictive: Way | None = None,
        seed: int = 0,
        batch_size: int | None = None,
        strategy: Strategy = "auto",
        settings: Any = None,
    ) -> Outputs:
        """Network outputs: under draws of the weights, (L, N, ...), or as a Gaussian over the outputs.

        Args:
            inputs: what the model is called with, in any form that `fit` takes data in, but for one: a tuple of tensors
                is several positional inputs, not (inputs, targets). Labels are left out where they can be told:
                those of `Data`, of a dict, of a Dataset or DataLoader, and of ((x1, x2), targets).
            draws: of the weights, for "sampled".
            predictive: "sampled", "linearised", "streamlined" or "one_pass"; the posterior's own way by default.
            seed: of the draws.
            batch_size: examples at a time.
            strategy: how draws run, for "sampled": "auto" (by the size of the problem), "looped" or "batched".
            settings: for "streamlined" a `bayesformer.predict.streamlined.RuleSettings`, for "one_pass" a
                `bayesformer.predict.one_pass.Settings`.
        """
        way, data = self._way(predictive), self._inputs(inputs)
        if way != "sampled":
            return self._gaussian_outputs(way, data, self._batch_size(batch_size), settings)
        found = self._sampled(data, draws, seed, batch_size, strategy, lambda outputs: {"values": outputs})
        return Draws(found["values"])

    @without_autocast
    def joint(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Linearised outputs of a few inputs together: mean (N, ..., K), covariance of all their outputs, flattened."""
        _check_gaussian(self, "linearised")
        data = self._inputs(inputs)
        with self._passes_at_mean(data.first(TRIAL_EXAMPLES)) as noisy, self._lent(self._linearised, noisy) as one:
            return one.joint(next(data.in_order(2**62, self.device)))

    @without_autocast
    def layer_shares(self, inputs: Any) -> dict[str, float]:
        """Share of the outputs' variance due to each random parameter of a Gaussian posterior, largest first.

        By the linearised network on these inputs, summed over outputs and examples; the shares add up to 1.
        """
        _check_gaussian(self, "linearised")
        data = self._inputs(inputs)
        with self._passes_at_mean(data.first(TRIAL_EXAMPLES)) as noisy, self._lent(self._linearised, noisy) as one:
            return layer_shares(one, next(data.in_order(2**62, self.device)))

    @without_autocast
    def input_sensitivity(
        self, inputs: Tensor, output: Tensor | int | None = None, draws: int | None = None, seed: int = 0
    ) -> Tensor:
        """How much noise of variance r in each input would add to the variance of an output, per r, for small r.

        E[(df_k/dx)²] over draws of the weights (Li et al., 2025, section 5), in the shape of the inputs, one tensor of
        real numbers. `output` picks k among an example's outputs, one number or one per example; summed over all by
        default. `draws` is at most 10 unless given.
        """
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise ValueError("inputs must be one tensor of real numbers to have a sensitivity.")
        count = min(10, self.law.available or 10) if draws is None else draws
        self._check_draws(count, self.law.available)
        x = inputs.to(self.device)
        with self.shells.borrow() as shell:
            found = torch.zeros_like(x)
            for draw in range(count):
                shell.load(self.law.row(draw, seed))
                shell.load_buffers(buffers_of(self.law, draw))
                shell.module.eval()
                found += squared_slopes(shell, x, output) / count
        return found

    @without_autocast
    def predict(
        self,
        inputs: Any,
        draws: int | None = None,
        *,
        predictive: Way | None = None,
        link: Link | None = None,
        seed: int = 0,
        batch_size: int | None = None,
        strategy: Strategy = "auto",
        settings: Any = None,
        full: bool = False,
        top: int = TOP,
    ) -> Predictive:
        """The predictive distribution; options as for `outputs`.

        With "sampled", `draws` counts draws of the weights. Otherwise outputs are Gaussian, `link` says how they
        become probabilities (see `likelihoods.links`), and `draws` counts draws of the outputs where that takes
        draws: they cost no forward pass. Beyond what is returned, memory holds the outputs of a few examples.

        Of a language model (`NextToken`) probabilities of all tokens are not kept: the result is a `TokenPredictive`
        with the uncertainties, the `top` most probable tokens and, where inputs come with labels, their
        log-probabilities, reduced draw by draw. `full=True` gives the probabilities of all tokens under all draws.
        """
        way = self._way(predictive)
        if way != "sampled":
            return self._of_gaussian(way, inputs, draws, link, seed, batch_size, settings, full, top)
        if self._reduces(full, top):
            return join_tokens(list(self._reduced(inputs, draws, link, seed, batch_size, strategy, top)))
        latest: list[Any] = []
        data = self._inputs(inputs)
        tensors = self._sampled(data, draws, seed, batch_size, strategy, self._converter(link, latest))
        return self._tempered(replace(latest[0], **tensors))

    @without_autocast
    def predict_batches(
        self,
        inputs: Any,
        draws: int | None = None,
        *,
        predictive: Way | None = None,
        link: Link | None = None,
        seed: int = 0,
        batch_size: int | None = None,
        strategy: Strategy = "auto",
        settings: Any = None,
        full: bool = False,
        top: int = TOP,
    ) -> Iterator[Predictive]:
        """Predictives of some examples at a time, in order: for data of any length in bounded memory.

        Each is what `predict` says of a group of up to `ROUND` examples, fewer where their outputs under all draws
        would be more than `ROUND_NUMBERS` numbers; a batch at a time where outputs are Gaussian. Options as for
        `predict`; of a language model they are reduced in the same way.
        """
        way = self._way(predictive)
        if way != "sampled":
            yield from self._gaussian_parts(way, inputs, draws, link, seed, batch_size, settings, full, top)
            return
        if self._reduces(full, top):
            yield from self._reduced(inputs, draws, link, seed, batch_size, strategy, top)
            return
        latest: list[Any] = []
        convert = self._converter(link, latest)
        data = self._inputs(inputs)
        with self.shells.borrow() as shell:
            sampler = self._sampler(shell, data, draws, seed, strategy, batch_size)
            size = self._pass_size(sampler, data, batch_size)
            examples = min(ROUND, ROUND_NUMBERS // (sampler.count * self._numbers(sampler, data)))
            for part in rounds_of(sampler, data.in_order(size, self.device), convert, max(1, examples)):
                yield self._tempered(replace(latest[0], **part))

    def _of_gaussian(
        self,
        way: Way,
        inputs: Any,
        draws: int | None,
        link: Link | None,
        seed: int,
        batch_size: int | None,
        settings: Any,
        full: bool,
        top: int,
    ) -> Predictive:
        """The predictive of outputs that are Gaussian."""
        if self._reduces(full, top):
            parts = self._gaussian_parts(way, inputs, draws, link, seed, batch_size, settings, full, top)
            return join_tokens([part for part in parts if isinstance(part, TokenPredictive)])
        found = self.outputs(inputs, predictive=way, batch_size=batch_size, settings=settings)
        return self._of_outputs(found, draws, link, seed)

    def _of_outputs(self, found: Outputs, draws: int | None, link: Link | None, seed: int) -> Predictive:
        """The predictive of Gaussian outputs, by the link and the number of draws that hold here."""
        count = self.default_draws if draws is None else draws
        self._check_draws(count, None)
        return self._tempered(self.likelihood.predictive(found, self.link if link is None else link, count, seed))

    def _gaussian_parts(
        self,
        way: Way,
        inputs: Any,
        draws: int | None,
        link: Link | None,
        seed: int,
        batch_size: int | None,
        settings: Any,
        full: bool,
        top: int,
    ) -> Iterator[Predictive]:
        """Predictives of one batch after another by Gaussian outputs, reduced where the likelihood reduces."""
        data, asked_about = self._inputs(inputs), self
        if way == "streamlined":
            _check_gaussian(self, way)
            asked_about = replace(self, calibration=(self.law, self._calibration(data)))
        if self._reduces(full, top):
            yield from asked_about._reduced_gaussian(way, data, draws, link, seed, batch_size, settings, top)
            return
        size = self._batch_size(batch_size)
        for part in data.in_order(size, self.device):
            found = asked_about._gaussian_outputs(way, TensorInputs(part), size, settings)
            yield self._of_outputs(found, draws, link, seed)

    def _reduced_gaussian(
        self,
        way: Way,
        data: InputBatches,
        draws: int | None,
        link: Link | None,
        seed: int,
        batch_size: int | None,
        settings: Any,
        top: int,
    ) -> Iterator[TokenPredictive]:
        """The same, reduced batch by batch and, where the outputs are drawn, a few draws at a time."""
        chosen, count = self.link if link is None else link, self.default_draws if draws is None else draws
        self._check_draws(count, None)
        with self.at_mean.borrow() as shell, torch.no_grad():
            each = max(1, shell(inputs_to(data.first(1), self.device)).numel())
        size = max(1, min(self._batch_size(batch_size), PASS_NUMBERS // each))
        for asked in data.labelled(size, self.device):
            found = self._gaussian_outputs(way, TensorInputs(asked.inputs), size, settings)
            reduction = self._reduction(asked, None, 1.0, top)
            for some, own_seed in drawn_in_groups(size * each, count, chosen, seed):
                made = self._tempered(self.likelihood.predictive(found, chosen, some, own_seed))
                assert isinstance(made, CategoricalPredictive)
                reduction.add_predictive(made)
            yield reduction.result()

    def _reduces(self, full: bool, top: int) -> bool:
        """Whether predictions are reduced; the likelihood decides, unless all probabilities are asked for."""
        if isinstance(top, bool) or not isinstance(top, int) or top < 1:
            raise ValueError(f"top must be a whole number, at least 1; got {top!r}.")
        if not isinstance(full, bool):
            raise ValueError(f"full must be True or False; got {full!r}.")
        return self.likelihood.reduces and not full

    def _reduced(
        self,
        inputs: Any,
        draws: int | None,
        link: Link | None,
        seed: int,
        batch_size: int | None,
        strategy: Strategy,
        top: int,
    ) -> Iterator[TokenPredictive]:
        """Reduced predictives of some examples at a time, in order, by draws of the weights."""
        data = self._inputs(inputs)
        with self.shells.borrow() as shell:
            sampler = self._sampler(shell, data, draws, seed, strategy, batch_size)
            asked = data.labelled(self._pass_size(sampler, data, batch_size), self.device)
            numbers = self._numbers(sampler, data)
            yield from reduced_rounds(
                sampler, asked, numbers, lambda one: self._reduction(one, link, self.tempering, top)
            )

    def _reduction(self, asked: Asked, link: Link | None, tempering: float, top: int) -> TokenReduction:
        """An empty reduction for one batch, with its labels at the rows that answer them."""
        labels = asked.labels
        if labels is not None:
            moved, counted = self.likelihood.align(labels, asked.mask)
            labels = moved if counted is None else moved.masked_fill(~counted, MISSING)
        return TokenReduction(self.likelihood, labels, link, tempering, top)

    def _tempered(self, predictive: Predictive) -> Predictive:
        if self.tempering == 1:
            return predictive
        assert isinstance(predictive, Temperable)  # `calibrate` has refused others
        return predictive.tempered(self.tempering)

    @without_autocast
    def calibrate(self, validation: Any) -> Posterior:
        """The same posterior whose predictive has the temperature that validation data give the highest likelihood.

        Probabilities of every draw are raised to the power 1/T and normalised, or all variances multiplied by T. The
        weights stay as they are. T stands in `tempering`, and in `facts` with the log-likelihood before and after.
        """
        plain = replace(self, tempering=1.0)
        found, gained = best_temperature(plain, validation)
        facts = with_temperature(self.facts, found, gained)
        return replace(plain, tempering=found, facts=facts)

    @without_autocast
    def conformal(self, calibration_data: Any, level: float = 0.9, seed: int = 0) -> Conformal:
        """Sets, intervals and refusals that are right with probability `level`, whatever this posterior is worth.

        Args:
            calibration_data: labelled examples that training has not seen, from the source of those to come.
            level: how often a set or an interval is to hold the truth.
            seed: of one random number per question, which makes the level of sets exact.
        """
        return conformal(self, calibration_data, level, seed)

    @without_autocast
    def gated(self, train: Any, validation: Any) -> GatedPosterior:
        """A predictive that falls back to equal probabilities where an input's features are unlike the training data's.

        For classifiers of whole examples. Other than a posterior over weights it looks at the inputs, and any posterior
        may have it, an ensemble too.

        Args:
            train: the training data, to whose features a Gaussian per class is fitted.
            validation: labelled examples that training has not seen; they lose .001 nats at most.
        """
        return gated(self, train, validation)

    @without_autocast
    def generate(
        self,
        inputs: Any,
        draws: int | None = None,
        *,
        max_new_tokens: int = 32,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        tokenizer: Any = None,
        stop: Any = None,
        cached: bool | None = None,
        on_step: Any = None,
        num_beams: int = 1,
    ) -> Generation:
        """Continue text with a causal language model, each token from the probabilities averaged over draws.

        One draw of the weights is held for a whole sequence. Where attention or dropout is random, a token's noise is
        drawn once and kept with its entry in the cache.

        Args:
            inputs: text, a list of texts (with a tokenizer), or a mapping with input_ids and attention_mask (B, T),
                padded on the left.
            draws: of the weights; by default 8, or as many as the posterior has if these are fewer.
            max_new_tokens: of each sequence.
            do_sample: draw tokens, instead of taking the most probable one.
            temperature: of the averaged probabilities that tokens are drawn from.
            top_p: draw from the smallest set of tokens that has this probability.
            seed: of the draws of the weights, and of drawn tokens as `torch.manual_seed` with transformers' generate.
            tokenizer: of the model; the result then has text.
            stop: texts or token numbers that end a sequence, beside the model's own end token.
            cached: keep keys and values of what was read; by default where the model can.
            on_step: called with every `Step` and with which sequences run on, as soon as it is known.
            num_beams: must be 1; beams are not supported.
        """
        from bayesformer.generation.writing import Choosing, write

        if num_beams != 1:
            raise ValueError(f"num_beams must be 1, for generate has no beams; got {num_beams!r}.")
        draws = self._few_draws(draws)
        self._check_base()
        choose = Choosing(do_sample, temperature, top_p)
        return write(
            self,
            inputs,
            draws=draws,
            max_new_tokens=max_new_tokens,
            choose=choose,
            seed=seed,
            tokenizer=tokenizer,
            stop=stop,
            cached=cached,
            on_step=on_step,
        )

    def _few_draws(self, given: int | None) -> int:
        """The draws asked for, checked; by default 8, or all there are if these are fewer."""
        available = None if self.noisy_draws else self.law.available
        draws = min(FEW_DRAWS, available or FEW_DRAWS) if given is None else given
        self._check_draws(draws, available)
        return draws

    @without_autocast
    def sample_answers(
        self, inputs: Any, answers: int = 5, *, draws: int | None = None, **options: Any
    ) -> SampledAnswers:
        """Several sampled answers to each prompt, and what they say of how sure the model is; options of `generate`.

        Predictive entropy over answers, its length-normalised form, lexical similarity and self-certainty: scores of a
        whole answer that need no other model.
        """
        from bayesformer.generation.answer_scores import score_answers
        from bayesformer.generation.prompts import as_prompts

        if isinstance(answers, bool) or not isinstance(answers, int) or answers < 2:
            raise ValueError(f"answers must be a whole number, at least 2; got {answers!r}.")
        prompts = as_prompts(self.model, inputs, options.get("tokenizer"), self.device)
        repeated = {
            "input_ids": prompts.ids.repeat_interleave(answers, 0),
            "attention_mask": prompts.mask.repeat_interleave(answers, 0),
        }
        return score_answers(self.generate(repeated, draws, **{"do_sample": True, **options}), answers)

    def _converter(self, link: Link | None, latest: list[Any]) -> Convert:
        """From outputs to the tensors of a predictive; the predictive itself is put into `latest`."""

        def convert(outputs: Tensor) -> Params:
            predictive = self.likelihood.predictive(Draws(outputs), link)
            latest[:] = [predictive]
            return tensors_of(predictive)

        return convert

    def _inputs(self, given: Any) -> InputBatches:
        """Inputs in any form; of an encoder-decoder model with the decoder inputs that its labels make."""
        data = fed(self.model, as_inputs(given, "inputs").padded_with(padding_token(self.model)))
        check_count(self.model, data.inputs if isinstance(data, TensorInputs) else None)
        check_tokens(self.model, data.inputs if isinstance(data, TensorInputs) else data.first(1), "inputs")
        return data

    def _sampled(
        self,
        data: InputBatches,
        draws: int | None,
        seed: int,
        batch_size: int | None,
        strategy: Strategy,
        convert: Convert,
    ) -> Params:
        with self.shells.borrow() as shell:
            sampler = self._sampler(shell, data, draws, seed, strategy, batch_size)
            size = self._pass_size(sampler, data, batch_size)
            return assemble(sampler, data.in_order(size, self.device), convert, data.num_data)

    def _sampler(
        self,
        shell: Shell,
        data: InputBatches,
        draws: int | None,
        seed: int,
        strategy: Strategy,
        batch_size: int | None,
    ) -> Sampler:
        count = self.draws if draws is None else draws
        self._check_draws(count, None if self.noisy_draws else self.law.available)
        self._check_base()
        trial_inputs = inputs_to(data.first(TRIAL_EXAMPLES), self.device)
        examples = min(self._batch_size(batch_size), data.num_data or ROUND)
        return Sampler(shell, self._plan(count, seed), count, trial_inputs, strategy, self._known, examples)

    def _plan(self, count: int, seed: int) -> DrawPlan:
        noisy = bool(self.noisy_draws)
        attention = not noisy and count > 1 and self.has_stochastic_attention  # one draw alone is its mean attention
        return DrawPlan(self.law, noisy, attention, seed, self.dropout_rate, self.held)

    @cached_property
    def has_stochastic_attention(self) -> bool:
        """Whether the prepared model draws attention weights."""
        with self.shells.borrow() as shell:
            return bool(families(shell.module))

    @cached_property
    def _known(self) -> dict[Any, Any]:
        """What trial passes have found, so that each is made once."""
        return {}

    def _pass_size(self, sampler: Sampler, data: InputBatches, wanted: int | None) -> int:
        """Examples per pass: few where one example has many outputs."""
        each = self._numbers(sampler, data)
        most = pass_numbers(None if data.num_data is None else sampler.count * data.num_data * each)
        return max(1, min(self._batch_size(wanted), most // each))

    def _numbers(self, sampler: Sampler, data: InputBatches) -> int:
        """Outputs of one example, counted by a trial pass on the first."""
        one = inputs_to(data.first(1), self.device)
        key = ("numbers", *(tuple(x.shape[1:]) for x in leaves(one) if isinstance(x, Tensor)))
        if key not in self._known:
            self._known[key] = max(1, sampler.trial(one).numel())
        return int(self._known[key])

    def _batch_size(self, given: int | None) -> int:
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise ValueError(f"batch_size must be a whole number, at least 1; got {given!r}.")
        return given or (64 if self.device.type == "cpu" else 1024)

    def _way(self, given: Way | None) -> Way:
        way = self.predictive if given is None else given
        check_way(way)
        return way

    def _check_base(self) -> None:
        changed = self.skeleton.changed()
        if changed is not None:
            raise ValueError(
                f"model must not be changed after the fit: {changed} was, and the posterior is one for the weights it "
                "had. Fit again, or give fit a copy of the model."
            )

    def _gaussian_outputs(self, way: Way, data: InputBatches, batch_size: int, settings: Any) -> Outputs:
        _check_gaussian(self, way)
        _check_settings(way, settings)
        self._check_base()
        calibration = self._calibration(data) if way == "streamlined" else None
        batches = data.in_order(batch_size, self.device)
        with self._passes_at_mean(data.first(TRIAL_EXAMPLES)) as noisy:
            if way == "linearised":
                with self._lent(self._linearised, noisy) as linearised:
                    return linearised.over(batches, data.num_data)
            if calibration is not None:
                with self._lent(self._streamliners, noisy) as streamliner:
                    return streamliner.over(batches, calibration, settings, data.num_data)
            from bayesformer.predict.one_pass import one_pass_outputs

            with self.at_mean.borrow() as shell:
                found = one_pass_outputs(shell.module, self.space, self.law, batches, settings, data.num_data)
            self._doubt_one_pass(data, found, noisy)
            return found

    def _doubt_one_pass(self, data: InputBatches, outputs: GaussianOutputs, noisy: bool) -> None:
        """Say once if variances of one pass are far from those of draws, by the first inputs that were asked about."""
        if "one_pass" in self._known or noisy:
            return
        with self._lent(self._streamliners, noisy) as streamliner:
            ratio = variance_ratio(streamliner, inputs_to(data.first(EXAMPLES), self.device), outputs)
        self._known["one_pass"] = doubt = one_pass_doubt(ratio)
        warn_of([] if doubt is None else [doubt])

    @staticmethod
    def _check_draws(count: int, available: int | None) -> None:
        if isinstance(count, bool) or not isinstance(count, int):
            raise ValueError(f"draws must be a whole number; got {count!r}.")
        if count < 1 or (available is not None and count > available):
            limit = "at least 1" if available is None else f"between 1 and {available}, the draws it has"
            raise ValueError(f"draws must be {limit}; got {count}.")

    def save(self, folder: str | Path) -> Path:
        """Write `posterior.safetensors` and `posterior.json` to a folder.

        Of a PEFT model with one active adapter also PEFT's two files with its mean, for `PeftModel.from_pretrained`.
        """
        self._check_base()
        write_mean(self, Path(folder))
        found = self._calibrated
        if found is None and self.predictive == "streamlined" and self.examples is not None:
            found = self._calibrate(self.examples)
        return saving.save(self, Path(folder), found)

    def export_adapters(self, folder: str | Path, draws: int | None = None, seed: int = 0) -> list[Path]:
        """Write draws of LoRA adapters as plain PEFT adapters, folder/draw-0 and so on, for any server that loads such.

        Averaging the probabilities of these adapters is what `predict` does with the same draws and seed, if it draws
        weights (predictive="sampled"). By default 8 draws, or as many as the posterior has if these are fewer. A folder
        that has draws of an earlier call is refused.
        """
        check_exportable(self, Path(folder))
        draws = self._few_draws(draws)
        self._check_base()
        return export_adapters(self, Path(folder), draws, seed)

    @classmethod
    def load(cls, folder: str | Path, model: nn.Module) -> Posterior:
        """A saved posterior over the weights of `model`, bit for bit as it was saved.

        `model` is the plain model: random weights, stochastic attention and dropout rates that belong to the posterior
        are put in place by themselves. It gives the architecture and the frozen weights; it is not changed, and its
        inferred weights are not used. A file that is truncated, altered or was made for another model is refused.
        """
        given: object = model
        if not isinstance(given, nn.Module):
            hint = " Call it, to give the model that it builds." if callable(given) else ""
            raise ValueError(f"model must be an nn.Module; got {type(given).__name__}.{hint}")
        return cls(**saving.load(Path(folder), with_adapter(Path(folder), model)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Posterior:
        return self  # a value: nothing that is asked of it changes it

    def __getstate__(self) -> dict[str, Any]:
        # pools and trial results are made anew, and so is the skeleton, of the model that arrives
        return {f.name: None if f.name == "walked" else getattr(self, f.name) for f in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "walked", (self._origin, self._walk()))

    def _repr_html_(self) -> str:
        return posterior_card(self)

    def __repr__(self) -> str:
        name = self.facts.get("method", {}).get("name", type(self.law).__name__)
        state = {False: "has not converged", True: "converged", None: "convergence unknown"}
        settled = self.facts.get("converged") or [None]
        verdict = state[False if False in settled else None if None in settled else True]
        found: Any = self.facts.get("coordinates") or self.facts
        decrement = found[0].get("decrement") if isinstance(found, list) else found.get("decrement")
        if decrement is not None:  # steps after the training went on to the mode
            verdict = f"{decrement:.2g} standard deviations from the mode"
        if "diagnostics" in self.facts:  # of Hamiltonian chains, which converge in another sense than a search does
            verdict = chain_words(self.facts["diagnostics"])
        init = f", started from {self.facts['init']} weights" if "init" in self.facts else ""
        doubted = f", {len(self.doubts)} doubts (see .doubts)" if self.doubts else ""
        prior = _chosen_prior(self.facts)
        return (
            f"Posterior({name}: {self.draws} draws over {self.space.size:,} weights of {type(self.model).__name__}, "
            f"{type(self.likelihood).__name__.lower()} likelihood, {verdict}{init}{prior}{doubted})"
        )


def _chosen_prior(facts: Mapping[str, Any]) -> str:
    """In words, that the prior is not N(0, 1) but one whose precision the fit chose, where it did."""
    asked, found = facts.get("method", {}).get("prior_precision"), facts.get("prior_precision")
    if not isinstance(asked, str) or not found:
        return ""
    shown = f"precision {found[0]:.3g}" if len(found) == 1 else f"{len(found)} precisions"
    return f", prior of {shown} chosen from the data"


def _check_settings(way: str, settings: Any) -> None:
    """Refuse settings that belong to another way of predicting."""
    from bayesformer.predict.one_pass import Settings

    kinds: dict[str, type[Any] | None] = {"streamlined": RuleSettings, "one_pass": Settings}
    kind = kinds.get(way)
    if settings is not None and (kind is None or not isinstance(settings, kind)):
        wanted = "None" if kind is None else f"a {kind.__module__.rpartition('.')[0]}.{kind.__name__}"
        raise ValueError(f"settings must be {wanted} for predictive={way!r}; got {type(settings).__name__}.")


def _check_gaussian(posterior: Posterior, way: str) -> None:
    if not isinstance(posterior.law, GaussianLaw):
        kind = type(posterior.law).__name__ if posterior.law.available is None else f"{posterior.law.available} draws"
        what = "a random network" if posterior.noisy_draws else kind
        raise ValueError(
            f"predictive={way!r} needs a posterior that is a Gaussian over the weights; this one is {what}. "
            "Use predictive='sampled'."
        )
