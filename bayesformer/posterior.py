"""A posterior: a model, a likelihood and draws of the weights. Ask it with `predict`, keep it with `save`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer import likelihoods
from bayesformer.dataset import check_inputs, map_inputs
from bayesformer.dropout import dropout_sites
from bayesformer.engine import Strategy
from bayesformer.errors import DamagedFileError
from bayesformer.likelihoods import Likelihood
from bayesformer.network import FlatModel, Layout, device_of
from bayesformer.predict.sampled import PredictTask, sampled_outputs
from bayesformer.predictive import Predictive
from bayesformer.progress import Reporter
from bayesformer.storage import checksum, read_json, read_tensors, write_json, write_tensors
from bayesformer.types import Draws, Inputs, Outputs, Params
from bayesformer.version import __version__
from bayesformer.weights import Samples, Weights, from_tensors

FORMAT = 1
TENSORS, FACTS = "posterior.safetensors", "posterior.json"


@dataclass(frozen=True)
class Posterior:
    """A law over a model's trainable weights, and how it was made.

    With `noisy_draws`, the one set of weights is a network that is itself random (dropout stays on, weights are
    drawn inside), and every forward pass is a draw; otherwise draws come from `weights`.
    """

    model: nn.Module
    likelihood: Likelihood
    weights: Weights
    noisy_draws: int = 0
    default_draws: int = 30
    """draws that `predict` takes from a law that can give any number"""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """what is known of its making: method and settings, data fingerprint, N"""
    known_layout: Layout | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        size = self.layout.size
        if self.weights.size != size:
            raise ValueError(f"weights must have {size} numbers per draw for this model; got {self.weights.size}.")

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

    def outputs(
        self,
        inputs: Inputs,
        draws: int | None = None,
        *,
        seed: int = 0,
        batch_size: int | None = None,
        strategy: Strategy = "auto",
        workers: int | None = None,
        reporter: Reporter | None = None,
    ) -> Outputs:
        """Network outputs under the draws, (L, N, ...)."""
        check_inputs(inputs, "inputs")
        count = self.draws if draws is None else draws
        self._check_draws(count, None if self.noisy_draws else self.weights.available)
        device = self.weights.mean.device
        size = batch_size or (64 if device.type == "cpu" else 1024)
        inputs = map_inputs(inputs, lambda x: x.to(device))
        rows = self.weights.rows(1 if self.noisy_draws else count, seed)
        task = PredictTask(self._network, rows, self.weights.buffers, inputs, size, bool(self.noisy_draws), seed)
        return Draws(sampled_outputs(task, count, strategy, workers, reporter))

    def predict(self, inputs: Inputs, draws: int | None = None, **options: Any) -> Predictive:
        """The predictive distribution; options as for `outputs`."""
        return self.likelihood.predictive(self.outputs(inputs, draws, **options))

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
            facts=saved["facts"],
            known_layout=layout,
        )

    @staticmethod
    def _check_draws(count: int, available: int | None) -> None:
        if count < 1 or (available is not None and count > available):
            limit = "at least 1" if available is None else f"between 1 and {available}, the draws it has"
            raise ValueError(f"draws must be {limit}; got {count}.")


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
