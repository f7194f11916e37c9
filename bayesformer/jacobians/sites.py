"""Places in a forward pass where a parameter meets the data, and its gradient there for every example.

A site knows what entered it and where its output is in the autograd graph. Given the gradient g of something in
that output, it knows the gradient in its parameter, example by example. Letters: S columns (what is
differentiated), B examples, R positions at which the parameter is used (tokens, patches, pixels; 1 for none).
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from bayesformer.core.errors import is_out_of_memory

log = logging.getLogger("bayesformer")

EVERY = slice(None)


@dataclass(frozen=True)
class Part:
    """The numbers of a parameter that one use sees: all in their own order, or those at `index`."""

    name: str
    shape: torch.Size  # of the whole parameter
    index: Tensor | None = None  # in the shape of the part; places in the flat parameter

    @cached_property
    def size(self) -> int:
        """Numbers of the whole parameter."""
        return math.prod(self.shape)

    def places(self, like: Tensor) -> Tensor:
        """The index in the shape of the part; all places in order where it is the whole parameter."""
        if self.index is not None:
            return self.index
        return torch.arange(self.size, device=like.device).view(self.shape)

    @cached_property
    def ends(self) -> tuple[int, int] | None:
        """Where the part begins and ends, if it is one stretch of the flat parameter in order."""
        if self.index is None:
            return 0, self.size
        flat = self.index.flatten()
        start = int(flat[0])
        line = torch.arange(start, start + len(flat), device=flat.device)
        return (start, start + len(flat)) if torch.equal(flat, line) else None

    def put(self, values: Tensor) -> Tensor:
        """(S, B, numbers of the part) -> (S, B, *shape of the parameter), 0 elsewhere."""
        if self.index is not None:
            whole = values.new_zeros(*values.shape[:2], self.size)
            values = whole.index_add_(2, self.index.flatten(), values)
        return values.view(*values.shape[:2], *self.shape)


class Axis(NamedTuple):
    """Where the batch is in a tensor: an axis of its own, or the slow part of a flattened first axis."""

    number: int
    examples: int
    flat: bool = False

    def front(self, tensor: Tensor, before: int = 0) -> Tensor:
        """(..., B, rest): the batch first, after as many axes that this one does not count."""
        if self.flat:
            return tensor.unflatten(before, (self.examples, -1))
        return tensor if self.number == 0 else tensor.movedim(before + self.number, before)


class Site(Protocol):
    """One use of one parameter in a forward pass."""

    kind: ClassVar[str]

    @property
    def part(self) -> Part:
        """Which numbers of the parameter it sees."""
        ...

    @property
    def name(self) -> str:
        """The name of the parameter that is used."""
        ...

    @property
    def edge(self) -> GradientEdge | None:
        """The site's output in the autograd graph; None where the site has no output of its own."""
        ...

    def arrange(self, gradient: Tensor) -> Tensor:
        """The gradients of S columns as autograd gives them, (S, *shape), in this site's form (S, B, ...)."""
        ...

    def values(self, gradient: Tensor, examples: slice = EVERY) -> Tensor:
        """(S, B, ...) from `backpropagate` -> (S, B, numbers of the part): each example's gradient in the part."""
        ...

    def per_example(self, gradient: Tensor, examples: slice = EVERY) -> Tensor:
        """(S, B, *shape): each example's gradient in the whole parameter, 0 where the site does not see it."""
        ...


class Output(NamedTuple):
    """A site's output: its edge in the graph, its shape, and where its batch is."""

    edge: GradientEdge
    shape: torch.Size
    axis: Axis
    dtype: torch.dtype  # in which gradients are given, whatever the module computes in
    device: torch.device

    def front(self, gradient: Tensor) -> Tensor:
        """Gradients (S, *shape) with the batch axis second, (S, B, rest)."""
        return self.axis.front(gradient, before=1)

    def nothing(self, columns: int) -> Tensor:
        """(S, *shape): the gradients where nothing depends on this output."""
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return zeros.expand(columns, *self.shape)


@dataclass(frozen=True)
class _Placed:
    """What every site with an output has."""

    part: Part
    output: Output

    @property
    def name(self) -> str:
        """Name of the parameter that the site uses."""
        return self.part.name

    @property
    def edge(self) -> GradientEdge:
        """The site's output in the autograd graph."""
        return self.output.edge

    def values(self, gradient: Tensor, examples: slice = EVERY) -> Tensor:
        """(S, B, numbers of the part)."""
        raise NotImplementedError

    def per_example(self, gradient: Tensor, examples: slice = EVERY) -> Tensor:
        """(S, B, *shape): the gradient of each example in the parameter."""
        return self.part.put(self.values(gradient, examples))


