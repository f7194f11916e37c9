"""From passes over draws and batches to one result, each pass written straight into its place.

A result is a few tensors (L, N, ...) by name. They are allocated once; beyond them only the outputs of one pass are in
memory, of so few examples that these are small as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bayesformer.core.types import Inputs, Params
from bayesformer.data.inputs import first_tensor
from bayesformer.predict.sampled import Sampler

Convert: TypeAlias = Callable[[Tensor], Params]
"""From outputs of some draws (l, B, ...) to the tensors of a result (l, B, ...), by name."""

PASS_NUMBERS = 2**22  # output numbers of one pass, 16 MiB in float32
ROUND = 4096  # examples for which the weights of every draw are loaded once


def assemble(sampler: Sampler, batches: Iterable[Inputs], convert: Convert) -> Params:
    """The tensors of a result over all batches, (L, N, ...) each; batches are read as they are needed."""
    parts = [_round(sampler, some, convert) for some in _rounds(batches)]
    if not parts:
        raise ValueError("inputs must have at least one example; got none.")
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part.pop(name) for part in parts], 1) for name in list(parts[0])}


def rounds_of(sampler: Sampler, batches: Iterable[Inputs], convert: Convert) -> Iterator[Params]:
    """The same a few thousand examples at a time, for results that are reduced as they come."""
    for some in _rounds(batches):
        yield _round(sampler, some, convert)


def _round(sampler: Sampler, batches: Sequence[Inputs], convert: Convert) -> Params:
    """All draws on some batches, (L, n, ...) each."""
    sizes = [len(first_tensor(batch)) for batch in batches]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    result: Params = {}
    for draw, number, outputs in sampler.passes(batches):
        for name, value in convert(outputs).items():
            if name not in result:
                shape = (sampler.count, sum(sizes), *value.shape[2:])
                result[name] = torch.empty(shape, dtype=value.dtype, device=value.device)
            place = slice(starts[number], starts[number] + sizes[number])
            result[name][draw : draw + len(value), place] = value
    return result


def _rounds(batches: Iterable[Inputs]) -> Iterator[list[Inputs]]:
    """Batches in groups of some thousand examples."""
    some: list[Inputs] = []
    count = 0
    for batch in batches:
        some.append(batch)
        count += len(first_tensor(batch))
        if count >= ROUND:
            yield some
            some, count = [], 0
    if some:
        yield some


def batch_size_for(outputs: Tensor, wanted: int) -> int:
    """Examples per pass, given the outputs (l, B, ...) of a trial: few where one example has many numbers."""
    per_example = max(1, outputs[0, 0].numel())
    return max(1, min(wanted, PASS_NUMBERS // per_example))


def tensors_of(predictive: Any) -> Params:
    """The tensors of a predictive by the names of its fields; those that are None are left out."""
    if not is_dataclass(predictive):
        raise ValueError(f"a predictive must be a dataclass of tensors (L, B, ...); got {type(predictive).__name__}.")
    found = {field.name: getattr(predictive, field.name) for field in fields(predictive)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}
