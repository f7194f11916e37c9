"""Which modules can be made Bayesian: wrappers are taken off, and what cannot work is refused with its name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bayesformer.core.compat import compiled_from, has_forward_hooks, is_distributed

MASK = "attention_mask"
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel and what torch.compile returns."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif (inside := compiled_from(model)) is not None:
            model = inside
        else:
            return model


def refuse_module(module: nn.Module, name: str) -> None:
    """Raise for a module whose weights cannot be exchanged."""
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"model must be plain Python; {name} is a {kind} of torch.jit. Give the module it was made of."
        )
    if kind == "FullyShardedDataParallel":
        raise ValueError(f"model must hold whole weights; {name} is sharded by FSDP. Give the module before sharding.")


def refuse_tensor(tensor: Tensor, name: str) -> None:
    """Raise for a tensor without values in the memory of one device."""
    if is_lazy(tensor):
        raise ValueError(f"model must be initialised; {name} has no shape yet. Call the model once on a batch first.")
    if is_distributed(tensor):
        raise ValueError(f"model must hold whole weights; {name} is a DTensor. Give the module before sharding.")
    if tensor.device.type == "meta":
        raise ValueError(
            f"model must hold its weights in memory; {name} is on the meta device (offloaded or not loaded). "
            "Load the model without offloading."
        )


def refuse_inferred(parameter: Tensor, name: str) -> None:
    """Raise for a weight that cannot be part of a vector of real numbers."""
    if parameter.is_complex():
        raise ValueError(f"inferred weights must be real; {name} is {parameter.dtype}. Leave it out by infer=.")
    if parameter.dtype not in FLOATS:
        kinds = ", ".join(str(kind).removeprefix("torch.") for kind in FLOATS)
        raise ValueError(
            f"inferred weights must be one of {kinds}; {name} is {parameter.dtype}. Leave it out by infer=."
        )
    if type(parameter).__torch_function__ is not nn.Parameter.__torch_function__:
        raise ValueError(
            f"inferred weights must be ordinary tensors; {name} is a {type(parameter).__name__} with an arithmetic "
            "of its own. Leave it out by infer=."
        )


View = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


def view_key(tensor: Tensor) -> View | int:
    """Equal for two tensors that are the same view of the same memory; an empty tensor equals only itself."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return id(tensor)
    return address(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype


def address(tensor: Tensor) -> int:
    """Where a tensor's storage begins; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def span(tensor: Tensor) -> tuple[int, int]:
    """First byte and the one after the last that a strided tensor may touch."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def refuse_overlaps(inferred: Mapping[str, Tensor], parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if an inferred weight shares memory with another Parameter, unless both are the same view of it."""
    spans = sorted(_spans(parameters, {view_key(p) for p in inferred.values()}))
    end, before, weight = 0, "", False
    for start, stop, name, is_inferred in spans:
        if start < end and (is_inferred or weight):
            raise ValueError(
                f"inferred weights must not share memory with another Parameter; {before} and {name} overlap. "
                "Tie them by using one Parameter in both places."
            )
        if stop > end:
            end, before, weight = stop, name, is_inferred


def _spans(parameters: Iterable[tuple[str, Tensor]], inferred: set[View | int]) -> Iterator[tuple[int, int, str, bool]]:
    seen = set[View | int]()
    for name, parameter in parameters:
        key = view_key(parameter)
        if key not in seen and parameter.layout is torch.strided and parameter.numel():
            seen.add(key)
            yield *span(parameter), name, key in inferred


def check_count(model: nn.Module, inputs: object) -> None:
    """Refuse a tuple of more positional inputs than a model's forward takes, the last of which may be targets."""
    model = unwrap(model)
    if not isinstance(inputs, tuple) or has_forward_hooks(model):
        return
    taken = list(inspect.signature(model.forward).parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in taken):
        return
    names = [parameter.name for parameter in taken if parameter.kind in POSITIONAL]
    if len(inputs) > len(names):
        raise ValueError(
            f"inputs must be what the model's forward takes, {', '.join(names)}; got a tuple of {len(inputs)}, each of "
            "which is one of its arguments. Leave targets out, or give them as bf.Data(inputs, targets)."
        )


def check_names(model: nn.Module, inputs: object, name: str) -> None:
    """Refuse keyword arguments that a model's forward does not take; a hook before it may take others."""
    model = unwrap(model)
    if not isinstance(inputs, Mapping) or has_forward_hooks(model):
        return
    taken = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    unknown = [key for key in inputs if key not in taken]
    if unknown:
        made = " It says what is padding, and is made here for sequences of unequal lengths." if MASK in unknown else ""
        raise ValueError(
            f"{name}: inputs must be arguments of the model's forward, {', '.join(taken)}; "
            f"got {', '.join(unknown)}.{made}"
        )
