"""A model walked once: its structure as bytes and one record per tensor, from which shells are built cheaply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesformer.core.compat import gradient_hooks, version
from bayesformer.model.admission import refuse_overlaps, refuse_tensor, unwrap, view_key
from bayesformer.model.leaves import UNNAMED, Leaf, alias, leaves_of, own, rewritten_weights, window
from bayesformer.model.precision import float_leaves
from bayesformer.model.space import Choice, Space
from bayesformer.model.walk import ORIGIN, Build, Walk

if TYPE_CHECKING:
    from bayesformer.model.shell import Shell


@dataclass(frozen=True)
class Facts:
    """What became of a model's tensors; printed, it answers most questions about a shell."""

    inferred: int  # numbers in θ
    staged: int  # of these, numbers that compute in a lower precision or on another device than θ
    aliased: int  # numbers of the other Parameters, shared with the user's model
    copied: int  # bytes of buffers and plain tensors, copied for every shell
    shared: tuple[str, ...] = ()  # kinds of objects that could not be copied (locks, files) and are the user's own
    unused: tuple[str, ...] = ()  # inferred weights that the outputs do not depend on, as a probe found

    def __str__(self) -> str:
        parts = [
            f"{self.inferred:,} inferred",
            f"{self.aliased:,} shared with the model",
            f"{self.copied:,} bytes copied",
        ]
        parts += [f"{self.staged:,} staged"] if self.staged else []
        parts += [f"not copied: {', '.join(self.shared)}"] if self.shared else []
        parts += [f"unused: {', '.join(self.unused)}"] if self.unused else []
        return "; ".join(parts)


class Origin:
    """The tensors of the model that a skeleton or a shadow was made from, by name, so that a probe can know them."""

    def __init__(self, tensors: list[tuple[str, Tensor]] | None = None) -> None:
        self.tensors = tensors or []

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return self

    def __reduce__(self) -> Any:
        return Origin, ()  # in another process there is no user's model that could be touched


