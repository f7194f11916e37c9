"""A posterior: a model, a likelihood and a law of the weights. Ask it with `predict`, keep it with `save`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from bayesformer import likelihoods, links
from bayesformer.attention import AttentionMap, MapRecorder, families
from bayesformer.dataset import check_inputs, first_tensor, map_inputs
from bayesformer.dropout import dropout_sites
from bayesformer.engine import Strategy
from bayesformer.errors import DamagedFileError, unknown_name
from bayesformer.likelihoods import Likelihood
from bayesformer.links import Link
from bayesformer.network import FlatModel, Layout, device_of
from bayesformer.predict.linearised import Linearised
from bayesformer.predict.sampled import PredictTask, sampled_outputs
from bayesformer.predictive import Predictive
from bayesformer.progress import Reporter, Silent
from bayesformer.storage import checksum, read_json, read_tensors, write_json, write_tensors
from bayesformer.types import Draws, Inputs, Outputs, Params
from bayesformer.version import __version__
from bayesformer.weights import Samples, Weights, from_tensors

Way: TypeAlias = Literal["sampled", "linearised", "streamlined"]
"""From weights to outputs: a forward pass per draw of the weights; the network made linear in its weights, whose
outputs are Gaussian; or moments carried through one forward pass."""
WAYS: tuple[str, ...] = get_args(Way)

FORMAT = 1
TENSORS, FACTS = "posterior.safetensors", "posterior.json"


@dataclass(frozen=True)
class Posterior:
    """A law over a model's trainable weights, and how it was made.

    With `noisy_draws`, the one set of weights is a network that is itself random (dropout stays on, weights are
    drawn inside), and every forward pass is a draw; otherwise draws come from `weights`. A model with stochastic
    attention draws it too in the pass of every draw of the weights; Gaussian outputs are those of mean attention.
    """

    model: nn.Module
    likelihood: Likelihood
    weights: Weights
    noisy_draws: int = 0
    default_draws: int = 30
    """draws that `predict` takes from a law that can give any number"""
    predictive: Way = "sampled"
    """how `predict` gets outputs when it is not told"""
    link: Link | None = None
    """how it turns a Gaussian over outputs into probabilities; None is the likelihood's own way"""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """what is known of its making: method and settings, data fingerprint, N"""
    known_layout: Layout | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        size = self.layout.size
        if self.weights.size != size:
            raise ValueError(f"weights must have {size} numbers per draw for this model; got {self.weights.size}.")
        check_way(self.predictive)
        links.check_link(self.link)

    @cached_property
    def layout(self) -> Layout:
        """Where each parameter lies in a row of weights."""
        return self.known_layout or Layout.of(self.model)

    @cached_property
    def _network(self) -> FlatModel:
        return FlatModel(self.model, gradients=False)

    @property
    def theta(self) -> Tensor:
        """(L, P): the draws that were made; for a Gaussian, its mean as one row."""
        return self.weights.theta if isinstance(self.weights, Samples) else self.weights.mean[None]

    @property
    def draws(self) -> int:
        """Draws used by `predict` when none are asked for."""
        return self.noisy_draws or self.weights.available or self.default_draws

    def sample(self, draws: int | None = None, seed: int = 0) -> Params:
        """Weights by name, each with a leading draw axis."""
        count = (self.weights.available or self.default_draws) if draws is None else draws
        self._check_draws(count, self.weights.available)
        return self.layout.views(self.weights.rows(count, seed))

    def module(self, draw: int = 0, seed: int = 0) -> nn.Module:
        """A plain copy of the model with the weights of one draw."""
        flat = FlatModel(self.model)
        flat.load(self.weights.rows(draw + 1, seed)[draw])
        flat.load_buffers({name: value[draw] for name, value in self.weights.buffers.items()})
        flat.module.zero_grad(set_to_none=True)
        return flat.module.eval()

    def attention_maps(self, inputs: Inputs, draws: int | None = None, seed: int = 0) -> list[AttentionMap]:
        """Mean and spread of every attention map over the draws that `predict` makes, layer by layer."""
        check_inputs(inputs, "inputs")
        count = self.draws if draws is None else draws
        task = self._task(map_inputs(inputs, lambda x: x.to(self.weights.mean.device)), count, seed)
        _ = task.randomness  # found by a trial pass, which is not to be recorded
        with MapRecorder(self._network.module) as recorder:
            for draw in range(count):
                recorder.begin()
                task.single(draw, Silent())
        return recorder.maps()

    def outputs(
        self,
        inputs: Inputs,
        draws: int | None = None,
        *,
        predictive: Way | None = None,
        seed: int = 0,
        batch_size: int | None = None,
        strategy: Strategy = "auto",
        workers: int | None = None,
        reporter: Reporter | None = None,
        settings: Any = None,
    ) -> Outputs:
        """Network outputs: under draws of the weights, (L, N, ...), or as a Gaussian over the outputs.

        Args:
            inputs: what the model is called with.
            draws: of the weights, for "sampled".
            predictive: "sampled", "linearised" or "streamlined"; the posterior's own way by default.
            seed: of the draws.
            batch_size: examples at a time.
            strategy: how draws run, for "sampled": "auto" (measured), "looped", "batched" or "processes".
            workers: processes that "processes" may use.
            reporter: told of progress.
            settings: for "streamlined", a `bayesformer.predict.streamlined.Settings`.
        """
        check_inputs(inputs, "inputs")
        way = self.predictive if predictive is None else predictive
        check_way(way)
        device = self.weights.mean.device
        size = batch_size or (64 if device.type == "cpu" else 1024)
        inputs = map_inputs(inputs, lambda x: x.to(device))
        if way != "sampled":
            return self._gaussian_outputs(way, inputs, size, settings)
        count = self.draws if draws is None else draws
        return Draws(sampled_outputs(self._task(inputs, count, seed, size), count, strategy, workers, reporter))

    def _task(self, inputs: Inputs, count: int, seed: int, size: int | None = None) -> PredictTask:
        """The work of predicting with `count` draws, `size` examples at a time or all."""
        self._check_draws(count, None if self.noisy_draws else self.weights.available)
        noisy = bool(self.noisy_draws)
        rows = self.weights.rows(1 if noisy else count, seed)
        attention = not noisy and count > 1 and bool(families(self.model))  # one draw alone is its mean attention
        examples = len(first_tensor(inputs)) if size is None else size
        return PredictTask(self._network, rows, self.weights.buffers, inputs, examples, noisy, seed, attention)

    def _gaussian_outputs(self, way: Way, inputs: Inputs, batch_size: int, settings: Any) -> Outputs:
        _check_gaussian(self, way)
        if way == "linearised":
            return self._linearised(inputs, batch_size)
        from bayesformer.predict.streamlined import streamlined_outputs

        return streamlined_outputs(self._at_mean, self.layout, self.weights, inputs, settings, batch_size)

    @cached_property
    def _at_mean(self) -> nn.Module:
        """A private copy with the weights at their mean, in eval mode, which can be differentiated."""
        flat = FlatModel(self.model)
        flat.load(self.weights.mean)
        flat.module.zero_grad(set_to_none=True)
        return flat.module.eval()

    @cached_property
    def _linearised(self) -> Linearised:
        return Linearised(self._at_mean, self.layout, self.weights)

    def joint(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Linearised outputs of a few inputs together: mean (N, ..., K), covariance of all their outputs, flattened."""
        check_inputs(inputs, "inputs")
        _check_gaussian(self, "linearised")
        device = self.weights.mean.device
        inputs = map_inputs(inputs, lambda x: x.to(device))
        return self._linearised.joint(inputs)

    def predict(
        self,
        inputs: Inputs,
        draws: int | None = None,
        *,
        predictive: Way | None = None,
        link: Link | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Predictive:
        """The predictive distribution; further options as for `outputs`.

        With "sampled", `draws` counts draws of the weights. Otherwise outputs are Gaussian, `link` says how they
        become probabilities (see `bayesformer.links`), and `draws` counts draws of the outputs where that takes
        draws: they cost no forward pass.
        """
        way = self.predictive if predictive is None else predictive
        found = self.outputs(inputs, draws, predictive=predictive, seed=seed, **options)
        if way == "sampled":
            return self.likelihood.predictive(found, link)
        chosen = self.link if link is None else link
        return self.likelihood.predictive(found, chosen, self.default_draws if draws is None else draws, seed)

    def save(self, folder: str | Path) -> Path:
        """Write `posterior.safetensors` and `posterior.json` to a folder."""
        folder = Path(folder)
        tensors = self.weights.tensors()
        write_tensors(folder / TENSORS, tensors, {"format": FORMAT})
        facts = {
            "format": FORMAT,
            "bayesformer": __version__,
            "torch": torch.__version__,
            "likelihood": likelihoods.to_json(self.likelihood),
            "noisy_draws": self.noisy_draws,
            "default_draws": self.default_draws,
            "predictive": self.predictive,
            "link": self.link,
            "dropout": [getattr(module, name) for module, name in dropout_sites(self.model)],
            "names": list(self.layout.names),
            "shapes": [list(shape) for shape in self.layout.shapes],
            "frozen": frozen_fingerprint(dict(self.model.named_parameters())),
            "checksum": checksum(tensors),
            "facts": dict(self.facts),
        }
        # Last: a folder without it is a save that did not finish.
        write_json(folder / FACTS, facts)
        return folder

    @classmethod
    def load(cls, folder: str | Path, model: nn.Module) -> Posterior:
        """A saved posterior over the weights of `model`, bit for bit as it was saved.

        `model` gives the architecture and any frozen weights; it is not changed and its trainable weights are
        not used. A file that is truncated, altered or was made for another model is refused.
        """
        folder = Path(folder)
        saved = read_json(folder / FACTS, "posterior")
        if saved.get("format") != FORMAT:
            raise DamagedFileError(f"posterior {folder} must have format {FORMAT}; got {saved.get('format')!r}.")
        tensors = read_tensors(folder / TENSORS, "posterior")
        if checksum(tensors) != saved.get("checksum"):
            raise DamagedFileError(f"posterior {folder / TENSORS} was altered: its checksum differs.")
        layout = _check_same_model(saved, model, folder)
        device = device_of(model)
        if saved["noisy_draws"]:
            model = _with_rates(model, saved["dropout"], folder)
        return cls(
            model=model,
            likelihood=likelihoods.from_json(saved["likelihood"]),
            weights=from_tensors({name: tensor.to(device) for name, tensor in tensors.items()}),
            noisy_draws=saved["noisy_draws"],
            default_draws=saved["default_draws"],
            predictive=saved.get("predictive", "sampled"),  # files of before there was a choice
            link=saved.get("link"),
            facts=saved["facts"],
            known_layout=layout,
        )

    @staticmethod
    def _check_draws(count: int, available: int | None) -> None:
        if count < 1 or (available is not None and count > available):
            limit = "at least 1" if available is None else f"between 1 and {available}, the draws it has"
            raise ValueError(f"draws must be {limit}; got {count}.")


def check_way(way: str) -> None:
    """Refuse a way to outputs that does not exist."""
    if way not in WAYS:
        raise unknown_name("predictive", way, WAYS)


def _check_gaussian(posterior: Posterior, way: str) -> None:
    if isinstance(posterior.weights, Samples):
        what = "a random network" if posterior.noisy_draws else f"{posterior.weights.available} draws"
        raise ValueError(
            f"predictive={way!r} needs a posterior that is a Gaussian over the weights; this one is {what}. "
            "Use predictive='sampled'."
        )


def _with_rates(model: nn.Module, rates: list[float], folder: Path) -> nn.Module:
    """A copy with the dropout rates it was trained with: at others, the draws would be other draws."""
    model = copy.deepcopy(model)
    sites = dropout_sites(model)
    if len(sites) != len(rates):
        raise DamagedFileError(
            f"posterior {folder} belongs to another model: it has {len(rates)} dropout sites in the file "
            f"and {len(sites)} in the model."
        )
    for (module, name), rate in zip(sites, rates, strict=True):
        setattr(module, name, rate)
    return model


def frozen_fingerprint(parameters: Mapping[str, nn.Parameter]) -> str:
    """A hash of the weights that are not trained: draws for one base model are wrong on another."""
    return checksum({name: p for name, p in parameters.items() if not p.requires_grad})


def _check_same_model(saved: Mapping[str, Any], model: nn.Module, folder: Path) -> Layout:
    parameters = dict(model.named_parameters())
    layout = Layout.among(parameters)
    if saved["names"] != list(layout.names) or saved["shapes"] != [list(shape) for shape in layout.shapes]:
        raise DamagedFileError(f"posterior {folder} belongs to another model: {_first_difference(saved, layout)}.")
    if saved["frozen"] != frozen_fingerprint(parameters):
        raise DamagedFileError(f"posterior {folder} belongs to another model: the frozen weights differ.")
    return layout


def _first_difference(saved: Mapping[str, Any], layout: Layout) -> str:
    theirs = {name: tuple(shape) for name, shape in zip(saved["names"], saved["shapes"], strict=True)}
    ours = dict(zip(layout.names, layout.shapes, strict=True))
    for name in [*theirs, *ours]:
        if theirs.get(name) != ours.get(name):
            there, here = theirs.get(name, "absent"), ours.get(name, "absent")
            return f"parameter {name!r} is {there} in the file and {here} in the model"
    return "its parameters are in another order"
