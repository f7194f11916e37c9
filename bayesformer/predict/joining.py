"""Gaussian outputs of batches as those of all examples, each batch written straight into its place."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bayesformer.core.types import GaussianOutputs


class NotFiniteError(ValueError):
    """Outputs or their variances are NaN or infinite; nothing that was computed from them is given to anybody."""


def join_outputs(parts: Iterable[GaussianOutputs], num_data: int | None = None) -> GaussianOutputs:
    """Batches end to end, read as they are needed.

    Where the number of examples is known, the result is allocated once and no batch is held beside it.
    """
    pieces = (_finite(part) for part in parts)
    first = next(pieces, None)
    if first is None:
        raise ValueError("inputs must have at least one example; got none.")
    if num_data is None:
        return _end_to_end([first, *pieces])
    if len(first.mean) >= num_data:
        return first  # and no copy of what may be large
    result = GaussianOutputs(*(None if x is None else x.new_empty(num_data, *x.shape[1:]) for x in first))  # type: ignore[arg-type]
    done = _write(result, first, 0)
    for piece in pieces:
        done = _write(result, piece, done)
    return result if done == num_data else GaussianOutputs(*(None if x is None else x[:done] for x in result))  # type: ignore[arg-type]


def _finite(part: GaussianOutputs) -> GaussianOutputs:
    for what, values in (("mean", part.mean), ("variance", part.diagonal), ("variance", part.factor)):
        # A finite sum has finite terms; only where it is not does every number need to be looked at.
        if values is None or bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all()):
            continue
        bad = int((~torch.isfinite(values)).flatten(1).any(1).sum())
        raise NotFiniteError(
            f"outputs must be finite; {bad} of {len(values)} examples have NaN or infinite values in their {what}. Are "
            "the model's own outputs finite on them? A very wide posterior may overflow: use predictive='sampled'."
        )
    return part


def _write(result: GaussianOutputs, piece: GaussianOutputs, start: int) -> int:
    stop = start + len(piece.mean)
    for target, source in zip(result, piece, strict=True):
        if target is None or source is None:
            continue
        _check_shape(target, source)
        target[start:stop] = source
    return stop


def _end_to_end(parts: list[GaussianOutputs]) -> GaussianOutputs:
    if len(parts) == 1:
        return parts[0]
    for part in parts[1:]:
        _check_shape(parts[0].mean, part.mean)
    factors = [part.factor for part in parts if part.factor is not None]
    return GaussianOutputs(
        torch.cat([part.mean for part in parts]),
        torch.cat([part.diagonal for part in parts]),
        torch.cat(factors) if factors else None,
    )


def _check_shape(first: Tensor, other: Tensor) -> None:
    if first.shape[1:] != other.shape[1:]:
        raise ValueError(
            "inputs must give outputs of one shape in all batches to be one Gaussian; got "
            f"{tuple(first.shape[1:])} and {tuple(other.shape[1:])}. Pad sequences to one length, or predict by batch."
        )