@dataclass(frozen=True)
class LinearSite(_Placed):
    """out = W a at R positions: g (S, B, R, out) and `inputs` a (B, R, in); the gradient is Σ_r g_r a_rᵀ.

    `turned` says that the parameter holds Wᵀ (in, out), as Hugging Face's Conv1D does. A convolution is this
    too, its inputs being patches.
    """

    kind: ClassVar[str] = "linear"
    inputs: Tensor
    turned: bool = False
    channels_second: bool = False

    def arrange(self, gradient: Tensor) -> Tensor:
        """Gradients (S, *shape of the output) as (S, B, R, out)."""
        gradient = self.output.front(gradient)
        if self.channels_second:
            gradient = gradient.movedim(2, -1)
        return gradient if gradient.dim() == 4 else gradient.reshape(*gradient.shape[:2], -1, gradient.shape[-1])

    def values(self, gradient: Tensor, examples: slice = EVERY) -> Tensor:
        """(S, B, out · in): Σ_r g_r a_rᵀ of every example, flat in the parameter's own order."""
        g, a = gradient[:, examples], self.inputs[examples]
        return (a.mT @ g if self.turned else g.mT @ a).flatten(2)


@dataclass(frozen=True)
class EmbeddingSite(_Placed):
    """Rows of a table looked up at R positions: g (S, B, R, D) and `tokens` (B, R)."""

    kind: ClassVar[str] = "embedding"
    tokens: Tensor
    padding: int | None = None

    def arrange(self, gradient: Tensor) -> Tensor:
        """(S, B, R, D), 0 at the padding token, whose row never moves."""
        gradient = self.output.front(gradient).reshape(len(gradient), *self.tokens.shape, -1)
        if self.padding is not None:
            gradient = gradient.masked_fill((self.tokens == self.padding).unsqueeze(-1), 0)
        return gradient

    def values(self, gradient: Tensor, examples: slice = EVERY) -> Tensor:
        """(S, B, V · D): gradients of S columns in the embedding table, for each example, flattened.

        Row v of the table gets the sum of `gradient` (S, B, R, D) over the positions where token v occurs. `examples`
        selects from B.
        """
        g, tokens = gradient[:, examples], self.tokens[examples]
        table = g.new_zeros(*g.shape[:2], *self.part.shape)
        return table.scatter_add_(2, tokens.unsqueeze(-1).expand_as(g), g).flatten(2)


@dataclass(frozen=True)
class ElementSite(_Placed):
    """out = x + p, or x ∘ p, with p broadcast: g (S, B, ...) and, for a product, `inputs` x (B, ...).

    Biases, positions, class tokens; the gains of LayerNorm and RMSNorm, where x is normalised already.
    """

    kind: ClassVar[str] = "element"
    shape: torch.Size  # of the part, 1 where it is broadcast, without the batch axis
    inputs: Tensor | None = None
    sign: int = 1

    def arrange(self, gradient: Tensor) -> Tensor:
        """Gradients (S, *shape of the output) as (S, B, ...), the batch axis second."""
        return self.output.front(gradient)

    def values(self, gradient: Tensor, examples: slice = EVERY) -> Tensor:
        """g, or g ∘ x, summed over the axes p was broadcast along."""
        whole = examples == EVERY
        g = gradient if whole else gradient[:, examples]
        g = g if self.sign == 1 else -g
        if self.inputs is not None:
            g = g * (self.inputs if whole else self.inputs[examples])
        broadcast = [i + 2 for i, length in enumerate(self.shape) if length == 1 and g.shape[i + 2] > 1]
        g = g.sum(broadcast) if broadcast else g
        return g if g.dim() == 3 else g.reshape(*g.shape[:2], -1)


@dataclass(frozen=True)
class GeneralSite:
    """Any other use: no output of its own; `backpropagate` finds each example's gradient with a backward of its own.

    Slow (S · B backward passes), and right for whatever the model does with the parameter.
    """

    kind: ClassVar[str] = "general"
    part: Part
    parameter: Tensor
    reason: str
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The name of the parameter that is used."""
        return self.part.name

    @property
    def edge(self) -> None:
        """None: the gradient is taken in the parameter itself."""
        return

    def arrange(self, gradient: Tensor) -> Tensor:
        """Gradients (S, B, *shape) as they are, one example after another."""
        return gradient

    def values(self, gradient: Tensor, examples: slice = EVERY) -> Tensor:
        """(S, B, size of the parameter), from gradients that are per example already."""
        return gradient[:, examples].reshape(*gradient[:, examples].shape[:2], -1)

    def per_example(self, gradient: Tensor, examples: slice = EVERY) -> Tensor:
        """(S, B, *shape), from gradients that are per example already."""
        return gradient[:, examples]


def slope_numbers(sites: list[Site]) -> int:
    """How many numbers one column's gradients at the outputs of all sites have, or at a parameter for general ones."""
    found: dict[int, int] = {}
    for site in sites:
        if isinstance(site, _Placed):
            found[id(site.edge)] = math.prod(site.output.shape)
        else:
            found[id(site)] = site.part.size
    return sum(found.values())


