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
from dataclasses import fields
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from bayesformer.core.errors import unknown_name
from bayesformer.core.types import Params
from bayesformer.layers import local as layerwise
from bayesformer.layers import long
from bayesformer.layers.drawing import Drawing
from bayesformer.layers.families import FAMILIES, INFINITE, Family, is_closed, kl_terms
from bayesformer.model.space import Space
from bayesformer.priors.distributions import Distribution
from bayesformer.priors.prior import Prior, PriorLike, as_prior

Forwards: TypeAlias = list[tuple[nn.Module, Callable[[Tensor], Tensor]]]


class Run(NamedTuple):
    """A stretch of the flat vector under one prior."""

    start: int
    stop: int
    prior: Distribution


class Kept(NamedTuple):
    """What the last forward pass leaves for the KL: the noise of its draw, and views that gather gradients."""

    rho: Tensor  # the parameter it was drawn with: another one, inside torch.func, is another posterior
    noise: Tensor | None  # (P,), where the KL is estimated from it
    views: Params  # by the names of the parameters they are of; see `long.views`
    differentiable: bool

    def serves(self, rho: Tensor) -> bool:
        """Whether the KL can use it."""
        return self.rho is rho and (self.differentiable or not torch.is_grad_enabled())


class Variational(nn.Module):
    """A mean-field posterior over the weights of `model`, which is copied and not changed.

        q(w) = Π_i q_i(w_i),    w = loc + scale z,    scale = softplus(rho)

    A forward pass draws the weights once, for all examples; with `local`, linear, convolution and embedding layers
    of a Gaussian or Cauchy posterior draw their outputs instead (see `layers.local`), per example and position; with
    `flipout`, linear and convolution layers of the other families flip signs per example. Weights that several
    modules share, and those used past their module's forward (as nn.MultiheadAttention does), are always drawn as
    weights. All three switches, `local`, `flipout` and `mean_mode`, may be set at any time.

    Second derivatives of a model of many weights (see `layers.long`) need torch.func; torch.autograd raises.

    Args:
        model: its weights become the locations.
        family: "gaussian", "cauchy", "laplace", "logistic" or "student_t".
        prior: a law, its text, a dict of laws by name pattern, or a `Prior`; names as in `model`.
        names: a pattern or several; a trainable parameter that matches one becomes random, the others stay points.
        local: whether to use local reparameterisation where the family is closed under sums.
        flipout: whether to use Flipout where local reparameterisation is not used.
        rho: where the scales start: rho ~ N(rho, 0.01²).
        df: where a Student-t's degrees of freedom start; above 2.
        copy_model: whether the model is copied, or becomes part of this one.
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
        copy_model: bool = True,
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
        self.model = copy.deepcopy(model) if copy_model else model
        own = dict(self.model.named_parameters())
        learned = {name: own[name] for name in Space.of(self.model).names}
        chosen = choose(learned, names)
        self.layout = Space.of(self.model, tuple(chosen))
        assigned = assign(as_prior(prior), list(chosen), list(learned))
        self.runs, self._priors = _runs(self.layout, assigned), [assigned[name] for name in self.layout.names]
        self._open = not all(is_closed(self.family, run.prior) for run in self.runs)
        self._warn_if_infinite()
        self._slots = _slots(self.model, chosen)
        self._layers = _layers(self._slots)
        self._kept: Kept | None = None
        where = next(iter(chosen.values())).device
        for name in self.family.raw:  # float32 also for weights in half precision, whose spread would round away
            raw = torch.empty(self.layout.size, dtype=self.layout.dtype, device=where)
            self.register_parameter(name, nn.Parameter(raw))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scales (and degrees of freedom) as at the start; locations belong to the model's own modules."""
        with torch.no_grad():
            for name in self.family.raw:
                getattr(self, name).normal_(0.0, 0.01).add_(self.initial[name])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, under one draw."""
        return self._under_draw(self.model, args, kwargs)

    def posterior(self) -> Family:
        """The law of all random weights as one vector, in the order of `layout`."""
        return self.family.of(_flat(self._locations().values()), *self._raws())

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
        noise = self._noise_of_last_draw() if self._open else None
        if self._in_pieces(self._locations()):
            return self._kl_in_pieces(noise)
        posterior = self.posterior()
        total = posterior.loc.new_zeros(())
        for start, stop, prior in self.runs:
            z = None if noise is None else noise[start:stop]
            total = total + kl_terms(posterior[start:stop], prior, z).sum()
        return total

    def _kl_in_pieces(self, noise: Tensor | None) -> Tensor:
        own = {f"model.{name}": loc for name, loc in self._locations().items()}
        own |= {name: getattr(self, name) for name in self.family.raw}
        kept = self._kept
        if kept is not None and kept.serves(self.rho):
            own |= {name: view for name, view in kept.views.items() if view.data_ptr() == own[name].data_ptr()}
            self._kept = kept._replace(views={})  # used up: they hold the graph of the pass
        vectors = [own[name] for name in self.family.raw] + ([] if noise is None else [noise])
        return long.kl(self.family, self._priors, vectors, [own[f"model.{name}"] for name in self.layout.names])

    def _under_draw(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.mean_mode:
            return method(*args, **kwargs)
        rule = layerwise.LOCAL.get(self.family) if self.local else None
        if rule is None and self.flipout:
            rule = layerwise.flipout
        weights, forwards = self._drawn() if rule is None else self._awaited(rule)
        slots = [(module._parameters, key, weights[name]) for name in weights for module, key in self._slots[name]]
        with layerwise.substituted(slots), layerwise.replaced(forwards):
            return method(*args, **kwargs)

    def _drawn(self) -> tuple[Mapping[str, Tensor], Forwards]:
        """All weights, drawn now."""
        noise, locs = self._draw_noise(), self._locations()
        if noise.requires_grad or not self._in_pieces(locs):
            drawn = self.layout.views(_flat(locs.values()) + softplus(self.rho) * noise)
            return {name: weight.to(locs[name].dtype) for name, weight in drawn.items()}, []
        view, weights = long.draw(list(locs.values()), self.rho, noise)
        self._keep(noise, {"rho": view})
        return dict(zip(locs, weights, strict=True)), []

    def _awaited(self, rule: layerwise.Forward) -> tuple[Mapping[str, Tensor], Forwards]:
        """Weights that are drawn when used, and the modules that draw their outputs instead, with their forwards."""
        noise = self._draw_noise() if self._open or rule is layerwise.flipout else None
        drawing = self._drawing(noise)
        made = [(module, drawing.forward(module, weight, bias, rule)) for module, weight, bias in self._layers]
        weights = {name: drawing.weight(name) for name in self.layout.names}
        return weights, [(module, forward) for module, forward in made if forward is not None]

    def _drawing(self, noise: Tensor | None) -> Drawing:
        locs, drawn = self._locations(), None if noise is None else self.layout.views(noise)
        if self._in_pieces(locs) and len(self.family.raw) == 1:
            tables = {name: locs[name] for module, name, _ in self._layers if layerwise.is_table(module)}
            views = long.views(self.layout, self.rho, tables)
            self._keep(noise, {"rho": views.whole_rho, **{f"model.{k}": v for k, v in views.whole_tables.items()}})
            locs |= views.tables
            return Drawing(self.family.of, {k: (loc, views.rho[k]) for k, loc in locs.items()}, drawn, sparse=True)
        flat = self.family.of(self.rho, *self._raws())  # to compute all scales at once
        shapes = [self.layout.views(getattr(flat, field.name)) for field in fields(flat)[1:]]
        given = {k: (loc, *(shape[k].to(loc.dtype) for shape in shapes)) for k, loc in locs.items()}
        return Drawing(self.family, given, drawn and {k: z.to(locs[k].dtype) for k, z in drawn.items()})

    def _in_pieces(self, locations: Params) -> bool:
        """Whether to work in pieces, which all have the precision of the scales."""
        return long.in_pieces(self.rho) and all(loc.dtype == self.rho.dtype for loc in locations.values())

    def _locations(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in self.layout.names:
            module, key = self._slots[name][0]
            value = module._parameters[key]
            assert value is not None
            found[name] = value
        return found

    def _raws(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.family.raw]

    def _draw_noise(self) -> Tensor:
        noise = long.noise(self.family, self._raws())
        self._keep(noise, {})
        return noise

    def _keep(self, noise: Tensor | None, views: Params) -> None:
        self._kept = Kept(self.rho, noise if self._open else None, views, torch.is_grad_enabled())

    def _noise_of_last_draw(self) -> Tensor:
        kept = self._kept
        if kept is None or kept.noise is None or not kept.serves(self.rho):
            return self._draw_noise()
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


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _runs(layout: Space, laws: Mapping[str, Distribution]) -> tuple[Run, ...]:
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
    """(module, name of its weight, name of its bias if random) of every linear, convolution or embedding layer that
    shares neither: of a tied weight, all uses must see one draw."""
    named = {slot: name for name, places in slots.items() for slot in places}
    layers = []
    for (module, key), name in named.items():
        bias = named.get((module, "bias"))
        mine = len(slots[name]) == 1 and (bias is None or len(slots[bias]) == 1)
        if key == "weight" and mine and (layerwise.affine(module) is not None or layerwise.is_table(module)):
            layers.append((module, name, bias))
    return layers
