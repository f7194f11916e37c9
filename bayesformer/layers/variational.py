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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from bayesformer.core.compat import parameter_slots
from bayesformer.core.errors import unknown_name
from bayesformer.core.types import Params
from bayesformer.layers import local as layerwise
from bayesformer.layers.families import FAMILIES, INFINITE, WeightFamily, total_kl
from bayesformer.layers.substitution import Slots, slots_of, substituted, weight_at
from bayesformer.model.checkpoint_watch import CheckpointWatch
from bayesformer.model.space import Space
from bayesformer.priors.distributions import Distribution
from bayesformer.priors.prior import PriorLike, as_prior

CHECKPOINTED = (
    "model must not use gradient checkpointing: its second forward would miss the draw of the weights. Switch it off, "
    "also where the model calls torch.utils.checkpoint itself."
)


class RawParameters(nn.ParameterList):
    """An unconstrained parameter of every random weight, in the shapes of the weights, drawn from N(start, 0.01²)."""

    def __init__(self, like: Iterable[Tensor], dtype: torch.dtype, start: float) -> None:
        super().__init__(nn.Parameter(torch.empty_like(weight, dtype=dtype)) for weight in like)
        self.start = start
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all of them anew around where they start."""
        with torch.no_grad():
            for raw in self:
                raw.normal_(0.0, 0.01).add_(self.start)


class OutputLayer(NamedTuple):
    """A linear, convolution or embedding layer that can draw its outputs in the place of its weights."""

    module: nn.Module
    weight: str  # name of its random weight
    bias: str | None  # name of its bias if that is random


class Variational(nn.Module):
    """A mean-field posterior over the weights of `model`, which is copied and not changed.

        q(w) = Π_i q_i(w_i),    w = loc + scale z,    scale = softplus(rho)

    In evaluation mode a forward pass draws the weights once, for all examples and positions: outputs have their law
    under the posterior. In training mode the noise has less variance per gradient: with `local`, linear, convolution
    and embedding layers of a Gaussian or Cauchy posterior draw their outputs instead (see `layers.local`), per example
    and position; with `flipout`, linear and convolution layers of the other families flip signs per example. Weights
    that several modules share, and those used past their module's forward (as nn.MultiheadAttention does), are always
    drawn as weights. The switches `local`, `flipout` and `mean_mode` may be set at any time.

    Args:
        model: its weights become the locations; those that require no gradient stay as they are.
        family: "gaussian", "cauchy", "laplace", "logistic" or "student_t".
        prior: a law, its text, a dict of laws by name pattern, or a `Prior`; names as in `model`.
        subset: a pattern or several; a weight that matches one becomes random, the others stay points.
        local: whether to use local reparameterisation in training mode, where the family is closed under sums.
        flipout: whether to use Flipout in training mode, where local reparameterisation is not used.
        rho: where the scales start: rho ~ N(rho, 0.01²).
        df: where a Student-t's degrees of freedom start; above 2.
        copy_model: whether the model is copied, or becomes part of this one.
    """

    mean_mode: bool
    """True: use the locations, draw nothing"""
    rho: RawParameters
    """scales before softplus, in the shapes and the order of `space`; a Student-t also has `raw_df`"""

    def __init__(
        self,
        model: nn.Module,
        family: str = "gaussian",
        prior: PriorLike = "normal(0, 1)",
        subset: str | Iterable[str] = "*",
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
            raise ValueError(CHECKPOINTED)
        if not df > 2:
            raise ValueError(f"df must be greater than 2, so that the variance is finite; got {df}.")
        self.family, self.local, self.flipout, self.mean_mode = FAMILIES[family], local, flipout, False
        self.model = copy.deepcopy(model) if copy_model else model
        self.training, self._watched = model.training, False
        learned = Space.of(self.model)
        self.space = learned.select(subset)
        self._refuse_sparse()
        self.priors = _proper(as_prior(prior).assign(self.space.names, learned.names))
        self._warn_if_infinite()
        self._slots = slots_of(self.model, self.space)
        self._layers = _output_layers(self._slots)
        starts = {"rho": rho, "raw_df": df - 2 + math.log(-math.expm1(2 - df))}  # softplus inverted
        for name in self.family.raw:
            like = (self._loc(weight) for weight in self.space.names)
            self.register_module(name, RawParameters(like, self.space.dtype, starts[name]))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, under one draw."""
        if self.mean_mode:
            return self.model(*args, **kwargs)
        laws, rule = self.laws(), self._rule()
        deviations = {name: q.scale * q.noise() for name, q in laws.items()} if rule is layerwise.flipout else {}
        drawn = {name: q.loc + deviations[name] if deviations else q.rsample() for name, q in laws.items()}
        forwards = [] if rule is None else self._forwards(rule, laws, deviations)
        with substituted(self._slots, self._cast(drawn)), layerwise.replaced(forwards), self._watching():
            return self.model(*args, **kwargs)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """The first pass with gradients is refused where parts of it are checkpointed."""
        if self._watched or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            yield
            return
        with CheckpointWatch() as watch:
            yield
        if watch.kinds:
            raise ValueError(CHECKPOINTED)
        self._watched = True

    def laws(self) -> dict[str, WeightFamily]:
        """The law of every random weight by name, each in the weight's shape."""
        raws = zip(*(getattr(self, name) for name in self.family.raw), strict=True)
        named = zip(self.space.names, raws, strict=True)
        return {name: self.family.of(self._loc(name).to(self.space.dtype), *raw) for name, raw in named}

    def scales(self) -> Params:
        """The scale of every random weight, by name."""
        return {name: softplus(raw) for name, raw in zip(self.space.names, self.rho, strict=True)}

    @torch.no_grad()
    def sample(self, draws: int = 1) -> Params:
        """Weights by name, each with a leading draw axis: exact draws from q, whatever `local` says."""
        rows = [{name: q.rsample() for name, q in self.laws().items()} for _ in range(draws)]
        return {name: torch.stack([row[name] for row in rows]) for name in self.space.names}

    def point(self) -> nn.Module:
        """A plain model of the original class at the locations."""
        return copy.deepcopy(self.model)

    def kl(self) -> Tensor:
        """(): KL(q ‖ prior) in nats, differentiable.

        Where it has no closed form this is an unbiased estimate from a draw of its own, a new one at every call.
        """
        return torch.stack([total_kl(q, self.priors[name]) for name, q in self.laws().items()]).sum()

    def _rule(self) -> layerwise.Forward | None:
        """How layers draw their outputs now; None if weights are drawn instead."""
        if not self.training:
            return None
        rule = layerwise.LOCAL.get(self.family) if self.local else None
        return layerwise.flipout if rule is None and self.flipout else rule

    def _forwards(
        self, rule: layerwise.Forward, laws: dict[str, WeightFamily], deviations: Params
    ) -> list[tuple[nn.Module, layerwise.DrawingForward]]:
        """The layers that draw their outputs, each with its forward."""
        spreads = self._cast(deviations or {name: q.scale for name, q in laws.items()})
        found: list[tuple[nn.Module, layerwise.DrawingForward]] = []
        for module, weight, bias in self._layers:
            apply = layerwise.affine(module)
            if apply is not None:
                own_bias, bias_spread = parameter_slots(module).get("bias"), None if bias is None else spreads[bias]
                noise = layerwise.Noise(self._loc(weight), own_bias, spreads[weight], bias_spread)
                found.append((module, partial(rule, apply, noise)))
            elif layerwise.is_table(module) and rule is not layerwise.flipout:
                found.append((module, partial(layerwise.rows, module, laws[weight])))
        return found

    def _loc(self, name: str) -> Tensor:
        return weight_at(self._slots, name)

    def _cast(self, values: Params) -> Params:
        """In the precision of each weight, where that is lower than that of its law."""
        return {name: value.to(self._loc(name)) for name, value in values.items()}

    def _refuse_sparse(self) -> None:
        """Embeddings with sparse gradients cannot be drawn: torch has none of those of their scales."""
        for name in self.space.names:
            owner = self.model.get_submodule(name.rpartition(".")[0])
            if getattr(owner, "sparse", False):
                raise ValueError(
                    f"a random weight must have dense gradients; {name!r} belongs to an {type(owner).__name__} with "
                    "sparse=True. Give it sparse=False, or leave it out of subset."
                )

    def _warn_if_infinite(self) -> None:
        for prior in self.priors.values():
            if (self.family, type(prior)) in INFINITE:
                warnings.warn(
                    f"the KL of {self.family.__name__} to {prior} is infinite and its Monte Carlo "
                    "estimate never settles; a prior with tails as heavy (cauchy, student_t) has a finite one.",
                    stacklevel=4,
                )
                return


def _proper(laws: dict[str, Distribution | None]) -> dict[str, Distribution]:
    """The prior of every random weight, none of them flat."""
    flat = next((name for name, law in laws.items() if law is None), None)
    if flat is not None:
        raise ValueError(f"a random weight needs a proper prior; {flat!r} has a flat one. Leave it out of subset.")
    return {name: law for name, law in laws.items() if law is not None}


def _output_layers(slots: Slots) -> list[OutputLayer]:
    """The layers that can draw their outputs: those that share neither their weight nor their bias.

    Of a tied weight all uses must see one draw.
    """
    named = {(id(module), key): name for name, places in slots.items() for module, key in places}
    layers = []
    for name, places in slots.items():
        module, key = places[0]
        bias = named.get((id(module), "bias"))
        alone = len(places) == 1 and (bias is None or len(slots[bias]) == 1)
        if key == "weight" and alone and (layerwise.affine(module) is not None or layerwise.is_table(module)):
            layers.append(OutputLayer(module, name, bias))
    return layers
