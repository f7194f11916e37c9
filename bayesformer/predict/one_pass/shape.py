"""Functions that only move values: their spread moves along.

Covariances over the last axis follow where the values of a vector went: two values stay correlated as long as they
end in one last axis. Splitting heads so keeps each head's block, and merging puts the blocks on the diagonal: heads are
taken as independent, as in Li et al. (2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesformer.predict.one_pass.carrier import Uncertain, first_uncertain, mean_of, rule, then
from bayesformer.predict.one_pass.linear import Affine, rows_of, transposed

Move = Callable[[Tensor], Tensor]

MOVES = [
    *[torch.reshape, Tensor.reshape, torch.flatten, Tensor.flatten, torch.unflatten, Tensor.unflatten],
    *[torch.permute, Tensor.permute, torch.movedim, Tensor.movedim, torch.swapaxes, Tensor.swapaxes],
    *[torch.squeeze, Tensor.squeeze, torch.unsqueeze, Tensor.unsqueeze, Tensor.expand, Tensor.repeat, torch.tile],
    *[torch.broadcast_to, Tensor.broadcast_to, Tensor.contiguous, torch.clone, Tensor.clone, Tensor.detach],
    *[torch.select, Tensor.select, torch.index_select, Tensor.index_select, torch.gather, Tensor.gather],
    *[torch.flip, Tensor.flip, torch.roll, Tensor.roll, torch.repeat_interleave, Tensor.repeat_interleave],
    *[torch.diagonal, Tensor.diagonal, torch.take_along_dim, Tensor.take_along_dim],
]


def _register_moves() -> None:
    for function in MOVES:
        rule(function)(partial(_move, function))


def _move(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of one tensor that copies its values to new places."""
    if not isinstance(x, Uncertain):
        raise TypeError(f"{function.__name__} must not take places from an uncertain tensor.")
    return moved(x, lambda values: function(values, *args, **kwargs))


@rule(Tensor.view)
def view(x: Uncertain, *shape: Any) -> Uncertain:
    """As reshape: the spread may lie in memory in another order than the mean."""
    if isinstance(shape[0], torch.dtype):
        raise TypeError("a view of an uncertain tensor must keep its dtype.")
    return moved(x, lambda values: values.reshape(*shape))


@rule(Tensor.view_as, Tensor.reshape_as, Tensor.expand_as)
def view_as(x: Any, other: Any) -> Any:
    """To the shape of another tensor."""
    if not isinstance(x, Uncertain):
        return x.expand(other.shape) if x.numel() != other.numel() else x.reshape(other.shape)
    if x.numel() != other.numel():
        return moved(x, lambda values: values.expand(other.shape))
    return moved(x, lambda values: values.reshape(other.shape))


def moved(x: Uncertain, move: Move) -> Uncertain:
    """The tensor after a function that copies values to new places."""
    _check_structure(x)
    m = move(x.m)
    found = x.like(m, then(x, lambda v: move(v) if v.dim() == x.m.dim() else moved_covariance(v, x.m.shape, move)))
    found.scores = x.scores
    if x.origin is not None and x.settings.tokens == "shared":
        found.origin = x.origin.moved(move)
    return found


