"""The tensors of a model, each with the rule by which a shell gets its own: a view of θ, an alias or a clone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesformer.model.admission import address, refuse_tensor, span, view_key

UNNAMED = "a tensor among the model's attributes"


class StridedPart(NamedTuple):
    """Shape, strides and first place of a view, counted from the first number of a contiguous weight."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Leaf:
    """One tensor of the model and the rule by which a shell gets its own."""

    role: str  # "inferred": part of θ; "alias": the user's memory; "own": a clone; "window": a view of an inferred one
    name: str
    tensor: Tensor  # detached; for "own" a snapshot
    kind: type[Tensor] = Tensor
    requires_grad: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    part: StridedPart | None = None  # of a "window": which numbers of the inferred weight it shows


def leaves_of(
    table: list[Any],
    weights: Mapping[str, nn.Parameter],
    names: Mapping[int, str],
    buffers: set[int],
    rewritten: set[int],
) -> dict[int, Leaf]:
    """A Leaf for every tensor in the table of a walk, by its place.

    `weights` are the inferred ones; `names` gives names, `buffers` and `rewritten` sets of tensors, all by identity.
    """
    inferred = {view_key(p): name for name, p in weights.items()}
    homes = dict[int, list[str]]()
    for name, p in weights.items():
        homes.setdefault(address(p), []).append(name)
    found = dict[int, Leaf]()
    for place, tensor in enumerate(table):
        if not isinstance(tensor, Tensor):
            continue
        name = names.get(id(tensor), UNNAMED)
        if isinstance(tensor, nn.Parameter):
            refuse_tensor(tensor, name)
            home = inferred.get(view_key(tensor))
            role, name = ("alias", name) if home is None else ("inferred", home)
            role = "own" if id(tensor) in rewritten else role
            kept = tensor.clone() if tensor.is_inference() or role == "own" else tensor
            found[place] = Leaf(role, name, kept.detach(), type(tensor), tensor.requires_grad, dict(tensor.__dict__))
            continue
        home = None if id(tensor) in buffers else _home(tensor, weights, homes)
        if home is not None:
            start = int(tensor.storage_offset() - weights[home].storage_offset())
            part = StridedPart(tuple(tensor.shape), tensor.stride(), start)
            found[place] = Leaf("window", home, weights[home].detach(), part=part)
        else:
            found[place] = Leaf("own", name, tensor.detach().clone(), attributes=dict(tensor.__dict__))
    return found


def rewritten_weights(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> set[int]:
    """Weights outside the Space that a forward pass writes into; raises if an inferred one is such."""
    modules = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None]
    found = {id(module.weight) for module in modules}
    for name, weight in weights.items():
        if id(weight) in found:
            raise ValueError(
                f"inferred weights must not be written by forward; {name} belongs to an embedding with max_norm, which "
                "rescales it in every pass. Leave it out by infer=, or build the embedding without max_norm."
            )
    return found


def _home(tensor: Tensor, weights: Mapping[str, nn.Parameter], homes: Mapping[int, list[str]]) -> str | None:
    """The inferred weight in whose memory a plain tensor lies."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    for name in homes.get(address(tensor), ()):
        (start, stop), (first, last) = span(tensor), span(weights[name])
        if first <= start and stop <= last and weights[name].is_contiguous():
            if tensor.requires_grad:
                raise ValueError(
                    f"model must not keep a view of the inferred weight {name} as an attribute: its gradient would be "
                    "lost. Take the view inside forward."
                )
            return name
    return None


def alias(leaf: Leaf, requires_grad: bool = False) -> Tensor:
    """A Parameter on the same memory, of the same class and with the same attributes."""
    if issubclass(leaf.kind, nn.Parameter) and leaf.kind is not nn.Parameter:
        tensor = leaf.tensor.detach().as_subclass(leaf.kind).requires_grad_(requires_grad)
    else:
        tensor = nn.Parameter(leaf.tensor, requires_grad)
    tensor.__dict__.update(leaf.attributes)
    return tensor


def own(leaf: Leaf) -> Tensor:
    """A clone of a snapshot, without gradient."""
    tensor = leaf.tensor.clone()
    if issubclass(leaf.kind, nn.Parameter):
        return alias(replace(leaf, tensor=tensor))
    tensor.__dict__.update(leaf.attributes)
    return tensor


def window(leaf: Leaf, weight: Tensor) -> Tensor:
    """The numbers of a contiguous `weight` that a plain tensor shows of the user's, without gradient."""
    assert leaf.part is not None
    shape, stride, start = leaf.part
    return weight.detach().as_strided(shape, stride, weight.storage_offset() + start)
