"""Any model with a distribution in the place of some or all of its weights.

No layer is replaced. The wrapped model keeps its parameters, under their names: they are the locations. Beside
them stands one vector `rho` of scales, and a forward pass runs the model itself on drawn weights. So linear,
embedding, convolution and LayerNorm parameters, packed attention projections, Hugging Face Conv1D and tied
weights are one case, and the model at its locations is the point model, bit for bit.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from bayesformer.distributions import Distribution
from bayesformer.errors import unknown_name
from bayesformer.layers import local as layerwise
from bayesformer.layers.families import FAMILIES, INFINITE, Family, closed_kl, sampled_kl
from bayesformer.network import Layout, trainable
from bayesformer.priors import Prior, PriorLike, as_prior
from bayesformer.types import Params


class Run(NamedTuple):
    """A stretch of the flat vector under one prior."""

    start: int
    stop: int
    prior: Distribution


class Kept(NamedTuple):
    """The noise of the last forward pass, for a Monte Carlo KL from the same draw."""

    rho: Tensor  # the parameter it was drawn with: another one, inside torch.func, is another posterior
    noise: Tensor  # (P,)
    differentiable: bool


class Variational(nn.Module):
    """A mean-field posterior over the weights of `model`, which is copied and not changed.

        q(w) = Π_i q_i(w_i),    w = loc + scale z,    scale = softplus(rho)

    A forward pass draws the weights once, for all examples; with `local`, linear and convolution layers of a
    Gaussian or Cauchy posterior draw their outputs instead (see `layers.local`), per example and position; with
    `flipout`, such layers of the other families flip signs per example. Weights that several modules share, and
    those used past their module's forward (as nn.MultiheadAttention does), are always drawn as weights. All
    three switches, `local`, `flipout` and `mean_mode`, may be set at any time.

    Args:
        model: its weights become the locations.
        family: "gaussian", "cauchy", "laplace", "logistic" or "student_t".
        prior: a law, its text, a dict of laws by name pattern, or a `Prior`; names as in `model`.
        names: a pattern or several; a trainable parameter that matches one becomes random, the others stay points.
        local: whether to use local reparameterisation where the family is closed under sums.
        flipout: whether to use Flipout where local reparameterisation is not used.
        rho: where the scales start: rho ~ N(rho, 0.01²).
        df: where a Student-t's degrees of freedom start; above 2.
    """

    mean_mode: bool
    """True: use the locations, draw nothing"""
    rho: Tensor
    """(P,) scales before softplus, in the order of `layout`; a Student-t has `raw_df` beside it"""

    def __init__(
        self,
        model: nn.Module,
        family: str = "gaussian",
        prior: PriorLike = "normal(0, 1)",
        names: str | Iterable[str] = "*",
        *,
        local: bool = True,
        flipout: bool = False,
        rho: float = -7.0,
        df: float = 5.0,
    ) -> None:
        super().__init__()
        if family not in FAMILIES:
            raise unknown_name("variational family", family, FAMILIES)
        if any(isinstance(module, Variational) for module in model.modules()):
            raise ValueError("model must not be variational already; revert it first.")
        if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            raise ValueError("model must not use gradient checkpointing: its second forward would miss the draw.")
        if not df > 2:
            raise ValueError(f"df must be greater than 2, so that the variance is finite; got {df}.")
        self.family, self.local, self.flipout, self.mean_mode = FAMILIES[family], local, flipout, False
        self.initial = {"rho": rho, "raw_df": df - 2 + math.log(-math.expm1(2 - df))}  # softplus inverted
        self.model = copy.deepcopy(model)
        chosen = choose(trainable(self.model), names)
        self.layout = Layout.among(chosen)
        self.runs = _runs(self.layout, assign(as_prior(prior), list(chosen), list(trainable(self.model))))
        self._warn_if_infinite()
        self._slots = _slots(self.model, chosen)
        self._layers = _layers(self._slots)
        self._kept: Kept | None = None
        like = next(iter(chosen.values()))
        for name in self.family.raw:
            self.register_parameter(name, nn.Parameter(like.new_empty(self.layout.size)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scales (and degrees of freedom) as at the start; locations belong to the model's own modules."""
        with torch.no_grad():
            for name in self.family.raw:
                getattr(self, name).normal_(0.0, 0.01).add_(self.initial[name])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, under one draw."""
        return self._under_draw(self.model, args, kwargs)

    def outputs_and_kl(self, *args: Any, **kwargs: Any) -> Any:
        """The same for a model that also gives the KL of its attention, per example: not that of the weights."""
        method: Any = self.model.outputs_and_kl
        return self._under_draw(method, args, kwargs)

    def posterior(self) -> Family:
        """The law of all random weights as one vector, in the order of `layout`."""
        loc = torch.cat([self._location(name).reshape(-1) for name in self.layout.names])
        return self.family.of(loc, *(getattr(self, name) for name in self.family.raw))

    def scales(self) -> Params:
        """The scale of every random weight, by name."""
        return self.layout.views(softplus(self.rho))

    @torch.no_grad()
    def sample(self, draws: int = 1) -> Params:
        """Weights by name, each with a leading draw axis: exact draws from q, whatever `local` says."""
        posterior = self.posterior()
        return self.layout.views(torch.stack([posterior.rsample() for _ in range(draws)]))

    def point(self) -> nn.Module:
        """A plain model of the original class at the locations."""
        return copy.deepcopy(self.model)

    def kl(self) -> Tensor:
        """(): KL(q ‖ prior) in nats; closed where known, else from the draw of the last forward pass.

        The draw of a Student-t is part of a graph, so such an estimate can go backward once per forward pass.
        """
        posterior = self.posterior()
        total = posterior.loc.new_zeros(())
        for start, stop, prior in self.runs:
            q = posterior[start:stop]
            value = closed_kl(q, prior)
            if value is None:
                value = sampled_kl(q, prior, self._noise_of_last_draw(posterior)[start:stop])
            total = total + value.sum()
        return total

    def _under_draw(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.mean_mode:
            return method(*args, **kwargs)
        posterior = self.posterior()
        noise = self._draw_noise(posterior)
        deviation = posterior.scale * noise
        # Drawn for every weight, local or not: a module may be passed by, and its weight must be random still.
        weights = self.layout.views(posterior.loc + deviation)
        forwards = self._forwards(posterior, deviation)
        slots = [(module._parameters, key, weights[name]) for name in weights for module, key in self._slots[name]]
        with layerwise.substituted(slots), layerwise.replaced(forwards):
            return method(*args, **kwargs)

    def _forwards(self, posterior: Family, deviation: Tensor) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
        """Linear and convolution modules with the forward that draws their outputs."""
        forward = layerwise.LOCAL.get(self.family) if self.local else None
        if forward is not None:
            flat = posterior.scale.square() if forward is layerwise.gaussian else posterior.scale
        elif self.flipout:
            forward, flat = layerwise.flipout, deviation
        else:
            return []
        noise = self.layout.views(flat)
        found: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
        for module, weight, bias in self._layers:
            apply = layerwise.affine(module)
            if apply is not None:
                own = module._parameters
                spread = None if bias is None else noise[bias]
                given = layerwise.Noise(self._location(weight), own["bias"], noise[weight], spread)
                found.append((module, partial(forward, apply, given)))
        return found

    def _location(self, name: str) -> Tensor:
        module, key = self._slots[name][0]
        value = module._parameters[key]
        assert value is not None
        return value

    def _draw_noise(self, posterior: Family) -> Tensor:
        noise = posterior.noise()
        self._kept = Kept(self.rho, noise, torch.is_grad_enabled())
        return noise

    def _noise_of_last_draw(self, posterior: Family) -> Tensor:
        kept = self._kept
        if kept is None or kept.rho is not self.rho or (torch.is_grad_enabled() and not kept.differentiable):
            return self._draw_noise(posterior)
        return kept.noise

    def _warn_if_infinite(self) -> None:
        for run in self.runs:
            if (self.family, type(run.prior)) in INFINITE:
                warnings.warn(
                    f"the KL of a {self.family.__name__} posterior to {run.prior} is infinite and its Monte Carlo "
                    "estimate never settles; a prior with tails as heavy (cauchy, student_t) has a finite one.",
                    stacklevel=4,
                )
                return

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}  # part of a graph, which cannot be copied


def choose(parameters: Mapping[str, nn.Parameter], names: str | Iterable[str]) -> dict[str, nn.Parameter]:
    """The parameters whose name matches a pattern; a pattern that matches none is an error."""
    patterns = [names] if isinstance(names, str) else list(names)
    if not patterns:
        raise ValueError("names must hold at least one pattern; got none.")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            raise unknown_name("trainable parameter in names:", pattern, parameters)
    return {name: p for name, p in parameters.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}


def assign(prior: Prior, names: Iterable[str], every: Iterable[str]) -> dict[str, Distribution]:
    """The prior of every chosen name. A pattern may speak of weights that stay points, but not of none at all."""
    first = {name: next((p for p in prior.groups if fnmatchcase(name, p)), None) for name in every}
    for pattern in prior.groups:
        if pattern != "*" and pattern not in first.values():
            raise ValueError(f"prior pattern {pattern!r} must match a parameter; names are {list(first)}.")
    found: dict[str, Distribution] = {}
    for name in names:
        matched = first[name]
        if matched is None:
            raise ValueError(
                f"prior must cover every random weight; none of {list(prior.groups)} matches {name!r}. "
                "Add a pattern, or leave it out of names."
            )
        law = prior.groups[matched]
        if law is None:
            raise ValueError(f"a random weight needs a proper prior; {name!r} has a flat one. Leave it out of names.")
        found[name] = law
    return found


def _runs(layout: Layout, laws: Mapping[str, Distribution]) -> tuple[Run, ...]:
    """Neighbours with the same prior as one stretch: fewer and larger operations."""
    runs, start = [], 0
    for _, group in groupby(zip(layout.names, layout.sizes, strict=True), key=lambda item: laws[item[0]]):
        members = list(group)
        stop = start + sum(size for _, size in members)
        runs.append(Run(start, stop, laws[members[0][0]]))
        start = stop
    return tuple(runs)


def _slots(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, list[tuple[nn.Module, str]]]:
    """Every (module, attribute) that holds a parameter: several for a tied one."""
    names = {id(p): name for name, p in parameters.items()}
    slots: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in parameters}
    for module in model.modules():
        for key, value in module._parameters.items():
            if id(value) in names:
                slots[names[id(value)]].append((module, key))
    return slots


def _layers(slots: Mapping[str, list[tuple[nn.Module, str]]]) -> list[tuple[nn.Module, str, str | None]]:
    """(module, name of its weight, name of its bias if random) of every linear or convolution layer that shares
    neither: of a tied weight, all uses must see one draw."""
    named = {slot: name for name, places in slots.items() for slot in places}
    layers = []
    for (module, key), name in named.items():
        bias = named.get((module, "bias"))
        mine = len(slots[name]) == 1 and (bias is None or len(slots[bias]) == 1)
        if key == "weight" and mine and layerwise.affine(module) is not None:
            layers.append((module, name, bias))
    return layers