def moved_covariance(v: Tensor, shape: Sequence[int], move: Move) -> Tensor:
    """Covariances over the new last axis: those of values that were in one last axis before, else 0."""
    d = v.shape[-1]
    v = v.expand(*shape, d)
    source = move(torch.arange(v.numel() // d, device=v.device).view(*shape))  # where each value was
    vector, entry = source // d, source % d
    found = v.reshape(-1, d, d)[vector.unsqueeze(-1), entry.unsqueeze(-1), entry.unsqueeze(-2)]
    return found * (vector.unsqueeze(-1) == vector.unsqueeze(-2))


@rule(torch.transpose, Tensor.transpose, torch.swapdims, Tensor.swapdims)
def transpose(x: Uncertain, dim0: int, dim1: int) -> Uncertain:
    """Two axes swapped; of a weight matrix, with its structure."""
    if x.structure is not None and {dim0 % x.dim(), dim1 % x.dim()} == {0, 1} and x.dim() == 2:
        return transposed(x)
    return moved(x, lambda values: values.transpose(dim0, dim1))


@rule(torch.t, Tensor.t)
def t(x: Uncertain) -> Uncertain:
    """The transpose of a matrix, with its covariance turned as well."""
    return transposed(x) if x.dim() == 2 else x


@rule(Tensor.__getitem__)
def getitem(x: Any, index: Any) -> Uncertain:
    """Any index; of a weight's rows, with its structure."""
    if not isinstance(x, Uncertain):
        raise TypeError("an index must not be an uncertain tensor.")
    if x.structure is not None and isinstance(index, slice):
        return rows_of(x, index)
    last = _last_slice(x, index)
    if last is not None:
        return _columns(x, last)
    return moved(x, lambda values: values[index])


def _last_slice(x: Uncertain, index: Any) -> slice | None:
    """The slice of the last axis, where the index is nothing more than that."""
    if not isinstance(index, tuple) or len(index) not in {2, x.dim()} or not isinstance(index[-1], slice):
        return None
    rest = index[:-1]
    if len(index) == x.dim() and all(isinstance(i, slice) and i == slice(None) for i in rest):
        return index[-1]
    return index[-1] if rest == (Ellipsis,) else None


def _columns(x: Uncertain, index: slice) -> Uncertain:
    """Some of the last axis: of a packed projection, the spread of that part alone is ever computed."""
    if isinstance(x.origin, Affine) and not x.origin.moves and not x.known:
        map_ = x.origin.rows(index)
        found = x.like(x.m[..., index], map_.spread)
        found.origin = map_
        return found
    return moved(x, lambda values: values[..., index])


@rule(torch.narrow, Tensor.narrow)
def narrow(x: Uncertain, dim: int, start: int, length: int) -> Uncertain:
    """`length` entries of an axis, from `start` on."""
    return _stretch(x, dim, slice(int(start), int(start) + length))


def _stretch(x: Uncertain, dim: int, index: slice) -> Uncertain:
    if dim % x.dim() == x.dim() - 1 and x.dim() > 1:
        return _columns(x, index)
    if dim % x.dim() == 0 and x.structure is not None:
        return rows_of(x, index)
    return moved(x, lambda values: values.narrow(dim, index.start, index.stop - index.start))


@rule(torch.split, Tensor.split, torch.split_with_sizes, Tensor.split_with_sizes)
def split(x: Uncertain, split_size_or_sections: Any, dim: int = 0) -> tuple[Uncertain, ...]:
    """Into stretches of given lengths."""
    sizes, total = split_size_or_sections, x.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(_stretch(x, dim, slice(a, a + size)) for a, size in zip(starts, sizes, strict=True))


@rule(torch.chunk, Tensor.chunk)
def chunk(x: Uncertain, chunks: int, dim: int = 0) -> tuple[Uncertain, ...]:
    """A tensor cut into equal stretches along an axis."""
    return split(x, -(-x.shape[dim] // chunks), dim)


@rule(torch.unbind, Tensor.unbind)
def unbind(x: Uncertain, dim: int = 0) -> tuple[Uncertain, ...]:
    """The slices of a tensor along an axis, without that axis."""
    return tuple(moved(x, lambda values, i=i: values.select(dim, i)) for i in range(x.shape[dim]))  # type: ignore[misc]


@rule(Tensor.__iter__)
def iterate(x: Uncertain) -> Any:
    """The slices of a tensor along its first axis."""
    return iter(unbind(x))


@rule(torch.cat, torch.concat)
def cat(tensors: Sequence[Any], dim: int = 0) -> Uncertain:
    """Uncertain and known parts in one tensor."""
    tensors = [x for x in tensors if isinstance(x, Uncertain) or x.numel()]  # an empty part: a cache not yet filled
    x = first_uncertain(*tensors)
    if len(tensors) == 1:
        return x
    m = torch.cat([mean_of(part) for part in tensors], dim)
    axis = dim % m.dim()
    if not any(isinstance(part, Uncertain) and part.full for part in tensors):
        return x.like(m, torch.cat([_variances(part, x) for part in tensors], axis))
    spreads = [_covariances(part, x) for part in tensors]
    if axis < m.dim() - 1:
        return x.like(m, torch.cat(spreads, axis))
    return x.like(m, _blocks(spreads))


@rule(torch.stack)
def stack(tensors: Sequence[Any], dim: int = 0) -> Uncertain:
    """As a concatenation along a new axis."""
    return cat([x.unsqueeze(dim) for x in tensors], dim)


def _blocks(spreads: Sequence[Tensor]) -> Tensor:
    """Covariances of vectors put end to end, taken as independent."""
    total, start, found = sum(v.shape[-1] for v in spreads), 0, []
    for v in spreads:
        d = v.shape[-1]
        found.append(torch.nn.functional.pad(v, (start, total - start - d)))
        start += d
    return torch.cat(found, -2)


def _variances(x: Any, like: Uncertain) -> Tensor:
    return x.s.expand(x.shape) if isinstance(x, Uncertain) else torch.zeros_like(x, dtype=like.dtype)


def _covariances(x: Any, like: Uncertain) -> Tensor:
    return torch.diag_embed(torch.zeros_like(x, dtype=like.dtype)) if not isinstance(x, Uncertain) else x.S


@rule(torch.masked_fill, Tensor.masked_fill)
def masked_fill(x: Uncertain, mask: Tensor, value: Any) -> Uncertain:
    """The input with known values where the mask is True: they have no spread."""
    found = x.like(x.m.masked_fill(mask, value), then(x, lambda v: keep(v, ~mask, x.m)))
    found.scores = x.scores
    return found


@rule(torch.where, Tensor.where)
def where(condition: Tensor, input: Any, other: Any) -> Uncertain:
    """Each value from one of two tensors, with its spread."""
    x = first_uncertain(input, other)
    m = torch.where(condition, mean_of(input), mean_of(other))
    parts = [keep(p.v, c, m) for p, c in ((input, condition), (other, ~condition)) if isinstance(p, Uncertain)]
    return x.like(m, parts[0] if len(parts) == 1 else parts[0] + parts[1])


def keep(v: Tensor, mask: Tensor, m: Tensor) -> Tensor:
    """The spread where the mask is True, else 0."""
    if v.dim() > m.dim():
        return v * (mask.unsqueeze(-1) & mask.unsqueeze(-2)) if mask.dim() else v * mask
    return v * mask


@rule(Tensor.__setitem__)
def setitem(x: Any, index: Any, value: Any) -> None:
    """Values put in place; a known tensor cannot become uncertain in place."""
    if not isinstance(x, Uncertain):
        raise TypeError("an uncertain value was written into a known tensor in place; build the tensor by torch.cat.")
    m, s = x.m.clone(), x.s.clone()
    m[index] = mean_of(value)
    s[index] = value.s if isinstance(value, Uncertain) else 0.0
    x.become(x.like(m, s))


@rule(Tensor.to, Tensor.type)
def convert(x: Any, *args: Any, **kwargs: Any) -> Any:
    """The input in another dtype or on another device, mean and spread alike."""
    if not isinstance(x, Uncertain):
        return x.to(*[mean_of(a) for a in args], **kwargs)
    m = x.m.to(*[mean_of(a) for a in args], **kwargs)
    if m is x.m:
        return x
    found = x.like(m, then(x, lambda v: v.to(m.device, m.dtype)))
    found.scores = x.scores
    return found


@rule(Tensor.type_as)
def type_as(x: Any, other: Any) -> Any:
    """The input in the dtype of another tensor."""
    return convert(x, other.dtype)


rule(Tensor.float)(lambda x: convert(x, torch.float32))
rule(Tensor.double)(lambda x: convert(x, torch.float64))


def _check_structure(x: Uncertain) -> None:
    if x.structure is not None and x.settings.correlations == "error":
        raise ValueError(
            "a weight matrix with correlated entries must be used whole, by rows or transposed; the model reshapes it "
            f"(shape {tuple(x.shape)}). Use correlations='drop' to go on with its variances alone."
        )


_register_moves()
