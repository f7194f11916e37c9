"""Recording every use of some parameters during an ordinary forward pass.

`UseRecorder` is a `TorchFunctionMode`, which belongs to one thread: for each torch function whose arguments hold a
parameter that it follows (by identity, or as a view), it runs the function and then the function's rule from
`use_rules.RULES`, which adds a site. A use without a rule is kept as uncovered, with the function's name. Uses whose
results never reach the outputs (detached norms, as in DoRA) are left out by `keep_reaching`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name

from bayesformer.jacobians.batched_backward import REPLACEMENTS
from bayesformer.jacobians.sites import Axis, Output, Part, Site
from bayesformer.jacobians.use_rules import RULES
from bayesformer.model.multihead import multi_head_attention_forward

UseKey = tuple[str, int]
"""A use: the parameter's name, and its number among the uses of that parameter in a pass."""


class UncoveredUse(NamedTuple):
    """A use that no rule covers: the parameter, the function by name, and the function's results in the graph."""

    name: str
    function: str
    nodes: tuple[Node | None, ...]


class UseRecorder(TorchFunctionMode):
    """Follows parameters, each with its part, through one pass of `examples` examples.

    Args:
        parameters: the tensors to follow, each with the part of a parameter that it is.
        examples: B of the pass.
        axes: batch axes found by earlier passes.
        columns: vector-Jacobian products that one backward pass will compute at once; None if that is not known.
        dtype: of the inputs and gradients of sites.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[Tensor, Part]],
        examples: int,
        axes: Mapping[UseKey, Axis | None],
        columns: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.moments: list[Tensor] = []  # of the last LayerNorm: its output, means, 1 / deviations
        self.replaced: dict[Any, Callable[..., Any]] = {F.layer_norm: partial(_layer_norm, self.moments)}
        if columns != 1:
            self.replaced |= REPLACEMENTS
        # The tensors are kept with their parts: an id stays true only while its object lives.
        self.parts = {id(entry[0]): entry for entry in parameters}
        self.examples, self.known, self.dtype = examples, axes, dtype
        self.axes: dict[UseKey, Axis | None] = {}
        self.sites: list[Site] = []
        self.uncovered: list[UncoveredUse] = []
        self.uses: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, and note what it did with the parameters."""
        kwargs = kwargs or {}
        found = self._found(args, kwargs)
        if not found:
            return self.replaced.get(func, func)(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:  # in plain functions, which are seen here again
                return multi_head_attention_forward(*args, **kwargs)
        rule = RULES.get(func)
        out = self.replaced.get(func, func)(*args, **kwargs)
        if not _moves(out) or (rule is not None and rule(self, func, out, *args, **kwargs)):
            return out
        name = resolve_name(func) or str(func)
        results = (out,) if isinstance(out, Tensor) else out
        nodes = tuple(t.grad_fn for t in results if isinstance(t, Tensor))
        self.uncovered += [UncoveredUse(part.name, name, nodes) for part in found]
        return out

    def keep_reaching(self, outputs: Tensor) -> int:
        """Leave out all uses that the outputs do not depend on, since their results were detached; how many."""
        reached = graph_nodes(outputs)
        before = len(self.sites) + len(self.uncovered)
        self.sites = [site for site in self.sites if site.edge is None or site.edge.node in reached]
        self.uncovered = [use for use in self.uncovered if not reached.isdisjoint(use.nodes)]
        return before - len(self.sites) - len(self.uncovered)

    def _found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Part]:
        """The parts among the arguments. Plain loops, since every function of the pass comes through here."""
        parts, found = self.parts, []
        for x in args:
            if id(x) in parts:
                found.append(parts[id(x)][1])
            elif type(x) in {tuple, list}:
                found += [parts[id(y)][1] for y in x if id(y) in parts]
        for x in kwargs.values():
            if id(x) in parts:
                found.append(parts[id(x)][1])
        return found

    def part(self, x: Any) -> Part | None:
        """What `x` is of a followed parameter, if it is."""
        entry = self.parts.get(id(x))
        return None if entry is None else entry[1]

    def alias(self, tensor: Tensor, part: Part) -> None:
        """Follow `tensor`, which holds this part of a parameter, from here on: a view or a cast of one followed."""
        self.parts[id(tensor)] = (tensor, part)

    def axis(self, part: Part, shape: torch.Size, free: Iterable[int]) -> Axis | None:
        """The batch axis of a tensor among the axes `free`: as it was before, or the first that is long enough."""
        key, free = (part.name, self.uses[part.name]), list(free)
        self.uses[part.name] += 1
        if key in self.known:
            before = self.known[key]
            found = None if before is None else self._again(before, shape)
        else:
            found = self._new(shape, free)
        self.axes[key] = found
        return found

    def _again(self, before: Axis, shape: torch.Size) -> Axis | None:
        length = shape[before.number]
        fits = length and length % self.examples == 0 if before.flat else length == self.examples
        return Axis(before.number, self.examples, before.flat) if fits else None

    def _new(self, shape: torch.Size, free: list[int]) -> Axis | None:
        for number in free:
            if shape[number] == self.examples:
                return Axis(number, self.examples)
        if 0 in free and shape[0] and shape[0] % self.examples == 0:
            return Axis(0, self.examples, flat=True)
        return None

    def output(self, tensor: Tensor, axis: Axis) -> Output:
        """A site's output. The edge, not the tensor: an operation in place may change the tensor afterwards."""
        return Output(get_gradient_edge(tensor), tensor.shape, axis, self.dtype, tensor.device)


def graph_nodes(outputs: Tensor) -> set[Node | None]:
    """All nodes of the autograd graph behind the outputs."""
    found: set[Node | None] = set()
    rest = [outputs.grad_fn]
    while rest:
        node = rest.pop()
        if node is not None and node not in found:
            found.add(node)
            rest.extend(following for following, _ in node.next_functions)
    return found


def _layer_norm(
    moments: list[Tensor],
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.layer_norm, which also puts its output, the means and 1 / deviations into `moments`."""
    if torch.is_autocast_enabled(input.device.type):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    moments[:] = torch.native_layer_norm(input, normalized_shape, weight, bias, eps)
    return moments[0]


def _moves(out: Any) -> bool:
    """Whether a gradient flows through it."""
    if isinstance(out, Tensor):
        return out.requires_grad
    return isinstance(out, tuple | list) and any(isinstance(t, Tensor) and t.requires_grad for t in out)
