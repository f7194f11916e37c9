"""What PEFT has put into a model, told by attributes: PEFT is never imported.

A layer of PEFT holds, beside the base, tables of weights by adapter, and says which adapters are active.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from itertools import chain
from typing import Any

from torch import nn

ORIGINAL, COPIES = "original_module", "modules_to_save"  # a module as it was, and its copies that adapters train
WRAPPED = ("base_layer", ORIGINAL)  # under which a layer of PEFT holds the module that it was put around


def adapters_of(model: nn.Module) -> list[list[Any]]:
    """The states that PEFT's layers are in, each once: active adapters, whether they are merged, whether disabled."""
    found = set()
    for module in model.modules():
        if hasattr(module, "active_adapters") and hasattr(module, "merged") and hasattr(module, "disable_adapters"):
            active: Any = module.active_adapters
            found.add((tuple(active), bool(module.merged), bool(module.disable_adapters)))
    return [[list(active), merged, disabled] for active, merged, disabled in sorted(found)]


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is PEFT's model around a base."""
    return isinstance(getattr(model, "peft_config", None), dict) and callable(getattr(model, "get_base_model", None))


def active_adapters(model: nn.Module) -> list[str]:
    """The adapters of PEFT whose weights passes use, as its layers say; where it has no layers, as the model says."""
    states = adapters_of(model)
    if states:
        return sorted({name for active, _, disabled in states if not disabled for name in active})
    active = getattr(model, "active_adapter", None) if is_adapted(model) else None
    return [active] if isinstance(active, str) else []


def virtual_tokens(model: nn.Module) -> int:
    """How many tokens the active adapter of PEFT puts before the input (prefix, prompt and P-tuning); 0 for others."""
    known: Any = getattr(model, "peft_config", None) if is_adapted(model) else None
    counts = [known[name].num_virtual_tokens for name in active_adapters(model) if known[name].is_prompt_learning]
    return sum(counts)


def used_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that passes use, each under its first name: all but what PEFT keeps aside.

    Aside are the weights of adapters that are not active, and modules in whose place a trained copy runs.
    """
    aside = _aside(model)
    used = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name not in aside}
    return {name: p for name, p in model.named_parameters() if id(p) in used}


def used_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that passes use, by name: all but what PEFT keeps aside."""
    aside = _aside(model)
    return {name: module for name, module in model.named_modules() if name not in aside}


def unwrapped_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Names of parameters or modules, each with the name that it has where no adapter is put around its layer.

    PEFT calls `o_proj.weight` `o_proj.base_layer.weight` as soon as one adapter, active or not, is around `o_proj`.
    """
    layers = {path for path, module in model.named_modules() if _is_layer(module)}
    return {name: _unwrapped(name, layers) for name in names}


def _unwrapped(name: str, layers: Set[str]) -> str:
    parts = name.split(".")
    return ".".join(p for i, p in enumerate(parts) if p not in WRAPPED or ".".join(parts[:i]) not in layers)


def _is_layer(module: nn.Module) -> bool:
    return hasattr(module, "adapter_layer_names") and hasattr(module, "disable_adapters")


def _aside(model: nn.Module) -> set[str]:
    """The names of the parameters and modules of PEFT's layers that passes leave out."""
    layers = ((path, module) for path, module in model.named_modules() if _is_layer(module))
    return {f"{path}.{name}" if path else name for path, layer in layers for name in _aside_of(layer)}


def _aside_of(layer: Any) -> Iterator[str]:
    """The names within a layer of PEFT of what its passes leave out."""
    active = set() if layer.disable_adapters else set(layer.active_adapters)
    tables = (*layer.adapter_layer_names, *getattr(layer, "other_param_names", ()))
    replaced = bool(active) and COPIES in tables and active <= set(getattr(layer, COPIES))
    inside = (layer.named_parameters(remove_duplicate=False), layer.named_modules(remove_duplicate=False))
    for name, _ in chain(*inside):
        entry = next((name.removeprefix(f"{table}.") for table in tables if name.startswith(f"{table}.")), None)
        other = entry is not None and entry.partition(".")[0] not in active
        if other or (replaced and f"{name}.".startswith(f"{ORIGINAL}.")):
            yield name
