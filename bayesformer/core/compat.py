"""Every private name of torch and transformers in use, each with its reason: what to check at a release."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "COMPILED_CALL",
    "DIRICHLET",
    "GAMMA",
    "ElementaryMode",
    "buffer_slots",
    "compiled_from",
    "defaults",
    "empty_wrapper",
    "gradient_hooks",
    "has_forward_hooks",
    "is_distributed",
    "standard_gamma",
    "transformed",
    "tree_leaves",
    "tree_map",
    "version",
]


def gradient_hooks(parameter: Tensor) -> list[Callable[..., Any]]:
    """The functions given to `parameter.register_hook`; torch has no public list of them (`_backward_hooks`)."""
    return list((getattr(parameter, "_backward_hooks", None) or {}).values())


def version(tensor: Tensor) -> int:
    """How often torch has written into this memory; public documentation only mentions it (`_version`)."""
    return int(tensor._version)


def compiled_from(module: nn.Module) -> nn.Module | None:
    """The module inside what `torch.compile(module)` returns, or None; its class lives in `torch._dynamo`."""
    if type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules:
        return module._modules["_orig_mod"]
    return None


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; asked without importing `torch.distributed.tensor`, which takes a while."""
    room = sys.modules.get("torch.distributed.tensor")
    return room is not None and isinstance(tensor, room.DTensor)


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    """The live table of a module's buffers; only this shows a buffer that a pass has replaced (`_buffers`)."""
    return module._buffers


# What `module.compile()` leaves on a module: a compiled call bound to that very module. A copy must not run it.
COMPILED_CALL = "_compiled_call_impl"


class ElementaryMode(TorchDispatchMode):
    """A TorchDispatchMode, documented by torch ("Extending torch") under a private path only, without the compiler.

    By default torch lets its first call import `torch._dynamo`, which takes seconds; and that import keeps the frames
    of its callers, with all their tensors, until the next collection of garbage. Models are never compiled under it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# tree_leaves, tree_map: tensors inside whatever a model takes or returns; torch.utils has no public way to walk it.


def defaults(operation: Any) -> dict[str, Any]:
    """The arguments of an elementary operation (torch.ops.aten...) in their order, with their default values.

    A TorchDispatchMode is given arguments by place and without defaults; the schema alone knows their names.
    """
    return {argument.name: argument.default_value for argument in operation._schema.arguments}


def transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp) is being applied to the code that is running.

    There is no public question for it, and in-place random functions must not be called there.
    """
    return torch._C._are_functorch_transforms_active()


