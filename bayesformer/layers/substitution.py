"""Tensors in the place of a model's parameters during a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias, cast

from torch import Tensor, nn

from bayesformer.core.compat import parameter_slots, relist_weights
from bayesformer.model.space import Space

Slots: TypeAlias = dict[str, list[tuple[nn.Module, str]]]
"""Every (module, attribute) that holds a weight, by the weight's name: several for a tied one."""


def slots_of(model: nn.Module, space: Space) -> Slots:
    """Where a model holds the weights of a space, under their first and their other names."""
    others = space.aliases or ((),) * len(space.names)
    found: Slots = {}
    for name, aliases in zip(space.names, others, strict=True):
        places = {}
        for path in (name, *aliases):
            owner, _, key = path.rpartition(".")
            module = model.get_submodule(owner)
            places[id(module), key] = (module, key)  # a module may be registered twice
        found[name] = list(places.values())
    return found


def weight_at(slots: Slots, name: str) -> Tensor:
    """The tensor that the model holds for a weight now."""
    module, key = slots[name][0]
    value = parameter_slots(module)[key]
    assert value is not None
    return value


@contextmanager
def substituted(slots: Slots, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Put tensors in the place of parameters for a while, at all of their places."""
    before = [(module, key, parameter_slots(module)[key]) for name in values for module, key in slots[name]]
    try:
        for name, value in values.items():
            for module, key in slots[name]:
                parameter_slots(module)[key] = cast(nn.Parameter, value)
                relist_weights(module)
        yield
    finally:
        for module, key, own in before:
            parameter_slots(module)[key] = own
            relist_weights(module)
