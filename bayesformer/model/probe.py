"""One watched pass through a shell: what it touches that it must not, what it leaves unused, what it changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bayesformer.core.compat import version
from bayesformer.core.seeds import stream
from bayesformer.model.admission import address
from bayesformer.model.shell import Shell

# What only looks at a tensor's kind and place, never at its values.
# fmt: off
LOOKS = frozenset({
    "shape", "size", "dim", "ndim", "numel", "nelement", "stride", "storage_offset", "__len__", "__hash__", "__repr__",
    "dtype", "is_floating_point", "is_complex", "element_size", "layout", "is_sparse", "is_nested", "is_quantized",
    "device", "get_device", "is_meta", "is_cpu", "is_cuda", "requires_grad", "is_leaf", "is_contiguous", "data_ptr",
})
# fmt: on
PASSES = 16  # training passes at most, where they leave out layers at random
CHECKPOINT = "CheckpointFunctionBackward"  # re-entrant checkpointing hides the weights that it uses from the graph


@dataclass(frozen=True)
class Probe:
    """What one trial pass of a shell did to weights, buffers and the user's own tensors."""

    unused: tuple[str, ...]  # inferred weights that the output does not depend on
    touched: tuple[str, ...]  # tensors of the user's model that an operation received other than through the shell
    written: tuple[str, ...]  # weights that the pass wrote into
    buffers_changed: tuple[str, ...]  # buffers with other values after the pass


def probe(shell: Shell, inputs: Any, training: bool, strict: bool = True, seed: int = 0) -> Probe:
    """Run one pass and report; θ, buffers, modes and the process's random states are as before afterwards.

    If `strict`, raises where the pass uses tensors of the user's own model (through a global variable, a registry of
    its class), for then it would not answer to θ, and where it writes into weights.
    """
    shell.verify()
    module = shell.module
    modes = [(part, part.training) for part in module.modules()]
    buffers = {name: tensor.clone() for name, tensor in shell.buffers.items()}
    versions = _versions(shell)
    watch = ForeignWatch(*_watched(shell), {id(p): name for name, p in module.named_parameters()})
    try:
        with (
            stream(seed, "probe"),
            _with_gradients(shell),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            module.train(training)
            with watch:
                outputs = shell(inputs)
            unused = _unused(outputs, shell.weights)
        changed = _changed(buffers, shell.buffers)
    finally:
        shell.load_buffers(buffers)
        for part, mode in modes:
            part.training = mode
    shell.unused = unused
    written = tuple(watch.written) or tuple(name for name, n in _versions(shell).items() if n != versions[name])
    report = Probe(unused, tuple(watch.touched), written, changed)
    if strict:
        _refuse(report)
    return report


def probe_training(shell: Shell, inputs: Any) -> Probe:
    """What training passes do. Where one leaves out layers at random (layer drop), further passes see them.

    Further passes are made until all weights that an evaluation pass uses were used, at most `PASSES`.
    """
    found = probe(shell, inputs, training=True)
    if not found.unused:
        return found
    never = set(probe(shell, inputs, training=False).unused)
    for seed in range(1, PASSES):
        if never.issuperset(found.unused):
            break
        more = probe(shell, inputs, training=True, seed=seed)
        found = Probe(
            unused=tuple(name for name in found.unused if name in more.unused),
            touched=tuple(dict.fromkeys(found.touched + more.touched)),
            written=tuple(dict.fromkeys(found.written + more.written)),
            buffers_changed=tuple(dict.fromkeys(found.buffers_changed + more.buffers_changed)),
        )
    shell.unused = tuple(name for name in found.unused if name in never)
    return replace(found, unused=shell.unused)


class ForeignWatch(TorchFunctionMode):
    """Notes every operation of this thread that receives one of the given tensors, or a view of given memory.

    Tensors are given by identity, memory by address; `own` are the weights of the module itself, by identity.
    """

    def __init__(self, tensors: Mapping[int, str], memory: Mapping[int, str], own: Mapping[int, str]) -> None:
        super().__init__()
        self.tensors, self.memory, self.own = tensors, memory, own
        self.touched, self.written = dict[str, None](), dict[str, None]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation after looking at its arguments."""
        if _name(func) not in LOOKS:
            for tensor in _tensors((args, kwargs or {})):
                name = self.tensors.get(id(tensor)) or self.memory.get(address(tensor))
                if name is not None:
                    self.touched[name] = None
        if args and id(args[0]) in self.own and _writes(func):
            self.written[self.own[id(args[0])]] = None
        return func(*args, **(kwargs or {}))


def _name(func: Any) -> str:
    """The name of an operation, or of the attribute that is read."""
    plain = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", plain) if plain == "__get__" else plain


def _writes(func: Any) -> bool:
    """Whether an operation writes into its first argument, by the way torch names such operations."""
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "__set__") or name.startswith("__i") or (name[-1:] == "_" and name[-2:] != "__")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _watched(shell: Shell) -> tuple[dict[int, str], dict[int, str]]:
    """The user's tensors by identity, and their memory by address where the shell has none of it."""
    origin, leaves = shell.skeleton.origin.tensors, shell.skeleton.leaves.values()
    common = {address(leaf.tensor) for leaf in leaves if leaf.role == "alias"} | {0}
    tensors = {id(tensor): name for name, tensor in origin}
    return tensors, {address(t): name for name, t in origin if address(t) not in common}


def _versions(shell: Shell) -> dict[str, int]:
    weights = {name: version(weight) for name, weight in shell.weights.items()}
    return weights | {
        leaf.name: version(leaf.tensor) for leaf in shell.skeleton.leaves.values() if leaf.role == "alias"
    }


def _unused(outputs: Tensor, weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Weights that are no leaves of the graph behind the outputs; none if a part of the graph cannot be seen."""
    found, seen, rest = set[int](), set[Any](), [outputs.grad_fn]
    while rest:
        node = rest.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == CHECKPOINT:
            return ()
        found.add(id(getattr(node, "variable", None)))
        rest.extend(following for following, _ in node.next_functions)
    return tuple(name for name, weight in weights.items() if id(weight) not in found)


def _changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> tuple[str, ...]:
    same = {
        name
        for name, old in before.items()
        if name in after and old.shape == after[name].shape and _equal(old, after[name])
    }
    return tuple(name for name in {**before, **after} if name not in same)


def _equal(old: Tensor, new: Tensor) -> bool:
    return bool(((old == new) | ((old != old) & (new != new))).all())  # noqa: PLR0124 - NaN equals NaN here


def _refuse(report: Probe) -> None:
    if report.touched:
        raise ValueError(
            f"model must reach its tensors through itself; a pass used {', '.join(report.touched[:5])} of the model "
            "that was given (through a global variable or a registry outside it), so that it would not answer to "
            "other weights. In a hook, use the module that it receives."
        )
    if report.written:
        names = ", ".join(report.written[:5])
        raise ValueError(f"model must not write into its weights in forward; a pass changed {names}.")


@contextmanager
def _with_gradients(shell: Shell) -> Iterator[None]:
    """Weights that require a gradient, also in a shell without one."""
    before = {name: weight.requires_grad for name, weight in shell.weights.items()}
    for weight in shell.weights.values():
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for name, weight in shell.weights.items():
            weight.requires_grad_(before[name])
