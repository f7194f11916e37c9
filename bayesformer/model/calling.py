"""How a model is called, and which of its outputs the likelihood is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle


def apply(model: nn.Module, inputs: Any) -> Tensor:
    """The output tensor of a model on one tensor, a tuple of positional or a mapping of keyword arguments."""
    args, kwargs = split_inputs(inputs)
    with told_inputs(model, args, kwargs):
        output = model(*args, **kwargs)
    return select_output(output)


def call(model: nn.Module, params: Mapping[str, Tensor], inputs: Any) -> Tensor:
    """The output tensor with other weights or buffers, by name; afterwards the model has its own again.

    The module is changed while it runs, so that only its own thread may use it: call it on a shell's module, never
    on one that several threads share.
    """
    args, kwargs = split_inputs(inputs)
    with told_inputs(model, args, kwargs):
        output = functional_call(model, dict(params), args, kwargs)
    return select_output(output)


@contextmanager
def told_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """An error of the model's own forward says below its message which inputs it was given, as shapes and types."""
    try:
        yield
    except Exception as error:
        if not getattr(error, "__notes__", None):
            shown = [_shown(value) for value in args] + [f"{name}={_shown(value)}" for name, value in kwargs.items()]
            note = f"The model's forward was called with inputs of the data: ({', '.join(shown)}); "
            error.add_note(note + "the first dimension counts examples." + _type_note(model, error))
        raise


def _type_note(model: nn.Module, error: Exception) -> str:
    """What to do where torch refuses to mix types of numbers: NumPy's are float64, weights seldom are."""
    types = {str(weight.dtype).removeprefix("torch.") for weight in model.parameters()}
    if "dtype" not in str(error) or len(types) != 1:
        return ""
    name = types.pop()
    return f" The model's weights are {name}: convert inputs that are numbers, as x.to(torch.{name}) does."


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__


def split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments; values that are not tensors (use_cache=False, lists) are passed as they are.

    Tensors are copies: a forward that works in place on its input, as a first nn.ReLU(inplace=True) does, would
    otherwise change the user's data, and what the next pass sees.
    """
    if isinstance(inputs, Mapping):
        return (), {name: _own(value) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_own(value) for value in inputs), {}
    return (_own(inputs),), {}


def first_given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The tensor that a layer of one input was called with, by position or by name."""
    return (*args, *kwargs.values())[0]


def note_calls(layer: nn.Module, seen: list[tuple[Tensor, Tensor]]) -> RemovableHandle:
    """Append input and output of every call of a layer of one input to a list, until the handle is removed."""
    return layer.register_forward_hook(
        lambda _, args, kwargs, output: seen.append((first_given(args, kwargs), output)), with_kwargs=True
    )


def _own(value: Any) -> Any:
    # a tensor that is differentiated must be the very one; autograd refuses to write into it
    return value.clone() if isinstance(value, Tensor) and not value.requires_grad else value


def select_output(output: Any) -> Tensor:
    """The tensor that the likelihood is given: the output itself, its `logits`, or a tuple's first entry.

    Of a question answering model (B, 2, T): logits of where the answer starts and ends, each over the T positions.
    """
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    ends = [output.get(name) if isinstance(output, Mapping) else None for name in ("start_logits", "end_logits")]
    if all(isinstance(end, Tensor) for end in ends):
        return torch.stack(ends, 1)  # type: ignore[arg-type]  # (B, 2, T)
    if not isinstance(output, Mapping) and isinstance(output, tuple | list) and output:
        return _first(output)
    raise ValueError(
        "model must return a tensor, an output with logits, or a tuple whose first entry is a tensor; "
        f"got {_described(output)}. Wrap it in a module that returns the tensor."
    )


def _first(output: tuple[Any, ...] | list[Any]) -> Tensor:
    first = output[0]
    if not isinstance(first, Tensor):
        raise ValueError(
            "model must return a tuple whose first entry is a tensor; its first entry is "
            f"{_described(first)}. Wrap it in a module that returns the tensor."
        )
    if first.dim() == 0 and len(output) > 1:
        raise ValueError(
            "model must return outputs for every example; it returned a tuple whose first entry is a single number, "
            "as in (loss, logits). Call it without labels, or wrap it in a module that returns the logits."
        )
    return first


def _described(output: Any) -> str:
    keys = f" with keys {list(output)}" if isinstance(output, Mapping) else ""
    return f"{type(output).__name__}{keys}"
