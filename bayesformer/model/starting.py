"""Where members of an ensemble or several chains start: at given weights, at new ones, or partly new."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from bayesformer.model.shell import Shell


def draw_anew(shell: Shell, names: frozenset[str]) -> None:
    """Give the inferred weights of these names fresh random values, as the module that owns them initialises itself.

    Values come from torch's global stream. LoRA adapters start as PEFT starts them, with B = 0. Weights of the same
    modules that are not named keep their values.
    """
    for path, module in shell.module.named_modules():
        own = {f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)}
        if own & names and not _is_inside_adapter(path, shell.module):
            with _keeping(module, {name.rpartition(".")[2] for name in own - names}), torch.no_grad():
                _reset(path, module, shell.module)
    for path, module in shell.module.named_modules():
        if hasattr(module, "reset_lora_parameters"):
            _reset_adapters(path, module, names)
    shell.sync()


def redraw_untrained_adapters(shell: Shell) -> tuple[str, ...]:
    """New random A for every LoRA adapter whose B is still 0, as PEFT initialises it; names of the weights drawn.

    Such an adapter leaves the base model as it is, and members that share one A would start, and mostly stay, in one
    subspace.
    """
    drawn: list[str] = []
    for path, module in shell.module.named_modules():
        if not hasattr(module, "reset_lora_parameters"):
            continue
        for adapter in list(module.lora_A):
            name = f"{path}.lora_A.{adapter}.weight"
            if name in shell.space.names and not bool(module.lora_B[adapter].weight.any()):
                with torch.no_grad():
                    module.reset_lora_parameters(adapter, init_lora_weights=True)
                drawn.append(name)
    shell.sync()
    return tuple(drawn)


def _reset(path: str, module: nn.Module, root: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        reset()
        return
    owner = _pretrained_owner(path, root)
    if owner is not None:
        for parameter in module.parameters(recurse=False):
            vars(parameter).pop("_is_hf_initialized", None)  # transformers passes over weights that were loaded
        owner._init_weights(module)  # type: ignore[operator]
        return
    raise ValueError(
        f"model cannot be re-initialised: {path or 'the model'} ({type(module).__name__}) has parameters but no "
        "reset_parameters(). Pass a function that builds a fresh model instead of the model, or keep the given weights "
        "with init='given'."
    )


def _reset_adapters(path: str, module: nn.Module, names: frozenset[str]) -> None:
    for adapter in list(module.lora_A):  # type: ignore[arg-type]
        if f"{path}.lora_A.{adapter}.weight" in names:
            with torch.no_grad():
                module.reset_lora_parameters(adapter, init_lora_weights=True)  # type: ignore[operator]


def _is_inside_adapter(path: str, root: nn.Module) -> bool:
    """Whether a module is an A or B of LoRA, which its layer initialises."""
    parts = path.split(".")
    above = [root.get_submodule(".".join(parts[:i])) for i in range(len(parts))]
    return any(hasattr(module, "reset_lora_parameters") for module in above)


def _pretrained_owner(path: str, root: nn.Module) -> nn.Module | None:
    """The innermost model of transformers around a module, which knows how its parts are initialised."""
    parts = path.split(".") if path else []
    for i in range(len(parts), -1, -1):
        module = root.get_submodule(".".join(parts[:i]))
        if hasattr(module, "_init_weights") and hasattr(module, "config"):
            return module
    return None


@contextmanager
def _keeping(module: nn.Module, names: set[str]) -> Iterator[None]:
    """Within it, some parameters of a module are stand-ins: a frozen one is the user's memory and is never written."""
    kept = {name: getattr(module, name) for name in names}
    for name, parameter in kept.items():
        setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
    try:
        yield
    finally:
        for name, parameter in kept.items():
            setattr(module, name, parameter)
