"""Where members of an ensemble or several chains start: at given weights, at new ones, or partly new."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bayesformer.core.compat import initialise_part, initialises_parts, reset_function
from bayesformer.model.shell import Shell

PARAMETRISATIONS = "parametrizations"  # the submodule in which torch keeps them


def draw_anew(shell: Shell, names: frozenset[str]) -> None:
    """Give the inferred weights of these names fresh random values, as the module that owns them initialises itself.

    Values come from torch's global stream. A model of transformers initialises its parts by its own rules. Weights
    under a parametrisation (weight_norm, orthogonal) get the originals of a fresh weight. LoRA adapters start as
    PEFT starts them, with B = 0. All other weights keep their values: they are never written, not even for a moment.
    """
    chosen = {id(shell.weights[name]) for name in names}
    for path, module in shell.module.named_modules():
        if isinstance(module, parametrize.ParametrizationList) or _is_inside_adapter(path, shell.module):
            continue
        if any(id(p) in chosen for p in _own_parameters(module)):
            with _keeping(module, chosen), torch.no_grad():
                _draw(path, module, shell.module, chosen)
    for _, module in shell.module.named_modules():
        if hasattr(module, "reset_lora_parameters"):
            _reset_adapters(module, chosen)
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
                with _keeping(module, {id(shell.weights[name])}), torch.no_grad():
                    module.reset_lora_parameters(adapter, init_lora_weights=True)
                drawn.append(name)
    shell.sync()
    return tuple(drawn)


def adapter_weights(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of the names that are weights of LoRA adapters, in the order given."""
    layers = [path for path, module in model.named_modules() if hasattr(module, "reset_lora_parameters")]
    within = tuple(f"{path}.lora_" for path in layers)
    return [name for name in names if name.startswith(within)]


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a module initialises: its own, and the originals of those under a parametrisation."""
    own = list(module.parameters(recurse=False))
    if parametrize.is_parametrized(module):
        own += list(module.get_submodule(PARAMETRISATIONS).parameters())
    return own


def _draw(path: str, module: nn.Module, root: nn.Module, chosen: set[int]) -> None:
    if not parametrize.is_parametrized(module):
        _reset(path, module, root)
        return
    twin = _without_parametrisations(module)
    _reset(path, twin, root)
    for name, fresh in twin.named_parameters(recurse=False):
        if parametrize.is_parametrized(module, name):
            _invert(module.get_submodule(f"{PARAMETRISATIONS}.{name}"), fresh, chosen)
        elif id(module.get_parameter(name)) in chosen:
            module.get_parameter(name).copy_(fresh)


def _without_parametrisations(module: nn.Module) -> nn.Module:
    """A module of the class before parametrisation with the same settings, and with weights of its own."""
    kind = parametrize.type_before_parametrizations(module)
    twin: nn.Module = object.__new__(kind)
    nn.Module.__init__(twin)
    for name, value in vars(module).items():
        vars(twin).setdefault(name, value)
    for name, child in module.named_children():
        if name != PARAMETRISATIONS:
            twin.add_module(name, child)
    for name, buffer in module.named_buffers(recurse=False):
        twin.register_buffer(name, buffer.clone())
    parametrised: Any = module.get_submodule(PARAMETRISATIONS)
    own = {**dict(module.named_parameters(recurse=False)), **{name: getattr(module, name) for name in parametrised}}
    for name, value in own.items():
        twin.register_parameter(name, nn.Parameter(value.detach().clone(), requires_grad=False))
    return twin


def _invert(parametrised: Any, value: Any, chosen: set[int]) -> None:
    """Write the originals from which the parametrisations make a value, as torch does when it is assigned."""
    for step in reversed(list(parametrised)):
        value = step.right_inverse(value)
    if isinstance(value, Tensor):
        originals = {"original": value}
    else:
        originals = {f"original{i}": part for i, part in enumerate(value)}
    for name, fresh in originals.items():
        original = getattr(parametrised, name)
        if id(original) in chosen:
            original.copy_(fresh)


def _reset(path: str, module: nn.Module, root: nn.Module) -> None:
    reset = reset_function(module)
    owner = _pretrained_owner(path, root)
    if reset is None and owner is None:
        raise ValueError(
            f"model cannot be re-initialised: {path or 'the model'} ({type(module).__name__}) has parameters but no "
            "reset_parameters(). Pass a function that builds a fresh model instead of the model, or keep the given "
            "weights with init='given'."
        )
    if reset is not None:
        reset()
    if owner is not None:  # what it does not know stays as torch draws it
        initialise_part(owner, module)


def _reset_adapters(module: Any, chosen: set[int]) -> None:
    for adapter in list(module.lora_A):
        if id(module.lora_A[adapter].weight) in chosen:
            with _keeping(module, chosen), torch.no_grad():
                module.reset_lora_parameters(adapter, init_lora_weights=True)


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
        if initialises_parts(module):
            return module
    return None


@contextmanager
def _keeping(module: nn.Module, chosen: set[int]) -> Iterator[None]:
    """Within it, parameters of a module and its parts that are not chosen are stand-ins.

    A frozen one is the user's memory, and some modules initialise their children, too.
    """
    kept = [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) not in chosen
    ]
    for part, name, parameter in kept:
        part.register_parameter(name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
    try:
        yield
    finally:
        for part, name, parameter in kept:
            part.register_parameter(name, parameter)
