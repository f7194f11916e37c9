"""Affine maps of uncertain inputs by uncertain weights.

    S_h = Σ_ij M_ij Cov(W_·i, W_·j) + W S Wᵀ + S_b,   M = m mᵀ + S

Li et al. (2025), section 3: exact when input and weights are independent, Gaussian or not. With variances only it
reads s_h = V m² + (W² + V) s + v_b.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.predict.one_pass.carrier import PassContext, Uncertain, first_uncertain, mean_of, rule
from bayesformer.predict.one_pass.weight_covariance import Independent, WeightCovariance, with_one


@dataclass(frozen=True)
class Affine:
    """h = W x + b, kept as long as it may be useful to know that a tensor is one.

    `moves` are the changes of shape since then, to be replayed on anything in the layout of h.
    """

    x: Any  # (..., in)
    w: Any  # (out, in)
    b: Any  # (out,)
    context: PassContext
    moves: tuple[Callable[[Tensor], Tensor], ...] = ()

    def rows(self, index: slice) -> Affine:
        """The map to some of the outputs: only their spread need be computed."""
        return replace(self, w=rows_of(self.w, index), b=None if self.b is None else rows_of(self.b, index))

    def moved(self, move: Callable[[Tensor], Tensor]) -> Affine:
        """The same map, its output in another shape."""
        return replace(self, moves=(*self.moves, move))

    def replay(self, h: Tensor) -> Tensor:
        """Something in the layout of h, moved as h was."""
        for move in self.moves:
            h = move(h)
        return h

    @property
    def structure(self) -> WeightCovariance | None:
        """How W varies, or None where it is known."""
        return structure_of(self.w) if isinstance(self.w, Uncertain) else None

    def spread(self) -> Tensor:
        """The covariance S_h of the outputs, or its diagonal, as the settings say."""
        return self._covariance() if self.context.settings.propagate == "full" else self._variance()

    def _variance(self) -> Tensor:
        m, v = mean_of(self.x), self.x.s if isinstance(self.x, Uncertain) else None
        own = self.b.s if isinstance(self.b, Uncertain) else None
        if not isinstance(self.w, Uncertain):
            return _plus(None if v is None else F.linear(v, self.context.square(self.w)), own, mean_of(self.w), m)
        if self.w.structure is None:  # the two products of independent weights, in as few passes as there are
            found = F.linear(m * m, self.w.s, own)
            return found if v is None else _add_product(found, v, second_moment(self.w))
        found = self.weight_noise(m, v)
        if v is not None:
            found = found + F.linear(v, self.context.square(self.w.m))
        return found if own is None or structure_of(self.w).with_bias else found + own

    def _covariance(self) -> Tensor:
        m, v = mean_of(self.x), self.x.v if isinstance(self.x, Uncertain) else None
        found = self.weight_noise(m, v) if isinstance(self.w, Uncertain) else None
        if v is not None:
            w = mean_of(self.w)
            image = (w * v.unsqueeze(-2)) @ w.mT if v.dim() == m.dim() else w @ v @ w.mT
            found = image if found is None else found + image
        structure = self.structure
        if isinstance(self.b, Uncertain) and not (structure is not None and structure.with_bias):
            found = self.b.S if found is None else found + self.b.S
        assert found is not None
        return found.expand(*m.shape[:-1], *found.shape[-2:])

    def weight_noise(self, m: Tensor, v: Tensor | None) -> Tensor:
        """What the weights' own spread adds, for an input of these moments."""
        structure = structure_of(self.w)
        if structure.with_bias:
            m, v = with_one(m, v)
        full = self.context.settings.propagate == "full"
        return structure.covariance(m, v) if full else structure.variance(m, v)


@rule(F.linear)
def linear(input: Any, weight: Any, bias: Any = None) -> Uncertain:
    """An affine map; its spread waits until it is asked for."""
    context = first_uncertain(input, weight, bias).context
    h = F.linear(mean_of(input), mean_of(weight), mean_of(bias))
    map_ = Affine(input, weight, bias, context)
    found = Uncertain(h, map_.spread, context)
    found.origin = map_
    return found


@rule(torch.addmm, Tensor.addmm)
def addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Uncertain:
    """Hugging Face's Conv1D: a linear layer whose weight lies the other way."""
    if beta != 1 or alpha != 1:
        raise ValueError(f"addmm must have beta=1 and alpha=1 to carry variance; got beta={beta}, alpha={alpha}.")
    return linear(mat1, transposed(mat2), input)


def transposed(w: Any) -> Any:
    """Wᵀ; of a weight with its squares, which are kept for the next pass."""
    if not isinstance(w, Uncertain):
        return w.mT
    if "flip" not in w.__dict__:
        with torch.inference_mode(False):
            found = w.like(w.m.mT, w.s.mT)
        found.structure, found.turned = w.structure, not w.turned
        w.__dict__["flip"] = found
    return w.__dict__["flip"]


def rows_of(w: Any, index: slice) -> Any:
    """Some rows of a weight, with what is known of it."""
    if not isinstance(w, Uncertain):
        return w[index]
    if w.m.dim() == 1:
        return w.like(w.m[index], w.v[index] if not w.full else w.v[index, index])
    found = w.like(w.m[index], w.s[index])
    if w.structure is not None:
        found.structure = structure_of(w).rows(index)
    elif "second" in w.__dict__:
        found.__dict__["second"] = w.__dict__["second"][index]
    return found


def structure_of(w: Uncertain) -> WeightCovariance:
    """How a weight varies, in the orientation it has now."""
    if w.structure is None:
        return Independent(w.s)
    return w.structure.transposed() if w.turned else w.structure


def second_moment(w: Uncertain) -> Tensor:
    """(out, in): W² + V of an uncertain weight, computed once and kept with it."""
    if "second" not in w.__dict__:
        with torch.inference_mode(False):  # kept for passes that may need a gradient
            w.__dict__["second"] = torch.addcmul(w.s, w.m, w.m)
    found: Tensor = w.__dict__["second"]
    return found


def _add_product(total: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """total + v wᵀ; `total` is used up where no gradient is wanted."""
    if v.dim() == 1:
        return total + w @ v
    flat, rows = total.flatten(0, -2), v.flatten(0, -2)
    summed = torch.addmm(flat, rows, w.mT) if torch.is_grad_enabled() else flat.addmm_(rows, w.mT)
    return summed.view(total.shape)


def _plus(found: Tensor | None, own: Tensor | None, w: Tensor, m: Tensor) -> Tensor:
    """The bias's own variance, where only that is uncertain."""
    if found is None:
        assert own is not None
        return own.expand(*m.shape[:-1], len(w))
    return found if own is None else found + own
