"""What a model's parameters do in one ordinary forward pass, example by example.

    run = Capture(model, names)                         # names: parameters to follow; default: all trainable
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

`site.part` says which numbers of the parameter a site sees. The model is the user's own: nothing in it is replaced,
and parameters that are not followed only stop asking for gradients while the pass runs. Before anything else the
first few examples go through the model, and every parameter's gradient by its sites is compared with autograd's,
for one example alone: so that a use that was missed, or a batch axis that was mistaken, is found. A parameter that
does not pass is handled as "general".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bayesformer.core.errors import unknown_name
from bayesformer.core.types import Inputs
from bayesformer.data.inputs import first_tensor, map_inputs
from bayesformer.jacobians.sites import Axis, GeneralSite, Part, Site, backpropagate
from bayesformer.jacobians.watch import Key, Watch
from bayesformer.network import apply, trainable

__all__ = ["Capture", "Site", "backpropagate"]

PROBES = (2, 3)  # examples of a first look; a second size where an axis was as long as the batch by chance


class Capture:
    """Runs a model and gives the sites of the parameters `names`.

    `general` are parameters to follow the slow way; those found to need it join them, with the reason.
    """

    def __init__(self, model: nn.Module, names: Sequence[str] | None = None, general: Sequence[str] = ()) -> None:
        known = trainable(model)
        for name in (*(names or ()), *general):
            if name not in known:
                raise unknown_name("trainable parameter", name, known)
        training = next((path for path, module in model.named_modules() if module.training), None)
        if training is not None:
            raise ValueError(
                "model must be in eval mode: dropout and running averages would make curvature random; "
                f"got a model whose {training or 'root'} module is training. Call model.eval()."
            )
        self.model = model
        self.parameters = {name: p for name, p in known.items() if names is None or name in set(names)}
        self.others = [p for name, p in known.items() if name not in self.parameters]
        self.general = {name: "asked for" for name in general if name in self.parameters}
        self.parts = {name: (p, Part(name, p.shape)) for name, p in self.parameters.items()}
        self.axes: dict[Key, Axis | None] = {}
        self.probed = 0  # examples of the first look
        self.columns: int | None = None  # that will go back after each pass, if known

    def __call__(self, inputs: Inputs) -> tuple[Tensor, list[Site]]:
        """Outputs (B, ..., K) and the sites, in the order of use."""
        # One example alone cannot tell whether examples are kept apart: look again once there are two.
        if self.probed < min(len(first_tensor(inputs)), PROBES[0]):
            self.probe(inputs)
        outputs, watch = self._watched(inputs, self.axes)
        for name, function in watch.uncovered.items():
            # Its use depends on the data (a router's experts): what was done before may be wrong as well.
            raise ValueError(
                f"parameter {name!r} is used by {function} in another way than on the first examples; "
                f"follow it the slow way with general=[{name!r}], or leave it out."
            )
        return outputs, self._sites(watch)

    def _watched(self, inputs: Inputs, axes: Mapping[Key, Axis | None]) -> tuple[Tensor, Watch]:
        examples = len(first_tensor(inputs))
        followed = (part for name, part in self.parts.items() if name not in self.general)
        watch = Watch(followed, examples, axes, self.columns)
        with torch.enable_grad(), _frozen(self.others), watch:
            outputs = apply(self.model, inputs)
        if len(outputs) != examples:
            raise ValueError(
                f"outputs must have one entry per example in front; got {tuple(outputs.shape)} for {examples} examples."
            )
        if not outputs.requires_grad:
            names = ", ".join(self.parameters)
            raise ValueError(f"outputs must depend on the parameters followed; they do not depend on {names}.")
        return outputs, watch

    def _sites(self, watch: Watch) -> list[Site]:
        covered = [site for site in watch.sites if site.name not in self.general]
        slow = [
            GeneralSite(Part(name, p.shape), p, self.general[name])
            for name, p in self.parameters.items()
            if name in self.general
        ]
        return [*covered, *slow]

    def probe(self, inputs: Inputs) -> tuple[Tensor, list[Site]]:
        """The first look: finds the batch axes on a few examples, compares with autograd, and returns what it saw.

        The first call does this by itself.
        """
        sizes = [size for size in PROBES if size <= len(first_tensor(inputs))] or [1]
        for size in sizes:
            outputs, watch = self._watched(map_inputs(inputs, lambda x, size=size: x[:size]), {})
            uncovered = self.general | watch.uncovered
            covered = {name: p for name, p in self.parameters.items() if name not in uncovered}
            wrong = mismatches(covered, outputs, watch.sites)
            if not wrong or size == sizes[-1]:
                break
        self.general, self.axes, self.probed = wrong | uncovered, watch.axes, size
        return outputs, self._sites(watch)


def mismatches(parameters: Mapping[str, Tensor], outputs: Tensor, sites: list[Site]) -> dict[str, str]:
    """Parameters whose gradient for one example, by their sites, is not autograd's; and in what way."""
    if not parameters:
        return {}
    columns = torch.zeros_like(outputs).unsqueeze(0)
    columns[0, 0] = patternless(outputs[0])
    exact = torch.autograd.grad(outputs, list(parameters.values()), columns[0], retain_graph=True, allow_unused=True)
    sites = [site for site in sites if site.name in parameters]
    gradients = backpropagate(sites, outputs, columns)
    found: dict[str, Tensor] = {}
    for site, g in zip(sites, gradients, strict=True):
        own = site.per_example(g)[0]
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
    # A gradient that is 0 but for rounding (a key's bias) is judged by the size of all gradients.
    whole = math.hypot(*sizes)
    wrong = dict.fromkeys(unseen, "no use of it was seen")
    for name, size, others, off in zip(found, sizes, apart, away, strict=True):
        tolerance = torch.finfo(seen[name].dtype).eps ** 0.5 * (size + 0.01 * whole)
        if others > tolerance:
            wrong[name] = "its uses do not keep examples apart along one axis"
        elif off > tolerance:
            wrong[name] = "its uses that were seen do not add up to its gradient"
    return wrong


def _norms(tensors: list[Tensor]) -> list[float]:
    """All in one wait for the device."""
    return torch.stack([t.norm().double() for t in tensors]).tolist() if tensors else []


def patternless(like: Tensor) -> Tensor:
    """Numbers between 1 and 2 without a pattern, leaving the global random stream alone."""
    numbers = torch.arange(like.numel(), device=like.device, dtype=torch.float64)
    return (1 + (numbers * 1.618033988749895 + 0.5).frac()).to(like.dtype).view(like.shape)


@contextmanager
def _frozen(parameters: Sequence[Tensor]) -> Iterator[None]:
    """No gradients for these: the graph stays small, and a backward pass stops at the first followed layer."""
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)
