"""A posterior: a model, a likelihood and a law over the weights. Ask it with `predict`, keep it with `save`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from bayesformer.attention import AttentionMap, MapRecorder, families
from bayesformer.core.ambient_autocast import without_autocast
from bayesformer.core.doubts import Doubt, doubts_in
from bayesformer.core.pool import Pool
from bayesformer.core.storage import check_folder
from bayesformer.core.strategy import Strategy
from bayesformer.core.types import Inputs, Outputs, Params
from bayesformer.data import as_batches
from bayesformer.generation import Generation, SampledAnswers
from bayesformer.laws import Law, Samples, buffers_of
from bayesformer.layers.preparation import Preparation, prepared_tree
from bayesformer.likelihoods import Likelihood, links
from bayesformer.likelihoods.language import batches_for
from bayesformer.likelihoods.links import Link
from bayesformer.likelihoods.predictive import Predictive, Temperable
from bayesformer.model.shell import Shell
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Space
from bayesformer.predict import saving
from bayesformer.predict.adapter_files import check_exportable, export_adapters, with_adapter, write_mean
from bayesformer.predict.by_draws import draw_plan, drawn_outputs, drawn_parts, drawn_predictive
from bayesformer.predict.by_gaussian import (
    calibrate_on,
    check_gaussian,
    gaussian_outputs,
    gaussian_parts,
    gaussian_predictive,
)
from bayesformer.predict.conformal_sets import Conformal, conformal
from bayesformer.predict.feature_gate import GatedPosterior, gated
from bayesformer.predict.mean_passes import TRIAL_EXAMPLES, MeanPasses
from bayesformer.predict.posterior_card import posterior_card, posterior_line
from bayesformer.predict.request import Request, check_draws, inputs_for
from bayesformer.predict.sampled import Sampler
from bayesformer.predict.self_check import self_check
from bayesformer.predict.streamlined import Calibration
from bayesformer.predict.streamlined.calibrate import INPUTS
from bayesformer.predict.tempering import best_temperature, with_temperature
from bayesformer.predict.token_reduction import TOP
from bayesformer.predict.variance_sources import layer_shares, squared_slopes
from bayesformer.predict.ways import Way, check_way

FEW_DRAWS = 8  # of the weights, for generating text and for adapters that are exported


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
    def mean_passes(self) -> MeanPasses:
        """Passes at the mean of the law, by any number of threads."""
        return MeanPasses(self.skeleton, self.law)

    @property
    def at_mean(self) -> Pool[Shell]:
        """Shells with the weights at their mean, in evaluation mode, which can be differentiated."""
        return self.mean_passes.shells

    @cached_property
    def known(self) -> dict[Any, Any]:
        """What trial passes have found, so that each is made once."""
        return {}

    @without_autocast
    def calibrated(self, data: Any = None) -> Posterior:
        """The same posterior with the calibration of streamlined prediction, made on up to 32 of these inputs.

        By default on training inputs that were kept since the fit, as `predict` does by itself when it is first asked
        for predictive="streamlined"; a posterior that has none is calibrated anew by each call, on the inputs it is
        asked about. The calibration is saved with the posterior, and what it finds is part of `doubts`.
        """
        check_gaussian(self, "streamlined")
        if data is None and self.examples is None:
            raise ValueError("data must be given to calibrate a posterior that keeps no training inputs; got None.")
        inputs = self.examples if data is None else inputs_for(self.model, data).first(INPUTS)
        return replace(self, calibration=(self.law, calibrate_on(self, inputs)))

    @property
    def known_calibration(self) -> Calibration | None:
        """The calibration of streamlined prediction, if one is there already; that of another law does not count."""
        if self.calibration is not None and self.calibration[0] is self.law:
            return self.calibration[1]
        found: Calibration | None = self.known.get("calibration")
        return found

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
        found = self.known_calibration
        return (*doubts_in(self.facts), *(() if found is None else found.doubts))

    @without_autocast
    def check(self, data: Any) -> tuple[Doubt, ...]:
        """The fit's own doubts, and those of checks for which it has no time, on the data that it was fitted to.

        Of chains, the effective number of draws of outputs on the data and far off them, and the temperature by
        gradients of all data (one epoch per draw). Of Gaussians, the rise of the negative log joint under draws, how
        far they score below the mean, and whether linearised and sampled outputs spread alike. Of others, such as
        ensembles and networks that are random themselves, nothing is checked, which a line of the log says.
        """
        own, count = batches_for(self.model, as_batches(data, "data"), self.likelihood), self.facts.get("num_data")
        if count and own.num_data != count:
            warnings.warn(
                f"data should be those that the posterior was fitted to, {count} examples; got {own.num_data}: checks "
                "of its temperature and its scale are not about these.",
                stacklevel=3,
            )
        found = self_check(self, own)
        named = {doubt.check for doubt in found}
        return (*(doubt for doubt in self.doubts if doubt.check not in named), *found)

    @without_autocast
    def sample(self, draws: int | None = None, seed: int = 0) -> Params:
        """Weights by name, each with a leading draw axis."""
        count = (self.law.available or self.default_draws) if draws is None else draws
        check_draws(count, self.law.available)
        return self.space.views(self.law.rows(count, seed))

    def module(self, draw: int = 0, seed: int = 0) -> nn.Module:
        """A plain copy of the model with the weights and buffers of one draw, in evaluation mode."""
        self.check_base()
        last = None if self.law.available is None else self.law.available - 1
        if isinstance(draw, bool) or not isinstance(draw, int) or draw < 0 or (last is not None and draw > last):
            limit = "at least 0" if last is None else f"between 0 and {last}, the last of its draws"
            raise ValueError(f"draw must be a whole number, {limit}; got {draw!r}.")
        return self.skeleton.plain(self.law.row(draw, seed), buffers_of(self.law, draw)).eval()

    @without_autocast
    def attention_maps(self, inputs: Inputs, draws: int | None = None, seed: int = 0) -> list[AttentionMap]:
        """Mean and spread of every attention map over the draws that `predict` makes, layer by layer."""
        count = self.draws if draws is None else draws
        check_draws(count, None if self.noisy_draws else self.law.available)
        batch = next(inputs_for(self.model, inputs).in_order(2**62, self.device))
        with self.shells.borrow() as shell:
            sampler = Sampler(shell, draw_plan(self, count, seed), count, batch, "looped")
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
        """Network outputs: `Draws` whose `values` (L, N, ...) are those of L draws, or `GaussianOutputs`.

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
        way = self.predictive if predictive is None else predictive
        request = Request(way, draws, None, seed, batch_size, strategy, settings)
        answer = drawn_outputs if way == "sampled" else gaussian_outputs
        return answer(self, inputs_for(self.model, inputs), request)

    @without_autocast
    def joint(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Linearised outputs of a few inputs together: mean (N, ..., K), covariance of all their outputs, flattened."""
        check_gaussian(self, "linearised")
        data = inputs_for(self.model, inputs)
        with self.mean_passes.linearised(data.first(TRIAL_EXAMPLES)) as one:
            return one.joint(next(data.in_order(2**62, self.device)))

    @without_autocast
    def layer_shares(self, inputs: Any) -> dict[str, float]:
        """Share of the outputs' variance due to each random parameter of a Gaussian posterior, largest first.

        By the linearised network on these inputs, summed over outputs and examples; the shares add up to 1.
        """
        check_gaussian(self, "linearised")
        data = inputs_for(self.model, inputs)
        with self.mean_passes.linearised(data.first(TRIAL_EXAMPLES)) as one:
            return layer_shares(one, next(data.in_order(2**62, self.device)))

    @without_autocast
    def input_sensitivity(
        self, inputs: Tensor, output: Tensor | int | None = None, draws: int | None = None, seed: int = 0
    ) -> Tensor:
        """How much noise of variance r in each input would add to the variance of an output, per r, for small r.

        E[(df_k/dx)²] over draws of the weights (Li et al., 2025, section 5), in the shape of the inputs, one tensor of
        real numbers. `output` picks k among an example's outputs, one number or one per example; summed over all by
        default. `draws` is at most 10 unless given; these know a sensitivity to about a third.
        """
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise ValueError("inputs must be one tensor of real numbers to have a sensitivity.")
        count = min(10, self.law.available or 10) if draws is None else draws
        check_draws(count, self.law.available)
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
        draws: they cost no forward pass. Where dropout or attention is random, the noise of a row depends on its place
        in the batch: the same inputs and `batch_size` give the same numbers. Beyond what is returned, memory holds the
        outputs of a few examples.

        Of a language model, with or without an encoder, probabilities of all tokens are not kept: the result is a
        `TokenPredictive` with the uncertainties, the `top` most probable tokens and, where inputs come with labels,
        their log-probabilities, reduced draw by draw. `full=True` gives those of all tokens under all draws.
        """
        way = self.predictive if predictive is None else predictive
        request = Request(way, draws, link, seed, batch_size, strategy, settings, full, top)
        answer = drawn_predictive if way == "sampled" else gaussian_predictive
        return answer(self, inputs_for(self.model, inputs), request)

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

        Each is what `predict` says of up to `batch_size` examples. Without one, of up to `ROUND` examples, fewer where
        their outputs under all draws would be more than `ROUND_NUMBERS` numbers, or of a usual batch where outputs are
        Gaussian. Options as for `predict`; of a language model predictives are reduced in the same way.
        """
        way = self.predictive if predictive is None else predictive
        request = Request(way, draws, link, seed, batch_size, strategy, settings, full, top)
        parts = drawn_parts if way == "sampled" else gaussian_parts
        yield from parts(self, inputs_for(self.model, inputs), request)

    def reduces(self, request: Request) -> bool:
        """Whether predictions are reduced: the likelihood decides, unless all probabilities are asked for."""
        return self.likelihood.reduces and not request.full

    def tempered(self, predictive: Predictive) -> Predictive:
        """A predictive at the temperature that `calibrate` has chosen."""
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
        self.check_base()
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
        check_draws(draws, available)
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

    @cached_property
    def has_stochastic_attention(self) -> bool:
        """Whether the prepared model draws attention weights."""
        with self.shells.borrow() as shell:
            return bool(families(shell.module))

    def check_base(self) -> None:
        """Refuse to answer for a model whose frozen weights have changed since the fit."""
        changed = self.skeleton.changed()
        if changed is not None:
            raise ValueError(
                f"model must not be changed after the fit: {changed} was, and the posterior is one for the weights it "
                "had. Fit again, or give fit a copy of the model."
            )

    def save(self, folder: str | Path) -> Path:
        """Write `posterior.safetensors` and `posterior.json` to a folder.

        Of a PEFT model with one active adapter also PEFT's two files with its mean, for `PeftModel.from_pretrained`.
        """
        self.check_base()
        check_folder(folder, "folder")
        write_mean(self, Path(folder))
        found = self.known_calibration
        if found is None and self.predictive == "streamlined" and self.examples is not None:
            found = calibrate_on(self, self.examples)
        return saving.save(self, Path(folder), found)

    def export_adapters(self, folder: str | Path, draws: int | None = None, seed: int = 0) -> list[Path]:
        """Write draws of LoRA adapters as plain PEFT adapters, folder/draw-0 and so on, for any server that loads such.

        Averaging the probabilities of these adapters is what `predict` does with the same draws and seed, if it draws
        weights (predictive="sampled"). By default 8 draws, or as many as the posterior has if these are fewer. A folder
        that has draws of an earlier call is refused.
        """
        check_exportable(self, Path(folder))
        draws = self._few_draws(draws)
        self.check_base()
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
        return posterior_line(self)
