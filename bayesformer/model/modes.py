"""Which modules train and which stay in evaluation mode, in training and in noisy prediction."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from bayesformer.model.space import Space


def held_modules(model: nn.Module, space: Space, changed: Iterable[str] = (), fixed: bool = False) -> tuple[str, ...]:
    """Names of the modules that stay in evaluation mode while the others, their own parts among them, train.

    A model in training mode with parts in evaluation mode is taken at its word: those parts stay. A model that comes
    in evaluation mode, as models do after loading, trains as a whole, but for modules without inferred weights whose
    buffers a training pass would change (frozen BatchNorm). With `fixed`, all modules stay whose buffers would change.
    PEFT's wrapper is always in training mode: there the model inside it says which of the two it is.

    Args:
        model: as the user gave it, or as a method prepared it.
        space: the inferred weights, by name.
        changed: names of the buffers that a training pass changes.
        fixed: whether buffers are to be held as they are.
    """
    owners = {name.rpartition(".")[0] for name in changed}
    inferred = {name.rpartition(".")[0] for name in space.names}
    if fixed:
        held = owners
    elif _inside(model).training:
        held = {name for name, module in model.named_modules() if not module.training}
    else:
        held = owners - inferred
    return tuple(sorted(held))


def _inside(model: nn.Module) -> nn.Module:
    """The model inside PEFT's wrapper, or itself."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def noisy_modules(held: Iterable[str], changed: Iterable[str]) -> tuple[str, ...]:
    """Those that stay in evaluation mode in noisy prediction: running averages must be used there, not moved."""
    return tuple(sorted({*held, *(name.rpartition(".")[0] for name in changed)}))


def set_training(module: nn.Module, held: Iterable[str] = ()) -> None:
    """Training mode everywhere but in the modules held: in these very modules, whatever their parts do."""
    module.train()
    for name in held:
        module.get_submodule(name).training = False


def check_eval(model: nn.Module, reason: str) -> None:
    """Refuse a model of which a part is in training mode; `reason` says what that would do."""
    training = next((path for path, module in model.named_modules() if module.training), None)
    if training is not None:
        raise ValueError(
            f"model must be in eval mode: {reason}; got a model whose {training or 'root'} module is training. "
            "Call model.eval()."
        )