class Skeleton:
    """A model and the Space of its inferred weights, ready to make shells. The model itself is never changed.

    Structure, buffers and plain tensors are remembered as they are now; Parameters outside the Space stay the user's
    memory, and `changed` tells whether somebody has written into it since.
    """

    def __init__(self, model: nn.Module, space: Space) -> None:
        model = unwrap(model)
        self.space = space
        parameters = list(model.named_parameters(remove_duplicate=False))
        buffers = list(model.named_buffers(remove_duplicate=False))
        for name, tensor in (*parameters, *buffers):
            refuse_tensor(tensor, name)
        weights = _weights(space, dict(parameters))
        rewritten = rewritten_weights(model, weights)
        refuse_overlaps(weights, parameters)
        walk = Walk({id(module): name or "the model" for name, module in model.named_modules()})
        hooks = {name: found for name, p in weights.items() if (found := gradient_hooks(p))}
        with torch.inference_mode(False), torch.no_grad():
            self.data = walk.run((model, hooks))
            names = {id(t): name for name, t in reversed((*parameters, *buffers))}
            self.leaves = leaves_of(walk.table, weights, names, {id(t) for _, t in buffers}, rewritten)
        self.table = [None if place in self.leaves else value for place, value in enumerate(walk.table)]
        inferred = {leaf.name: leaf for leaf in self.leaves.values() if leaf.role == "inferred"}
        self.weights = {name: inferred[name] for name in space.names}
        self.device = self.weights[space.names[0]].tensor.device
        self.wide = float_leaves(model, weights, self.device)
        self.widened = {name for names in self.wide.values() for name in names}
        self.origin = Origin([*_earlier(model), *_found(walk.table, names)])
        self.facts = self._facts(walk.shared)
        self.versions = self._versions()
        self.samples = self._samples()

    def shell(self, gradients: bool = True, theta: Tensor | None = None) -> Shell:
        """The module with weights of its own: those of the model, or the vector `theta` (P,), used without a copy."""
        from bayesformer.model.shell import Shell

        return Shell(self, gradients, theta)

    def shadow(self) -> nn.Module:
        """The module on the user's memory, for structural changes: see `shadow`."""

        def resolve(leaf: Leaf) -> Tensor:
            if leaf.role in ("inferred", "alias"):
                return alias(leaf, leaf.role == "inferred")
            return window(leaf, leaf.tensor) if leaf.role == "window" else own(leaf)

        module, hooks, _ = self.build(resolve)
        copy_gradient_hooks(dict(module.named_parameters()), hooks)
        module.__dict__[ORIGIN] = self.origin
        return module

    def plain(self, theta: Tensor, buffers: Mapping[str, Tensor] | None = None) -> nn.Module:
        """An ordinary module with the weights θ (P,), to be kept, saved or trained on.

        Inferred weights and all others that require a gradient are its own, with flags, dtypes and devices as in the
        user's model; frozen ones are the user's memory.
        """
        values = self.space.views(theta)
        made = {name: self._separate(leaf, values[name]) for name, leaf in self.weights.items()}

        def resolve(leaf: Leaf) -> Tensor:
            if leaf.role == "inferred":
                return made[leaf.name]
            if leaf.role == "alias":
                return self._separate(leaf, leaf.tensor) if leaf.requires_grad else alias(leaf)
            return window(leaf, made[leaf.name]) if leaf.role == "window" else own(leaf)

        module, hooks, _ = self.build(resolve)
        copy_gradient_hooks({name: p for name, p in made.items() if p.requires_grad}, hooks)
        slots = dict(module.named_buffers())
        with torch.no_grad():
            for name, value in (buffers or {}).items():
                slots[name].copy_(value)
        return module

    def changed(self) -> str | None:
        """The first weight outside the Space that was written into since the walk; None if there is none.

        Sees optimisers, load_state_dict and in-place operations by torch's own count of writes, and writes through
        `.data`, as PEFT merges adapters, by a few numbers of every weight.
        """
        now = self._versions()
        for place, writes in now.items():
            leaf = self.leaves[place]
            if writes != self.versions[place] or not torch.equal(_sampled(leaf.tensor), self.samples[place]):
                return leaf.name
        return None

    def build(self, resolve: Callable[[Leaf], Tensor]) -> tuple[nn.Module, dict[str, list[Any]], list[Any]]:
        """The module with tensors that `resolve` gives, gradient hooks by weight, and what weak references point to."""
        table, alive = list(self.table), list[Any]()
        table[0] = alive
        with torch.inference_mode(False), torch.no_grad():
            for place, leaf in self.leaves.items():
                table[place] = resolve(leaf)
            try:
                module, hooks = Build(self.data, table).load()
            except Exception as error:  # whatever the own code of an attribute's class raises
                raise ValueError(
                    f"model must hold only what can be copied; copying it failed: {error}. "
                    "Remove the attribute from the model, or give its class a working __reduce__."
                ) from error
        return module, hooks, alive

    def portable(self) -> tuple[bytes, dict[str, Tensor]]:
        """The structure as bytes for another process of the same program, and the tensors by key.

        Classes and functions of a script travel by value (cloudpickle). The tensors may travel as a file that the
        process maps; `Skeleton.from_portable` puts both together.
        """
        from bayesformer.model.portable import dump

        return dump(self)

    @classmethod
    def from_portable(cls, structure: bytes, tensors: Mapping[str, Tensor]) -> Skeleton:
        """The skeleton whose `portable` form this is."""
        from bayesformer.model.portable import load

        skeleton = cls.__new__(cls)
        skeleton.__dict__.update(load(structure, tensors))
        skeleton.versions = skeleton._versions()
        skeleton.samples = skeleton._samples()
        return skeleton

    def __reduce__(self) -> Any:
        return Skeleton.from_portable, self.portable()

    def __deepcopy__(self, memo: dict[int, Any]) -> Skeleton:
        return self  # nothing in it changes

    def __repr__(self) -> str:
        return f"Skeleton({self.facts})"

    @staticmethod
    def _separate(leaf: Leaf, value: Tensor) -> Tensor:
        """A Parameter like the user's on memory of its own."""
        with torch.inference_mode(False), torch.no_grad():
            weight = torch.empty_like(leaf.tensor, memory_format=torch.contiguous_format).copy_(value)
            return alias(replace(leaf, tensor=weight), leaf.requires_grad)

    def _versions(self) -> dict[int, int]:
        return {place: version(leaf.tensor) for place, leaf in self.leaves.items() if leaf.role == "alias"}

    def _samples(self) -> dict[int, Tensor]:
        """A few numbers of every aliased weight, copied."""
        return {place: _sampled(self.leaves[place].tensor).clone() for place in self.versions}

    def _facts(self, shared: dict[str, int]) -> Facts:
        narrow = [leaf for leaf in self.weights.values() if self.is_staged(leaf)]
        others = {view_key(leaf.tensor): leaf.tensor for leaf in self.leaves.values() if leaf.role == "alias"}
        owned = [leaf.tensor for leaf in self.leaves.values() if leaf.role == "own"]
        return Facts(
            inferred=self.space.size,
            staged=sum(leaf.tensor.numel() for leaf in narrow),
            aliased=sum(tensor.numel() for tensor in others.values()),
            copied=sum(tensor.numel() * tensor.element_size() for tensor in owned),
            shared=tuple(f"{kind} × {count}" if count > 1 else kind for kind, count in shared.items()),
        )

    def is_staged(self, leaf: Leaf) -> bool:
        """Whether an inferred weight computes in another dtype or on another device than θ."""
        if leaf.tensor.device != self.device:
            return True
        return leaf.tensor.dtype != self.space.dtype and leaf.name not in self.widened