def backpropagate(
    sites: list[Site], outputs: Tensor, columns: Tensor, keep: bool = True, together: bool = True
) -> list[Tensor]:
    """For each site g (S, B, ...): the gradient of Σ columns ∘ outputs in the site's output.

    `columns` is (S, B, ..., K) for outputs (B, ..., K). Backward passes go to the outputs of the sites; the gradients
    of weights, half of an ordinary backward pass, are not computed. All columns go back in one batched pass where the
    model's operations have one, else (or without `together`) one after another. The graph is kept for more columns and
    goes with `outputs`, unless there are no more: without `keep` one column gives its memory back on the way.
    """
    columns = columns.to(outputs.dtype)
    if together and len(columns) > 1 and all(site.edge is not None for site in sites):
        try:
            return _together(sites, outputs, columns)
        except (RuntimeError, NotImplementedError) as error:  # an operation whose backward pass cannot be batched
            if is_out_of_memory(error):
                raise
            log.debug("columns go back one after another: %s", error)  # any other error is raised again below
    return _in_turn(sites, outputs, columns, keep or len(columns) > 1)


def _edges(sites: list[Site]) -> dict[int, GradientEdge]:
    """Sites may share an output: a weight and the bias added to it."""
    return {id(site.edge): site.edge for site in sites if site.edge is not None}


def _together(sites: list[Site], outputs: Tensor, columns: Tensor) -> list[Tensor]:
    edges = _edges(sites)
    used: list[bool] = []

    def back(column: Tensor) -> list[Tensor]:
        answers = torch.autograd.grad(outputs, list(edges.values()), column, retain_graph=True, allow_unused=True)
        used[:] = [answer is not None for answer in answers]
        return [answer for answer in answers if answer is not None]  # vmap returns tensors only

    # Not `is_grads_batched`, which knows fewer operations; `batched_backward` has rules for what vmap does not know.
    answers = iter(torch.vmap(back)(columns))
    gradients = {key: next(answers) for key, seen in zip(edges, used, strict=True) if seen}
    return [_arranged(site, gradients.get(id(site.edge)), len(columns)) for site in sites]


def _arranged(site: Site, gradient: Tensor | None, columns: int) -> Tensor:
    """A site's gradients in its own form and precision; zeros where the outputs do not depend on it."""
    if isinstance(site, GeneralSite):
        assert gradient is not None
        return gradient
    assert isinstance(site, _Placed)
    return site.arrange(site.output.nothing(columns) if gradient is None else gradient.to(site.output.dtype))


def _in_turn(sites: list[Site], outputs: Tensor, columns: Tensor, keep: bool) -> list[Tensor]:
    edges = _edges(sites)
    general = [site for site in sites if isinstance(site, GeneralSite)]
    keep = keep or bool(general)
    found: dict[int, list[Tensor]] = defaultdict(list)
    for column in columns:
        if edges:
            answers = torch.autograd.grad(outputs, list(edges.values()), column, retain_graph=keep, allow_unused=True)
            for key, answer in zip(edges, answers, strict=True):
                if answer is not None:
                    found[key].append(answer)
        for site, answer in zip(general, _one_by_one(general, outputs, column), strict=True):
            found[id(site)].append(answer)
    gradients = {}
    for key in list(found):  # once its columns are joined, their memory serves the next
        kept = found.pop(key)
        gradients[key] = kept[0].unsqueeze(0) if len(kept) == 1 else torch.stack(kept)
    keys = [id(site if site.edge is None else site.edge) for site in sites]
    return [_arranged(site, gradients.get(key), len(columns)) for site, key in zip(sites, keys, strict=True)]


def _one_by_one(sites: list[GeneralSite], outputs: Tensor, column: Tensor) -> list[Tensor]:
    """(B, *shape) for each: a backward pass per example."""
    if not sites:
        return []
    parameters = [site.parameter for site in sites]
    found: list[list[Tensor]] = [[] for _ in sites]
    for n in range(len(outputs)):
        only = torch.zeros_like(column)
        only[n] = column[n]
        answers = torch.autograd.grad(outputs, parameters, only, retain_graph=True, allow_unused=True)
        for site, answer, kept in zip(sites, answers, found, strict=True):
            kept.append((torch.zeros_like(site.parameter) if answer is None else answer).to(site.dtype))
    return [torch.stack(kept) for kept in found]
