"""Draws and KLs of long vectors of weights, in pieces.

On a CPU a temporary as long as the weights is memory fetched from the system anew, which costs several times
the arithmetic, and autograd makes two for every operation. Here nothing of full length is made but the noise, the
weights and one gradient of each parameter: the work goes piece by piece, and the KL's gradient is the vector to
which the likelihood's is added. Short vectors, other devices and torch.func transforms take the plain formulas,
which give the same numbers. Gradients of these gradients raise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bayesformer.core.types import Params
from bayesformer.core.vectors import is_long, pieces, transformed
from bayesformer.layers.families import Family, Gaussian, kl_terms
from bayesformer.model.space import Space
from bayesformer.priors import distributions as laws
from bayesformer.priors.distributions import Distribution


def in_pieces(rho: Tensor) -> bool:
    """Whether to work in pieces: a long vector, and not inside a transform of torch.func."""
    return is_long(rho) and not transformed()


def noise(family: type[Family], raws: Sequence[Tensor]) -> Tensor:
    """(P,): standard noise for unconstrained parameters."""
    if len(raws) > 1 or not in_pieces(raws[0]):  # a shape's gradient goes through the noise
        return family.noise_of(*raws)
    made = torch.empty_like(raws[0])
    for like, part in pieces(raws[0].detach(), made):
        part.copy_(family.noise_of(like))
    return made


class Views(NamedTuple):
    """Parameters as a forward pass in pieces and the KL after it should see them; by name of a weight."""

    rho: Params  # each in the shape of the weight
    tables: Params  # locations that take sparse gradients
    whole_rho: Tensor  # (P,), for the KL
    whole_tables: Params  # for the KL


def views(layout: Space, rho: Tensor, tables: Mapping[str, Tensor]) -> Views:
    """The same numbers. Gradients of the pass are added to those of the KL in place, not each made in full."""
    found = iter(_Views.apply(layout, rho, *tables.values()))
    whole, whole_tables = next(found), {name: next(found) for name in tables}
    sparse_tables = {name: next(found) for name in tables}
    return Views(dict(zip(layout.names, found, strict=True)), sparse_tables, whole, whole_tables)


def draw(locs: Sequence[Tensor], rho: Tensor, z: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """loc + softplus(rho) z, and a view of rho as above."""
    found = _Draw.apply(rho, z, *locs)
    return found[0], found[1:]


def kl(
    family: type[Family], priors: Sequence[Distribution], vectors: Sequence[Tensor], locs: Sequence[Tensor]
) -> Tensor:
    """(): Σ KL(q ‖ prior), a prior for every location; `vectors` are raw parameters, and noise if it is needed."""
    return _Divergence.apply(family, priors, len(vectors), *vectors, *locs)


class _Views(torch.autograd.Function):
    """Outputs: rho and tables for the KL, then tables and the parts of rho for the pass."""

    @staticmethod
    def forward(ctx: Any, layout: Space, rho: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.like = layout, (rho.detach(), *(table.detach() for table in tables))
        again = (table.detach() for table in tables)
        return *(tensor.detach() for tensor in ctx.like), *again, *layout.views(rho.detach()).values()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_higher_order()
        count = len(ctx.like)
        whole = [_start(grad, like) for grad, like in zip(grads, ctx.like, strict=False)]
        parts = [*whole[1:], *ctx.layout.views(whole[0]).values()]
        for part, grad in zip(parts, grads[count:], strict=True):
            if grad is not None:
                part.add_(grad)
        return None, *whole


class _Draw(torch.autograd.Function):
    """d/d loc = 1, d/d rho = sigmoid(rho) z. Nothing is saved by autograd: the KL may go backward on its own."""

    @staticmethod
    def forward(ctx: Any, rho: Tensor, z: Tensor, *locs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.vectors, ctx.version = (rho.detach(), z), rho._version
        ctx.sizes = [loc.numel() for loc in locs]
        weights = _empty(locs)
        for loc, weight, *vectors in zip(locs, weights, *(vector.split(ctx.sizes) for vector in (rho, z)), strict=True):
            for mean, raw, noise, made in pieces(loc.reshape(-1), *vectors, weight.view(-1)):
                torch.addcmul(mean, softplus(raw), noise, out=made)
        return rho.detach(), *weights

    @staticmethod
    def backward(ctx: Any, whole: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_higher_order()
        rho, z = ctx.vectors
        if rho._version != ctx.version:
            raise RuntimeError("rho was changed in place between a forward pass and its backward pass.")
        slope = _start(whole, rho)
        for grad, *vectors in zip(grads, *(vector.split(ctx.sizes) for vector in (rho, z, slope)), strict=True):
            if grad is not None:
                for weight, raw, noise, made in pieces(grad.reshape(-1), *vectors):
                    made.addcmul_(torch.sigmoid(raw).mul_(noise), weight)
        return slope, None, *grads


class _Divergence(torch.autograd.Function):
    """Its gradient is made along with the value, and handed out once."""

    @staticmethod
    def forward(ctx: Any, family: type[Family], priors: Sequence[Distribution], flat: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.given = family, priors, flat
        ctx.noise = flat - len(family.raw) if not ctx.needs_input_grad[2 + flat] else 0  # vectors without a gradient
        if any(ctx.needs_input_grad):
            ctx.slopes = _slopes_of(tensors, flat, ctx.noise)
            return _value_and_slopes(family, priors, flat, tensors, ctx.slopes)
        return torch.stack([_value(family, priors[i], piece) for i, piece in _pieces(flat, tensors)]).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_higher_order()
        tensors, slopes = ctx.saved_tensors, ctx.slopes
        family, priors, flat = ctx.given
        if slopes is None:  # backward a second time
            slopes = _slopes_of(tensors, flat, ctx.noise)
            _value_and_slopes(family, priors, flat, tensors, slopes)
        ctx.slopes, scaled = None, [slope.mul_(grad) for slope in slopes]
        learned = flat - ctx.noise
        return None, None, None, *scaled[:learned], *[None] * ctx.noise, *scaled[learned:]


def _refuse_higher_order() -> None:
    if torch.is_grad_enabled():  # with create_graph=True, where these gradients would pass for constants
        raise RuntimeError(
            "a long vector of random weights has first derivatives only under torch.autograd, without create_graph; "
            "for higher ones use torch.func."
        )


def _slopes_of(tensors: Sequence[Tensor], flat: int, noise: int) -> tuple[Tensor, ...]:
    return _empty((*tensors[: flat - noise], *tensors[flat:]))


def _start(grad: Tensor | None, like: Tensor) -> Tensor:
    """What to add to: the KL's gradient, which was made for nobody else, or zeros without a KL."""
    return torch.zeros_like(like) if grad is None else grad