def shadow(model: nn.Module, infer: Choice | Space = None) -> nn.Module:
    """A private tree of modules on the memory of the user's weights, to install, wrap or set things in.

    Every Parameter is a detached alias, with requires_grad exactly where it is inferred; buffers, hooks, flags and
    configuration are the shadow's own. Nothing done to its structure reaches the user's model.
    """
    space = infer if isinstance(infer, Space) else Space.of(model, infer)
    return Skeleton(model, space).shadow()


def copy_gradient_hooks(weights: Mapping[str, Tensor], hooks: Mapping[str, list[Any]]) -> None:
    """Give weights the gradient hooks that the user's have."""
    for name, found in hooks.items():
        for hook in found if name in weights else ():
            weights[name].register_hook(hook)


def _weights(space: Space, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The model's inferred Parameters by name; raises where the model does not fit the Space."""
    if not space.names:
        raise ValueError("space must hold at least one weight; it is empty.")
    for name, shape in zip(space.names, space.shapes, strict=True):
        if name not in parameters:
            raise ValueError(f"model must have every weight of the space; it has no {name}.")
        if tuple(parameters[name].shape) != shape:
            raise ValueError(
                f"model must have the space's shapes; {name} is {tuple(parameters[name].shape)}, not {shape}."
            )
    return {name: parameters[name] for name in space.names}


def _earlier(model: nn.Module) -> list[tuple[str, Tensor]]:
    origin = model.__dict__.get(ORIGIN)
    return origin.tensors if isinstance(origin, Origin) else []


def _found(table: list[Any], names: Mapping[int, str]) -> list[tuple[str, Tensor]]:
    tensors = [t for t in table if isinstance(t, Tensor) and (id(t) in names or isinstance(t, nn.Parameter))]
    return [(names.get(id(t), UNNAMED), t) for t in tensors]


def _sampled(tensor: Tensor) -> Tensor:
    """(at most 16,): numbers of a tensor at equal distances; NaN counts as a number of its own."""
    if not tensor.is_contiguous():
        tensor = tensor.detach().flatten()
    flat = tensor.detach().view(-1)
    return torch.nan_to_num(flat[:: max(1, len(flat) // 16)][:16].float() if flat.is_floating_point() else flat[:16])
