"""What PEFT has put into a model, told by attributes: PEFT is never imported.

A layer of PEFT holds, beside the base, tables of weights by adapter, and says which adapters are active.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

ORIGINAL, COPIES = "original_module", "modules_to_save"  # a module as it was, and its copies that adapters train


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
    aside = {name for path, module in model.named_modules() for name in _aside(path, module)}
    used = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name not in aside}
    return {name: p for name, p in model.named_parameters() if id(p) in used}


def _aside(path: str, module: Any) -> Iterator[str]:
    """The names of a PEFT layer's weights that its passes leave out."""
    if not (hasattr(module, "adapter_layer_names") and hasattr(module, "disable_adapters")):
        return
    active = set() if module.disable_adapters else set(module.active_adapters)
    tables = (*module.adapter_layer_names, *getattr(module, "other_param_names", ()))
    replaced = bool(active) and COPIES in tables and active <= set(getattr(module, COPIES))
    for name, _ in module.named_parameters(remove_duplicate=False):
        inside = next((name.removeprefix(f"{table}.") for table in tables if name.startswith(f"{table}.")), None)
        other = inside is not None and inside.partition(".")[0] not in active
        if other or (replaced and name.startswith(f"{ORIGINAL}.")):
            yield f"{path}.{name}" if path else name
