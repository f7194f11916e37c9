"""A user's module as a function of one vector θ: its own tree, its own buffers, everything else shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer.core.compat import buffer_slots
from bayesformer.core.types import Params
from bayesformer.model.calling import apply
from bayesformer.model.leaves import Leaf, alias, own, window
from bayesformer.model.precision import Caster, Collector, StagedWeights
from bayesformer.model.skeleton import Facts, Skeleton, copy_gradient_hooks
from bayesformer.model.space import Space


class Shell:
    """A copy of the model whose inferred weights are views of one vector `theta` (P,), their gradients views of `grad`.

    A shell is used by one thread at a time. Modes, hooks and attention are set on `module`, never on the user's model.
    Do not call `module.to`, `zero_grad` or anything else that gives weights new memory: `verify` raises if that has
    happened.
    """

    def __init__(self, skeleton: Skeleton, gradients: bool = True, theta: Tensor | None = None) -> None:
        self.skeleton = skeleton
        self.space: Space = skeleton.space
        self.unused: tuple[str, ...] = ()  # filled by a probe
        with torch.inference_mode(False), torch.no_grad():
            self.theta = self._initial() if theta is None else self._checked(theta)
            self.grad = torch.zeros_like(self.theta) if gradients else None
            self.stages = self._stages()
            self.weights = self._weights()
            self.module, hooks, self._alive = skeleton.build(self._resolve)
            self.load(self.theta)
        if gradients:
            copy_gradient_hooks(self.weights, hooks)
        self._prepare()
        self._slots = [
            (f"{path}.{key}" if path else key, buffer_slots(module), key)
            for path, module in self.module.named_modules()
            for key in buffer_slots(module)
        ]

    def load(self, theta: Tensor) -> None:
        """Use the weights θ (P,). Free if that is `self.theta` itself and nothing is staged."""
        if theta.data_ptr() != self.theta.data_ptr():
            self.theta.copy_(theta.detach())
        for stage in self.stages:
            stage.load(self.theta)

    def cast(self, weights: Mapping[str, Tensor]) -> Params:
        """Weights by name in the precision and on the device in which the module computes with them."""
        return {name: value.to(self.weights[name]) for name, value in weights.items()}

    def sync(self) -> None:
        """Take staged weights that were written directly, as an initialiser does, over into `theta`."""
        with torch.no_grad():
            for name, place in self.space.views(self.theta).items():
                if name in self._staged:
                    place.copy_(self.weights[name])

    @property
    def buffers(self) -> Params:
        """The tensors that passes may change (running averages and the like), by name: live ones, not copies."""
        found, seen = Params(), set[int]()
        for name, slots, key in self._slots:
            tensor = slots.get(key)
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor
        return found

    def load_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Copy saved values into the buffers of these names; one that a pass gave another shape is replaced."""
        if not buffers:
            return
        slots = {name: (table, key) for name, table, key in self._slots}
        unknown = next((name for name in buffers if name not in slots), None)
        if unknown is not None:
            raise ValueError(f"buffers must be those of the model; it has no {unknown}.")
        with torch.inference_mode(False), torch.no_grad():
            for name, value in buffers.items():
                table, key = slots[name]
                tensor = table.get(key)
                if tensor is None or tensor.shape != value.shape or tensor.is_inference():
                    table[key] = value.clone()
                else:
                    tensor.copy_(value)

    def __call__(self, inputs: Any) -> Tensor:
        """The output tensor under the weights loaded, for one tensor, a tuple, or a mapping of arguments."""
        return apply(self.module, inputs)

    @property
    def facts(self) -> Facts:
        """How many numbers are inferred, staged and shared, bytes copied, and weights found unused."""
        return replace(self.skeleton.facts, unused=self.unused)

    def verify(self) -> None:
        """Raise if a weight or gradient of the module no longer is a view of `theta` or `grad`."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        for name, weight in self.weights.items():
            if named.get(name) is not weight:
                raise RuntimeError(f"{name} of the shell was replaced: it no longer is part of theta.")
        if self.grad is not None:
            for name, place in self.space.views(self.grad).items():
                grad = self.weights[name].grad
                if name not in self._staged and (grad is None or grad.data_ptr() != place.data_ptr()):
                    raise RuntimeError(f"the gradient of {name} was replaced: it no longer is part of grad.")

    def __reduce__(self) -> Any:
        raise TypeError("a Shell cannot be copied or pickled; make another one by skeleton.shell().")

    def __repr__(self) -> str:
        return f"Shell({type(self.module).__name__}: {self.facts})"

    def _initial(self) -> Tensor:
        return self.space.pack({name: leaf.tensor for name, leaf in self.skeleton.weights.items()})

    def _checked(self, theta: Tensor) -> Tensor:
        wanted = (self.space.size,), self.space.dtype, self.skeleton.device
        if (tuple(theta.shape), theta.dtype, theta.device) != wanted or not theta.is_contiguous():
            given = f"{tuple(theta.shape)}, {theta.dtype}, {theta.device}"
            raise ValueError(
                f"theta must be a contiguous vector of {wanted[0]}, {wanted[1]}, {wanted[2]}; got {given}."
            )
        return theta.detach()

    def _stages(self) -> list[StagedWeights]:
        slices, groups = self.space.slices, dict[Any, list[Leaf]]()
        for leaf in self.skeleton.weights.values():
            if self.skeleton.is_staged(leaf):
                groups.setdefault((leaf.tensor.dtype, leaf.tensor.device), []).append(leaf)
        self._staged = {leaf.name for leaves in groups.values() for leaf in leaves}
        return [
            StagedWeights(
                {x.name: slices[x.name] for x in leaves}, {x.name: x.tensor.shape for x in leaves}, leaves[0].tensor
            )
            for leaves in groups.values()
        ]

    def _weights(self) -> dict[str, Tensor]:
        """The inferred Parameters by name, with their gradients' places if there are gradients."""
        values = self.space.views(self.theta)
        for stage in self.stages:
            values |= stage.weights
        grads = {} if self.grad is None else self.space.views(self.grad)
        weights = dict[str, Tensor]()
        for name, leaf in self.skeleton.weights.items():
            weight = weights[name] = nn.Parameter(values[name], self.grad is not None)
            weight.__dict__.update(leaf.attributes)
            if name in self._staged and grads:
                weight.register_post_accumulate_grad_hook(Collector(grads[name]))
            elif grads:
                weight.grad = grads[name]
        return weights

    def _resolve(self, leaf: Leaf) -> Tensor:
        if leaf.role == "inferred":
            return self.weights[leaf.name]
        if leaf.role == "alias":
            return alias(leaf)
        return window(leaf, self.weights[leaf.name]) if leaf.role == "window" else own(leaf)

    def _prepare(self) -> None:
        for module in self.module.modules():
            if isinstance(module, nn.TransformerEncoder):
                # Nested tensors need the fast path of every layer, which frozen and inferred layers take differently.
                module.use_nested_tensor = False
        for path in self.skeleton.wide:
            self.module.get_submodule(path).register_forward_pre_hook(Caster(self.space.dtype), with_kwargs=True)