def _empty(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors)


def _pieces(flat: int, tensors: Sequence[Tensor]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Pieces of a location and of what belongs to it in the `flat` vectors before the locations."""
    locs = tensors[flat:]
    sizes = [loc.numel() for loc in locs]
    parts = zip(locs, *(vector.split(sizes) for vector in tensors[:flat]), strict=True)
    for i, (loc, *vectors) in enumerate(parts):
        for piece in pieces(loc.reshape(-1), *vectors):
            yield i, piece


def _value(family: type[Family], prior: Distribution, piece: Sequence[Tensor]) -> Tensor:
    """() from location, raw parameters and perhaps noise."""
    count = 1 + len(family.raw)
    return kl_terms(family.of(*piece[:count]), prior, piece[count] if len(piece) > count else None).sum()


def _value_and_slopes(
    family: type[Family], priors: Sequence[Distribution], flat: int, tensors: Sequence[Tensor], slopes: Sequence[Tensor]
) -> Tensor:
    """The value; its derivatives are written to `slopes`, which may lack those of the noise."""
    values = []
    learned = flat - (len(tensors) - len(slopes))
    for (i, piece), (_, made) in zip(_pieces(flat, tensors), _pieces(learned, slopes), strict=True):
        prior = priors[i]
        if family is Gaussian and isinstance(prior, laws.Normal):
            values.append(_gaussian(prior, *piece[:2], *made))
            continue
        with torch.enable_grad():
            leaves = [vector.detach().requires_grad_() for vector in piece[: 1 + learned]]
            value = _value(family, prior, [*leaves, *piece[1 + learned :]])
        for slope, grad in zip(made, torch.autograd.grad(value, leaves, materialize_grads=True), strict=True):
            slope.copy_(grad)
        values.append(value.detach())
    return torch.stack(values).sum()


def _gaussian(prior: laws.Normal, loc: Tensor, rho: Tensor, by_loc: Tensor, by_rho: Tensor) -> Tensor:
    """½ (s² + d²) / s₀² - ½ - log(s / s₀), with slopes d / s₀² and (s / s₀² - 1 / s) sigmoid(rho); d = loc - m."""
    precision, scale, sigmoid = prior.scale**-2, softplus(rho), torch.sigmoid(rho)
    torch.sub(loc, prior.loc, out=by_loc)
    squares = torch.dot(scale, scale) + torch.dot(by_loc, by_loc)
    by_loc.mul_(precision)
    torch.mul(sigmoid, scale, out=by_rho).mul_(precision).addcdiv_(sigmoid, scale, value=-1)
    return 0.5 * precision * squares - scale.log_().sum() + len(loc) * (math.log(prior.scale) - 0.5)
