"""A posterior: a model, a likelihood and draws of the weights. Ask it with `predict`, keep it with `save`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer import likelihoods
from bayesformer.dataset import check_inputs, map_inputs
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

FORMAT = 1
TENSORS, FACTS = "posterior.safetensors", "posterior.json"


@dataclass(frozen=True)
class Posterior:
    """Draws of a model's trainable weights, and how they were made.

    With `noisy_draws`, the single row of weights is a network whose dropout stays on, and every forward pass
    is a draw; otherwise every row is one.
    """

    model: nn.Module
    likelihood: Likelihood
    theta: Tensor  # (L, P)
    buffers: Params = field(default_factory=dict)  # each (L, ...)
    noisy_draws: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    """what is known of its making: method and settings, data fingerprint, N, history"""
    known_layout: Layout | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        size = self.layout.size
        if self.theta.dim() != 2 or self.theta.shape[1] != size:
            raise ValueError(f"theta must be (L, {size}) for this model; got {tuple(self.theta.shape)}.")

    @cached_property
    def layout(self) -> Layout:
        """Where each parameter lies in a row of theta."""
        return self.known_layout or Layout.of(self.model)

    @cached_property
    def _network(self) -> FlatModel:
        return FlatModel(self.model, gradients=False)

    @property
    def draws(self) -> int:
        """Draws used by `predict` when none are asked for."""
        return self.noisy_draws or len(self.theta)

    def sample(self, draws: int | None = None) -> Params:
        """Weights by name, each with a leading draw axis."""
        count = len(self.theta) if draws is None else draws
        self._check_draws(count, len(self.theta))
        return self.layout.views(self.theta[:count])

    def module(self, draw: int = 0) -> nn.Module:
        """A plain copy of the model with the weights of one draw."""
        flat = FlatModel(self.model)
        flat.load(self.theta[draw])
        flat.load_buffers({name: value[draw] for name, value in self.buffers.items()})
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
        self._check_draws(count, None if self.noisy_draws else len(self.theta))
        size = batch_size or (64 if self.theta.device.type == "cpu" else 1024)
        inputs = map_inputs(inputs, lambda x: x.to(self.theta.device))
        task = PredictTask(self._network, self.theta, self.buffers, inputs, size, bool(self.noisy_draws), seed)
        return Draws(sampled_outputs(task, count, strategy, workers, reporter))

    def predict(self, inputs: Inputs, draws: int | None = None, **options: Any) -> Predictive:
        """The predictive distribution; options as for `outputs`."""
        return self.likelihood.predictive(self.outputs(inputs, draws, **options))

    def save(self, folder: str | Path) -> Path:
        """Write `posterior.safetensors` and `posterior.json` to a folder."""
        folder = Path(folder)
        tensors = {"theta": self.theta, **{f"buffer.{k}": v for k, v in self.buffers.items()}}
        write_tensors(folder / TENSORS, tensors, {"format": FORMAT})
        facts = {
            "format": FORMAT,
            "bayesformer": __version__,
            "torch": torch.__version__,
            "likelihood": likelihoods.to_json(self.likelihood),
            "noisy_draws": self.noisy_draws,
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
        buffers = {k.removeprefix("buffer."): v for k, v in tensors.items() if k.startswith("buffer.")}
        device = device_of(model)
        return cls(
            model=model,
            likelihood=likelihoods.from_json(saved["likelihood"]),
            theta=tensors["theta"].to(device),
            buffers={name: value.to(device) for name, value in buffers.items()},
            noisy_draws=saved["noisy_draws"],
            facts=saved["facts"],
            known_layout=layout,
        )

    @staticmethod
    def _check_draws(count: int, available: int | None) -> None:
        if count < 1 or (available is not None and count > available):
            limit = "at least 1" if available is None else f"between 1 and {available}, the draws it has"
            raise ValueError(f"draws must be {limit}; got {count}.")


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
