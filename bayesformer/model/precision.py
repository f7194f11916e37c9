"""Inferred weights in half precision: which modules compute in float32 instead, and how the others are staged.

A spread of 1e-3 of a weight is rounded away in bfloat16, three quarters of its variance. A module at the end of the
network whose weights are all inferred (a head) therefore keeps them in float32 and casts its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer.core.compat import tree_map

HALVES = (torch.bfloat16, torch.float16)
READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # read weights of their children without calling them


def float_leaves(model: nn.Module, weights: Mapping[str, Tensor], device: torch.device) -> dict[str, tuple[str, ...]]:
    """Modules that compute in θ's precision although the user's are in half precision, with the names of their weights.

    These are modules without children, all of whose weights are inferred and after which, in the order of
    registration, no weight of half precision follows that is not of this kind as well: what comes after them can
    take their float32 outputs.
    """
    names = {id(p): name for name, p in weights.items()}
    found = dict[str, tuple[str, ...]]()
    for path, module in reversed(list(model.named_modules())):
        own = list(module.parameters(recurse=False))
        if not any(p.dtype in HALVES for p in own):
            continue
        whole = all(id(p) in names and p.dtype in HALVES and p.device == device for p in own)
        read = isinstance(model.get_submodule(path.rpartition(".")[0]), READERS)
        if read or not whole or next(module.children(), None) is not None:
            break
        found[path] = tuple(names[id(p)] for p in own)
    return _without_ties(model, found)


def _without_ties(model: nn.Module, found: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Leave out every module one of whose weights is also used by a module that is not among them."""
    while True:
        outside = {id(p) for path, m in model.named_modules() if path not in found for p in m.parameters(recurse=False)}
        tied = [path for path in found if any(id(p) in outside for p in model.get_submodule(path).parameters())]
        if not tied:
            return found
        found = {path: names for path, names in found.items() if path not in tied}


class Caster:
    """A forward pre-hook that casts floating inputs of a module to one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ARG002
        """The arguments with every floating tensor cast."""
        return tree_map(self._cast, args), tree_map(self._cast, kwargs)

    def _cast(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


class StagedWeights:
    """Inferred weights of one dtype and device that are not θ's: a vector of their own, filled by casting θ."""

    def __init__(self, slices: Mapping[str, slice], shapes: Mapping[str, torch.Size], like: Tensor) -> None:
        """`slices` says where the weights lie in θ, `like` gives dtype and device."""
        self.runs = list[tuple[slice, slice]]()  # places in θ and here, neighbours in both joined
        self.weights = dict[str, Tensor]()
        sizes = [place.stop - place.start for place in slices.values()]
        self.flat = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
        start = 0
        for (name, place), size in zip(slices.items(), sizes, strict=True):
            self.weights[name] = self.flat[start : start + size].view(shapes[name])
            self._join(place, slice(start, start + size))
            start += size

    def _join(self, there: slice, here: slice) -> None:
        if self.runs and self.runs[-1][0].stop == there.start:
            before, own = self.runs.pop()
            there, here = slice(before.start, there.stop), slice(own.start, here.stop)
        self.runs.append((there, here))

    def load(self, theta: Tensor) -> None:
        """Take the values of θ (P,), rounded."""
        for there, here in self.runs:
            self.flat[here].copy_(theta[there])


class Collector:
    """Adds the gradient of a staged weight to its place in the flat gradient, in θ's precision, and drops it."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def __call__(self, weight: Tensor) -> None:
        """Called by torch when a backward pass has added to `weight.grad`."""
        if weight.grad is not None:
            self.target.add_(weight.grad.to(self.target.device, self.target.dtype))
            weight.grad = None
