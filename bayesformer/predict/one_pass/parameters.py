"""A Gaussian over a model's weights as uncertain tensors, parameter by parameter.

Correlations within a weight matrix (or a matrix and its bias) are kept in a `WeightCovariance`; correlations between
layers have no place in a pass that takes layers as independent, so they are refused unless `correlations="drop"`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesformer.laws import Block, Dense, Deviations, Diagonal, GaussianLaw, KroneckerBasis, Law
from bayesformer.model.space import Space
from bayesformer.predict.one_pass.carrier import PassContext, Uncertain
from bayesformer.predict.one_pass.weight_covariance import Complete, Factored, WeightCovariance

SUPPORTED = "independent weights, Kronecker or dense blocks over one weight matrix, or over it and its bias"


@dataclass(frozen=True)
class KnownCovariance:
    """What is known of a parameter's spread besides its variances."""

    structure: WeightCovariance
    turned: bool = False


def uncertain_parameters(space: Space, law: Law, context: PassContext) -> dict[str, Tensor]:
    """Every parameter at its mean: uncertain where it has spread, plain where it has none."""
    variance, known, vectors = _spreads(space, law, context)
    _check_variance(variance, space)
    means, spreads = space.views(law.mean.detach()), space.views(variance)
    found: dict[str, Tensor] = {}
    for name, mean in means.items():
        if not bool(spreads[name].any()):
            found[name] = mean
            continue
        tensor = Uncertain(mean, vectors.get(name, spreads[name]), context)
        if name in known:
            tensor.structure, tensor.turned = known[name].structure, known[name].turned
        found[name] = tensor
    return found


def _spreads(
    space: Space, law: Law, context: PassContext
) -> tuple[Tensor, dict[str, KnownCovariance], dict[str, Tensor]]:
    """Variances (P,), structures of matrices, and covariances of vectors (biases, gains)."""
    if not isinstance(law, GaussianLaw):
        raise ValueError(
            f"weights must be Gaussian for the one-pass rule; got {type(law).__name__}. "
            "Draws (ensembles, chains) have no variance of their own: predict with them by sampling."
        )
    known: dict[str, KnownCovariance] = {}
    vectors: dict[str, Tensor] = {}
    for place, block in zip(law.places, law.blocks, strict=True):
        if isinstance(block, Diagonal):
            continue
        if isinstance(block, Deviations):
            _refuse(context, "a low-rank part that correlates all weights")
            continue
        index = torch.arange(space.size, device="cpu")[place] if isinstance(place, slice) else place.cpu()
        known |= dict(_matching(space, index, block, context, vectors))
    return law.variance(), known, vectors


def _matching(
    space: Space, index: Tensor, block: Block, context: PassContext, vectors: dict[str, Tensor]
) -> Iterator[tuple[str, KnownCovariance]]:
    """The structure of the parameter that a block is about."""
    touched = _touched(space, index)
    matrix = next((name for name, (_, shape) in touched.items() if len(shape) > 1), None)
    if isinstance(block, KroneckerBasis) and matrix is not None and len(touched) <= 2:
        found = _kronecker(touched, matrix, index, block, context)
        if found is not None:
            yield matrix, found
            return
    if isinstance(block, Dense):
        yield from _dense(touched, index, block, context, vectors)
        return
    _refuse(context, f"a {type(block).__name__} block over {', '.join(touched)}")


def _touched(space: Space, index: Tensor) -> Mapping[str, tuple[Tensor, tuple[int, ...]]]:
    """Parameters with weights in a block: where they lie in the flat vector, and their shape."""
    found, start = {}, 0
    for name, shape, size in zip(space.names, space.shapes, space.sizes, strict=True):
        if bool(((index >= start) & (index < start + size)).any()):
            found[name] = (torch.arange(start, start + size, device="cpu"), shape)
        start += size
    return found


def _orders(place: Tensor, shape: tuple[int, ...], bias: Tensor | None) -> Iterator[tuple[Tensor, bool]]:
    """The orders in which a matrix (with its bias as a last column) may lie in a block, and whether it is turned."""
    matrix = place.view(shape[0], math.prod(shape[1:]))
    for table, turned in ((matrix, False), (matrix.mT, True)):
        if bias is None:
            yield table, turned
        elif len(bias) == len(table):
            yield torch.cat([table, bias[:, None]], 1), turned


def _kronecker(
    touched: Mapping[str, tuple[Tensor, tuple[int, ...]]],
    matrix: str,
    index: Tensor,
    block: KroneckerBasis,
    context: PassContext,
) -> KnownCovariance | None:
    bias = next((place for name, (place, _) in touched.items() if name != matrix), None)
    for table, turned in _orders(*touched[matrix], bias):
        if tuple(table.shape) == block.shape and torch.equal(table.flatten(), index):
            return KnownCovariance(Factored.of(block, context.settings.kronecker, bias is not None), turned)
    return None


def _dense(
    touched: Mapping[str, tuple[Tensor, tuple[int, ...]]],
    index: Tensor,
    block: Dense,
    context: PassContext,
    vectors: dict[str, Tensor],
) -> Iterator[tuple[str, KnownCovariance]]:
    """A matrix and its bias together, or every parameter by itself where layers are correlated and that is dropped."""
    order = {int(i): position for position, i in enumerate(index.tolist())}
    matrices = [name for name, (_, shape) in touched.items() if len(shape) > 1]
    names = list(touched)
    whole = {name for name, (place, _) in touched.items() if all(int(i) in order for i in place.tolist())}
    if len(matrices) == 1 and len(names) == len(whole) == 2:
        bias = touched[next(name for name in names if name != matrices[0])][0]
        for table, turned in _orders(*touched[matrices[0]], bias):
            yield matrices[0], KnownCovariance(Complete(_sub(block, table, order), with_bias=True), turned)
            return
    if len(names) > 1:
        _refuse(context, f"a dense block over {len(names)} parameters")
    for name, (place, shape) in touched.items():
        if name not in whole:
            _refuse(context, f"a dense block over a part of {name}")
        elif len(shape) > 1:
            table = place.view(shape[0], -1)
            yield name, KnownCovariance(Complete(_sub(block, table, order)))
        elif context.settings.propagate == "full":
            rows = block.tril[[order[int(i)] for i in place.tolist()]]
            vectors[name] = rows @ rows.mT


def _sub(block: Dense, table: Tensor, order: Mapping[int, int]) -> Tensor:
    """(out, in, out, in): Σ of the weights in a table of places."""
    rows = block.tril[[order[int(i)] for i in table.flatten().tolist()]]
    return (rows @ rows.mT).view(*table.shape, *table.shape)


def _refuse(context: PassContext, what: str) -> None:
    if context.settings.correlations == "error":
        raise ValueError(
            f"the one-pass rule cannot use {what}; it supports {SUPPORTED}. Use correlations='drop' to go on with the "
            "variances (and correlations within a layer), or predictive='streamlined' or 'linearised'."
        )


def _check_variance(variance: Tensor, space: Space) -> None:
    for name, part in space.views(variance).items():
        if not bool(torch.isfinite(part).all()) or bool((part < 0).any()):
            worst = part.min().item() if torch.isfinite(part).all() else math.nan
            raise ValueError(f"the variance of {name} must be finite and not negative; got {worst}.")
