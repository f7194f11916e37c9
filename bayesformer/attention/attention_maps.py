"""Attention looked at: the mean and the spread of every map, over draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bayesformer.attention.family import AttentionFamily, attention_mode
from bayesformer.attention.multi_head import Softmax
from bayesformer.core.types import Inputs
from bayesformer.model.randomness import pass_noise

MOST_HEADS, MOST_PLACES = 8, 64  # of a picture: more would make a file large


class AttentionMap(NamedTuple):
    """What one attention layer attends to."""

    name: str
    """of the module that attends, with a number behind it from the second call in a pass on"""
    mean: Tensor  # (B, H, T, S); (B, H, 1, E) along the edges of a graph
    sd: Tensor  # the same: standard deviation over draws


def attention_maps(model: nn.Module, inputs: Inputs, draws: int = 100, seed: int = 0) -> list[AttentionMap]:
    """Mean and spread of the attention weights of every layer and head, layer by layer.

    The model is left in its mode; dropout is off. Softmax attention of this library's models has no spread.

    Args:
        model: has stochastic attention: a family of its own, or one that `install` gave it.
        inputs: what the model is called with.
        draws: forward passes.
        seed: of the draws; the global stream is left where it was.
    """
    if draws < 2:
        raise ValueError(f"draws must be at least 2, for a spread; got {draws}.")
    training = model.training
    try:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        source = torch.Generator(device).manual_seed(seed)
        noise = pass_noise(source)
        with torch.no_grad(), MapRecorder(model.eval()) as recorder, attention_mode(model, "draw"), noise:
            for _ in range(draws):
                recorder.begin()
                model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        return recorder.maps()
    finally:
        model.train(training)


class MapRecorder:
    """Adds up the attention weights of all passes made within it; call `begin` before each."""

    def __init__(self, model: nn.Module) -> None:
        self.watched: dict[nn.Module, str] = {
            module: name.removesuffix(".family") or "attention"
            for name, module in model.named_modules()
            if isinstance(module, AttentionFamily | Softmax)
        }
        if not self.watched:
            raise ValueError(
                f"model must have attention that this library draws; {type(model).__name__} has none. "
                "Make it so with bayesformer.attention.install."
            )
        self._handles: list[RemovableHandle] = []
        self._moments: dict[str, tuple[int, Tensor, Tensor]] = {}  # count, mean, sum of squares about it
        self._calls: dict[nn.Module, int] = {}

    def __enter__(self) -> MapRecorder:
        self._handles = [module.register_forward_hook(self._see) for module in self.watched]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """Start a new forward pass: reset the counters that number the calls of a layer within one pass."""
        self._calls = {}

    def maps(self) -> list[AttentionMap]:
        """What was seen, in the order of the first pass."""
        if not self._moments:
            raise ValueError("model must attend in a pass to be looked at; none of its families was called.")
        return [
            AttentionMap(name, mean, (squares / max(count - 1, 1)).sqrt())
            for name, (count, mean, squares) in self._moments.items()
        ]

    def _see(self, module: nn.Module, given: Any, draw: Any) -> None:  # noqa: ARG002
        call = self._calls[module] = self._calls.get(module, 0) + 1
        name = self.watched[module] + (f" {call}" if call > 1 else "")
        weights = draw[0].detach().double()
        count, mean, squares = self._moments.get(name, (0, torch.zeros_like(weights), torch.zeros_like(weights)))
        # Welford's update: no difference of large squares.
        away = weights - mean
        mean = mean + away / (count + 1)
        self._moments[name] = count + 1, mean, squares + away * (weights - mean)


def picture(maps: Sequence[AttentionMap]) -> list[dict[str, Any]]:
    """The maps of the first example as plain numbers, head by head; those along the edges of a graph are no picture."""
    found = []
    for seen in maps:
        heads, queries, keys = seen.mean.shape[1:]
        if queries == 1 or max(queries, keys) > MOST_PLACES:
            continue
        for head in range(heads):
            both = {"mean": seen.mean[0, head], "sd": seen.sd[0, head]}
            rounded = {key: [[round(v, 3) for v in row] for row in value.tolist()] for key, value in both.items()}
            found.append({"name": f"{seen.name}, head {head + 1}" if heads > 1 else seen.name, **rounded})
    return found[:MOST_HEADS]
