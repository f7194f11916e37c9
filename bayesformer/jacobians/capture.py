"""What a model's parameters do in one ordinary forward pass, example by example.

    run = Capture(module, space)                        # space: the weights to follow
    outputs, sites = run(inputs)                        # outputs (B, ..., K), with their autograd graph
    gradients = backpropagate(sites, outputs, columns)  # columns (S, B, ..., K)
    sites[i].per_example(gradients[i])                  # (S, B, *shape): summed over the sites of a parameter,
                                                        # d(Σ columns[s, b] ∘ outputs[b]) / d(parameter)

A parameter may have several sites (tied weights, a layer used twice, slices of a packed weight); the sum over
them is its gradient. By `site.kind`:

    "linear"     g (S, B, R, out), site.inputs a (B, R, in): Σ_r g_r a_rᵀ, transposed if site.turned
    "embedding"  g (S, B, R, D), site.tokens (B, R)
    "element"    g (S, B, ...): biases, gains, positions, class tokens
    "general"    g (S, B, *shape): any other use, by a backward pass per example

`site.part` says which numbers of the parameter a site sees. Nothing in the module is replaced; parameters that are not
followed have requires_grad=False while the pass runs, so that a module is used by one thread at a time (a shell's).
Before anything else the first few examples go through the model, and every parameter's gradient by its sites is
compared with autograd's, for one example alone: so that a use that was missed, or a batch axis that was mistaken, is
found. A parameter that does not pass is handled as "general". Gradients and inputs of sites have the dtype of the
space, whatever the precision of the module.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bayesformer.core.errors import is_out_of_memory, unknown_name
from bayesformer.core.types import Inputs
from bayesformer.data.inputs import first_tensor, map_inputs
from bayesformer.jacobians.sites import Axis, GeneralSite, Part, Site, backpropagate
from bayesformer.jacobians.use_recorder import UseKey, UseRecorder
from bayesformer.model.calling import apply
from bayesformer.model.modes import check_eval
from bayesformer.model.space import Space

log = logging.getLogger("bayesformer")

__all__ = ["Capture", "Site", "backpropagate"]

PROBES = (2, 3)  # examples of the probe; a second size where an axis was as long as the batch by chance


class UseChangedError(ValueError):
    """Parameters met the data in a way that was not seen on the first examples; `functions` that used them."""

    def __init__(self, functions: Mapping[str, str]) -> None:
        name, function = next(iter(functions.items()))
        super().__init__(
            f"parameter {name!r} is used by {function} in another way than on the first examples; "
            "it has to be followed by a backward pass per example, or left out."
        )
        self.functions = dict(functions)


class Capture:
    """Runs a module in evaluation mode and gives the sites of the weights of a Space; by default all inferred ones.

    `general` are parameters to follow by one backward pass per example; those found to need it join them, with the
    reason.
    """

    def __init__(self, model: nn.Module, space: Space | None = None, general: Sequence[str] = ()) -> None:
        self.space = Space.of(model) if space is None else space
        for name in general:
            if name not in self.space.names:
                raise unknown_name("inferred parameter", name, self.space.names)
        check_eval(model, "dropout and running averages would make curvature random")
        self.model = model
        # A shell that was made without gradients has weights that could not be differentiated in.
        self.parameters = {name: model.get_parameter(name).requires_grad_() for name in self.space.names}
        followed = {id(p) for p in self.parameters.values()}
        self.others = [p for p in model.parameters() if p.requires_grad and id(p) not in followed]
        self.general = dict.fromkeys(general, "asked for")
        self.parts = {name: (p, Part(name, p.shape)) for name, p in self.parameters.items()}
        self.axes: dict[UseKey, Axis | None] = {}
        self.detaches = False  # whether some uses do not reach the outputs
        self.probed = 0  # examples of the probe
        self.columns: int | None = None  # that will go back after each pass, if known

    @property
    def dtype(self) -> torch.dtype:
        """Of everything that is computed from the sites: float32, or float64 if an inferred weight is."""
        return self.space.dtype

    def __call__(self, inputs: Inputs) -> tuple[Tensor, list[Site]]:
        """Outputs (B, ..., K) and the sites, in the order of use; `UseChangedError` if one is not as it was probed."""
        # One example alone cannot tell whether examples are kept apart: probe again once there are two.
        if self.probed < min(len(first_tensor(inputs)), PROBES[0]):
            self.probe(inputs)
        outputs, recorder = self._recorded(inputs, self.axes)
        if recorder.uncovered:
            # Their use depends on the data (a router's experts): what was done before may be wrong as well.
            raise UseChangedError({use.name: use.function for use in recorder.uncovered})
        return outputs, self._sites(recorder)

    def adapting(self, inputs: Inputs) -> tuple[Tensor, list[Site]]:
        """Outputs and sites; parameters used in another way than before are followed by backward passes from now on."""
        try:
            return self(inputs)
        except UseChangedError as error:
            log.debug("%s", error)
            self.general = self.general | error.functions
            return self.adapting(inputs)

    def _recorded(self, inputs: Inputs, axes: Mapping[UseKey, Axis | None]) -> tuple[Tensor, UseRecorder]:
        examples = len(first_tensor(inputs))
        followed = (part for name, part in self.parts.items() if name not in self.general)
        recorder = UseRecorder(followed, examples, axes, self.columns, self.dtype)
        with torch.inference_mode(False), torch.enable_grad(), _without_gradients(self.others), recorder:
            outputs = apply(self.model, map_inputs(inputs, _tracked))
        if len(outputs) != examples:
            raise ValueError(
                f"outputs must have one entry per example in front; got {tuple(outputs.shape)} for {examples} examples."
            )
        if not outputs.requires_grad:
            names = ", ".join(self.parameters)
            raise ValueError(f"outputs must depend on the parameters followed; they do not depend on {names}.")
        if self.detaches or recorder.uncovered or not axes:  # the walk of the graph is left out where it finds nothing
            self.detaches = recorder.keep_reaching(outputs) > 0
        return outputs, recorder

    def _sites(self, recorder: UseRecorder) -> list[Site]:
        covered = [site for site in recorder.sites if site.name not in self.general]
        slow = [
            GeneralSite(Part(name, p.shape), p, self.general[name], self.dtype)
            for name, p in self.parameters.items()
            if name in self.general
        ]
        return [*covered, *slow]

    def probe(self, inputs: Inputs) -> tuple[Tensor, list[Site]]:
        """Find the batch axes on the first few examples and compare all gradients with autograd's.

        Returns the outputs and sites of those examples. The first call does this by itself. Fewer examples than the
        probe needs are repeated, so that what it finds does not depend on how many come first; a model that takes one
        example only (a graph) is probed on one.
        """
        try:
            return self._probe(_repeated(inputs, PROBES[-1]), PROBES)
        except (ValueError, RuntimeError, IndexError) as error:
            if len(first_tensor(inputs)) > 1 or is_out_of_memory(error):
                raise
            log.debug("probed on one example, since the model does not take it repeated: %s", error)
            return self._probe(inputs, (1,))

    def _probe(self, inputs: Inputs, sizes: tuple[int, ...]) -> tuple[Tensor, list[Site]]:
        for size in sizes:
            outputs, recorder = self._recorded(map_inputs(inputs, lambda x, size=size: x[:size]), {})
            uncovered = self.general | {use.name: use.function for use in recorder.uncovered}
            covered = {name: p for name, p in self.parameters.items() if name not in uncovered}
            wrong = mismatches(covered, outputs, recorder.sites)
            if not wrong or size == sizes[-1]:
                break
        self.general, self.axes, self.probed = wrong | uncovered, recorder.axes, size
        return outputs, self._sites(recorder)


def _repeated(inputs: Inputs, least: int) -> Inputs:
    """The inputs, from the first example again where there are fewer than `least`."""
    count = len(first_tensor(inputs))
    if count >= least:
        return inputs
    return map_inputs(inputs, lambda x: x[torch.arange(least, device=x.device) % count])


def mismatches(parameters: Mapping[str, Tensor], outputs: Tensor, sites: list[Site]) -> dict[str, str]:
    """Parameters whose gradient for one example, by their sites, is not autograd's; and in what way."""
    if not parameters:
        return {}
    columns = torch.zeros_like(outputs).unsqueeze(0)
    columns[0, 0] = irregular_values(outputs[0])
    exact = torch.autograd.grad(outputs, list(parameters.values()), columns[0], retain_graph=True, allow_unused=True)
    sites = [site for site in sites if site.name in parameters]
    gradients = backpropagate(sites, outputs, columns)
    found: dict[str, Tensor] = {}
    for site, g in zip(sites, gradients, strict=True):
        own = site.per_example(g)[0]  # (B, *shape)
        found[site.name] = found[site.name] + own if site.name in found else own
    expected = {
        name: torch.zeros_like(p) if answer is None else answer
        for (name, p), answer in zip(parameters.items(), exact, strict=True)
    }
    unseen = [name for name in parameters if name not in found and bool((expected[name] != 0).any())]
    seen = {name: expected[name] for name in found}
    sizes = _norms(list(seen.values()))
    apart = _norms([own[1:] for own in found.values()])
    away = _norms([own[0] - answer for own, answer in zip(found.values(), seen.values(), strict=True)])
    precision = {name: max(torch.finfo(t).eps for t in (parameters[name].dtype, outputs.dtype)) for name in found}
    # A gradient that is 0 but for rounding (a key's bias) is judged by the size of all gradients.
    whole = math.hypot(*sizes)
    wrong = dict.fromkeys(unseen, "no use of it was seen")
    for name, size, others, off in zip(found, sizes, apart, away, strict=True):
        tolerance = precision[name] ** 0.5 * (size + 0.01 * whole)
        if others > tolerance:
            wrong[name] = "its uses do not keep examples apart along one axis"
        elif off > tolerance:
            wrong[name] = "its uses that were seen do not add up to its gradient"
    return wrong


def _norms(tensors: list[Tensor]) -> list[float]:
    """The norm of every tensor, read from the device in one transfer."""
    return torch.stack([t.norm().double() for t in tensors]).tolist() if tensors else []


def irregular_values(like: Tensor) -> Tensor:
    """Fixed numbers between 1 and 2 in the shape of `like`, of which no sum or difference vanishes by symmetry.

    The fractional parts of multiples of the golden ratio: what cancels when they are sent back through a model
    cancels for every other column as well. No random stream is touched.
    """
    numbers = torch.arange(like.numel(), device=like.device, dtype=torch.float64)
    return numbers.mul_(1.618033988749895).add_(0.5).frac_().add_(1).to(like.dtype).view(like.shape)


def _tracked(x: Tensor) -> Tensor:
    """The tensor, or a copy that autograd can work with if it was made in inference mode."""
    return x.clone() if x.is_inference() else x


@contextmanager
def _without_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """requires_grad=False for these: a backward pass then stops at the first layer that has a followed parameter."""
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)
