"""A request to a posterior: the options of `Posterior.predict`, checked, and the inputs it is asked about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bayesformer.core.strategy import Strategy
from bayesformer.data import as_inputs
from bayesformer.data.unlabelled import InputBatches, TensorInputs
from bayesformer.likelihoods.language import check_tokens, padding_token
from bayesformer.likelihoods.links import Link
from bayesformer.model.admission import check_count
from bayesformer.predict.decoder_feeding import fed
from bayesformer.predict.streamlined import RuleSettings
from bayesformer.predict.token_reduction import TOP
from bayesformer.predict.ways import Way, check_way


@dataclass(frozen=True)
class Request:
    """How a posterior is asked; see `Posterior.outputs` and `Posterior.predict` for what each option means."""

    way: Way
    draws: int | None = None
    """None takes as many as the posterior makes by itself"""
    link: Link | None = None
    seed: int = 0
    batch_size: int | None = None
    strategy: Strategy = "auto"
    settings: Any = None
    full: bool = False
    top: int = TOP

    def __post_init__(self) -> None:
        check_way(self.way)
        if self.batch_size is not None:
            _check_whole("batch_size", self.batch_size)
        _check_whole("top", self.top)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be a whole number; got {self.seed!r}.")
        if not isinstance(self.full, bool):
            raise ValueError(f"full must be True or False; got {self.full!r}.")
        _check_settings(self.way, self.settings)

    def examples_per_batch(self, device: torch.device) -> int:
        """The batch size asked for, or one that suits the device."""
        return self.batch_size or (64 if device.type == "cpu" else 1024)


def check_draws(count: int, available: int | None) -> None:
    """Refuse a number of draws that is none, or more than there are."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise ValueError(f"draws must be a whole number; got {count!r}.")
    if count < 1 or (available is not None and count > available):
        limit = "at least 1" if available is None else f"between 1 and {available}, the draws it has"
        raise ValueError(f"draws must be {limit}; got {count}.")


def inputs_for(model: nn.Module, given: Any) -> InputBatches:
    """Inputs in any form; of an encoder-decoder model with the decoder inputs that its labels make."""
    data = fed(model, as_inputs(given, "inputs").padded_with(padding_token(model)))
    check_count(model, data.inputs if isinstance(data, TensorInputs) else None)
    check_tokens(model, data.inputs if isinstance(data, TensorInputs) else data.first(1), "inputs")
    return data


def _check_whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number, at least 1; got {value!r}.")


def _check_settings(way: str, settings: Any) -> None:
    """Refuse settings that belong to another way of predicting."""
    if settings is None:
        return
    from bayesformer.predict.one_pass import Settings

    kinds: dict[str, type[Any] | None] = {"streamlined": RuleSettings, "one_pass": Settings}
    kind = kinds.get(way)
    if kind is None or not isinstance(settings, kind):
        wanted = "None" if kind is None else f"a {kind.__module__.rpartition('.')[0]}.{kind.__name__}"
        raise ValueError(f"settings must be {wanted} for predictive={way!r}; got {type(settings).__name__}.")
