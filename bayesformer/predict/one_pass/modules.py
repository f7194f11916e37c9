"""Modules that write one function as several operations, treated as one: their steps are correlated.

`MODULE_RULES` maps a class, or its name with its module, to a function `(module, input) -> output` that stands in for
`forward` during a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from torch import nn

from bayesformer.predict.one_pass.carrier import Uncertain
from bayesformer.predict.one_pass.elementwise import by_autograd
from bayesformer.predict.one_pass.norm import rms_norm

F = TypeVar("F", bound=Callable[..., Any])

MODULE_RULES: dict[type[nn.Module] | str, Callable[..., Any]] = {}
"""By class, or by "package.module.Class" where the package is not a requirement here."""

ACTIVATIONS = "transformers.activations"
RMS_NORMS = (
    "LlamaRMSNorm",
    "MistralRMSNorm",
    "MixtralRMSNorm",
    "Qwen2RMSNorm",
    "Qwen3RMSNorm",
    "Phi3RMSNorm",
    "T5LayerNorm",
)
SHIFTED_RMS_NORMS = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm")  # whose gain is 1 + weight


def module_rule(*kinds: type[nn.Module] | str) -> Callable[[F], F]:
    """Register what stands in for the forward of these modules: `(module, input) -> output`."""

    def register(found: F) -> F:
        MODULE_RULES.update(dict.fromkeys(kinds, found))
        return found

    return register


def find_rule(module: nn.Module) -> Callable[..., Any] | None:
    """What stands in for this module, if anything."""
    kind = type(module)
    found = MODULE_RULES.get(kind) or MODULE_RULES.get(f"{kind.__module__}.{kind.__name__}")
    if found is not None:
        return found
    if kind.__module__ == ACTIVATIONS and not list(module.parameters()):
        return activation
    if kind.__module__.startswith("transformers.") and kind.__name__ in RMS_NORMS:
        return hugging_face_rms_norm
    if kind.__module__.startswith("transformers.") and kind.__name__ in SHIFTED_RMS_NORMS:
        return gemma_rms_norm
    return None


def activation(module: nn.Module, x: Any) -> Any:
    """An activation without parameters, whatever it is made of: value and slope of the whole."""
    forward = type(module).forward
    return by_autograd(lambda m: forward(module, m), x) if isinstance(x, Uncertain) else forward(module, x)


def hugging_face_rms_norm(module: Any, x: Any) -> Any:
    """Llama's and its relatives' RMSNorm, whose gain and floor go by these names."""
    if not isinstance(x, Uncertain) and not isinstance(module.weight, Uncertain):
        return type(module).forward(module, x)
    return rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def gemma_rms_norm(module: Any, x: Any) -> Any:
    """Gemma's RMSNorm, whose gain is 1 + weight."""
    if not isinstance(x, Uncertain) and not isinstance(module.weight, Uncertain):
        return type(module).forward(module, x)
    return rms_norm(x, (x.shape[-1],), module.weight + 1, module.eps)


@contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """During the block, modules with a rule use it; afterwards every module is as it was, whatever happened."""
    changed: list[tuple[nn.Module, Any]] = []
    try:
        for module in model.modules():
            found = find_rule(module)
            if found is not None:
                changed.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = partial(found, module)
        yield
    finally:
        for module, before in changed:
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before