def standard_gamma(shape: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draws from Gamma(shape, 1), differentiable in the shape by implicit reparameterisation.

    torch.distributions.Gamma calls the same function but cannot be given a generator.
    """
    return torch._standard_gamma(shape, generator=generator)


GAMMA = torch._standard_gamma
"""What torch.distributions.Gamma and StudentT call: it takes a generator, which they do not hand on."""

DIRICHLET = torch._sample_dirichlet
"""What torch.distributions.Dirichlet and Beta call: it takes a generator, which they do not hand on."""


def in_backward() -> bool:
    """Whether a backward pass is running in this thread, in which checkpoints compute parts of the forward pass again.

    torch has no public question for it (`_current_graph_task_id`, -1 outside of backward passes).
    """
    return torch._C._current_graph_task_id() != -1


def checkpointing() -> str | None:
    """Whether a segment of torch.utils.checkpoint is running in this thread: "reentrant", "plain" or None.

    torch has no public question for it: functions of its file are looked for on the stack.
    """
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        if frame.f_code is checkpoint.CheckpointFunction.forward.__code__:
            return "reentrant"
        if frame.f_code.co_filename == checkpoint.__file__:
            found = "plain"
        frame = frame.f_back
    return found


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether anything runs when a module is called beside its own forward; torch has no public list of hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def remove_forward_hooks(module: nn.Module, functions: tuple[Callable[..., Any], ...]) -> None:
    """Take these functions out of a module's forward hooks and forward pre-hooks.

    The public way is the handle that registering returns, which does not survive a copy or a pickle of the model. What
    torch keeps of a hook: its function, under a key that is unique among all hooks, and flags under the same key.
    """
    flags = (
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    )
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in functions]:
            del hooks[key]
            for flag in flags:
                flag.pop(key, None)


class NoFastPath(nn.Module):
    """Mixed into an `nn.MultiheadAttention`: keeps nn.TransformerEncoderLayer from its fused path, which skips modules.

    The layer takes that path only where its attention has `_qkv_same_embed_dim`; there is no public switch per module,
    and the one in torch.backends is for the whole process.
    """

    @property
    def _qkv_same_embed_dim(self) -> bool:
        return False


def attention_name(config: Any) -> str | None:
    """The name of the attention function in a config of transformers.

    The public `_attn_implementation` hands a new name on to the configs of other parts of the model when it is set.
    """
    name: str | None = config._attn_implementation_internal
    return name


def set_attention_name(config: Any, name: str | None) -> None:
    """Set that name in this config alone."""
    config._attn_implementation_internal = name


def has_attention_name(config: Any) -> bool:
    """Whether an object is a config of transformers, which names an attention function."""
    return hasattr(config, "_attn_implementation_internal")


W = TypeVar("W", bound=Tensor)


def empty_wrapper(kind: type[W], like: Tensor) -> W:
    """An object of a tensor subclass with the shape, dtype and device of `like` and no memory of its own.

    Subclasses that only carry other tensors are made so throughout torch, by `Tensor._make_wrapper_subclass` alone.
    """
    return torch.Tensor._make_wrapper_subclass(kind, like.shape, dtype=like.dtype, device=like.device)


def parameter_slots(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The live table of a module's own parameters (`_parameters`); only in it can a plain tensor stand for a parameter.

    `torch.func.functional_call` does the same, but leaves out what recurrent layers remember; see `relist_weights`.
    """
    return module._parameters


def relist_weights(module: nn.Module) -> None:
    """Let an LSTM, GRU or RNN use the weights that its table of parameters holds now.

    Its forward reads a list of them (`_flat_weights`), which is renewed by setting attributes and not by the table.
    """
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [module._parameters[name] for name in module._flat_weights_names]


def convolution(module: nn.Module) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """`(x, weight, bias) -> outputs` of a convolution layer with its stride, padding and groups (`_conv_forward`)."""
    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor] = module._conv_forward  # type: ignore[assignment]
    return forward


def is_batched_gradient(grad: Tensor) -> bool:
    """Whether a gradient in a backward pass stands for several, as with `torch.autograd.grad(is_grads_batched=True)`.

    torch maps these by an older vmap, which `transformed` does not see and in-place operations do not know.
    """
    return torch._C._functorch.is_legacy_batchedtensor(grad)


def reset_function(module: nn.Module) -> Callable[[], None] | None:
    """What draws a module's own parameters anew, or None if it has no such method.

    Most modules of torch call it `reset_parameters`; `nn.MultiheadAttention` and `nn.Transformer` `_reset_parameters`.
    """
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def initialises_parts(module: nn.Module) -> bool:
    """Whether a module is a model of transformers, which knows how each of its parts is initialised."""
    return hasattr(module, "_init_weights") and hasattr(module, "config")


def initialise_part(owner: nn.Module, part: nn.Module) -> None:
    """Draw the own parameters of a part anew as its model of transformers does; what that does not know stays.

    `_init_weights` is the only way to one part: the public `init_weights` is for the whole model. It passes over
    parameters that carry the mark `_is_hf_initialized`, which loaded weights have.
    """
    for parameter in part.parameters(recurse=False):
        vars(parameter).pop("_is_hf_initialized", None)
    owner._init_weights(part)  # type: ignore[operator]
