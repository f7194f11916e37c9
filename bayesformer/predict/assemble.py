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

PASS_NUMBERS = 2**22  # output numbers of one pass, 16 MiB in float32, of which a few tensors are in memory
LEAST_NUMBERS = 2**18  # below which passes only become slower
PASSES = 64  # that a large result takes at least, so that one pass is small beside it
ROUND = 4096  # examples for which the weights of every draw are loaded once
ROUND_NUMBERS = 2**24  # numbers of a result that comes in parts, 64 MiB in float32


def assemble(sampler: Sampler, batches: Iterable[Inputs], convert: Convert, count: int | None = None) -> Params:
    """The tensors of a result over all batches, (L, N, ...) each; batches are read as they are needed.

    With `count`, the number of examples, they are allocated once. Where batches have outputs of unequal lengths
    (L, B, T, ...), positions beyond a batch's own length are NaN.
    """
    result = _Result(sampler.count, count or 0)
    for some in _rounds(batches):
        result.add(sampler, some, convert)
    return result.tensors()


def rounds_of(sampler: Sampler, batches: Iterable[Inputs], convert: Convert, examples: int = ROUND) -> Iterator[Params]:
    """The tensors of a result for about so many examples at a time: for results that are reduced as they come."""
    for some in _rounds(batches, examples):
        yield assemble(sampler, some, convert, sum(len(first_tensor(batch)) for batch in some))


def pass_numbers(total: int | None) -> int:
    """Output numbers of one pass, given those of the whole result where that is known."""
    return PASS_NUMBERS if total is None else min(PASS_NUMBERS, max(LEAST_NUMBERS, total // PASSES))


class _Result:
    """Tensors by name, written batch by batch: in memory for as many examples as were announced, and then in parts."""

    def __init__(self, draws: int, count: int) -> None:
        self.draws, self.room = draws, count  # examples that the current part has room for
        self.parts: list[Params] = [{}]
        self.filled = [0]  # examples written into each part

    def add(self, sampler: Sampler, batches: Sequence[Inputs], convert: Convert) -> None:
        """Computes all draws on some batches and writes them."""
        sizes = [len(first_tensor(batch)) for batch in batches]
        if self.filled[-1] + sum(sizes) > self.room:
            self.room = sum(sizes)
            if self.filled[-1]:
                self.parts.append({})
                self.filled.append(0)
        starts = [self.filled[-1] + sum(sizes[:i]) for i in range(len(sizes))]
        for draw, number, outputs in sampler.passes(batches):
            found = convert(outputs)
            del outputs  # before the next pass: a few such tensors count
            while found:
                name, value = found.popitem()
                self._write(name, draw, starts[number], value)
                del value
        self.filled[-1] += sum(sizes)

    def _write(self, name: str, draw: int, start: int, value: Tensor) -> None:
        """Put value (l, B, ...) in its place, which may have become too short for it."""
        part, inner = self.parts[-1], value.shape[2:]
        if name not in part:
            part[name] = value.new_empty(self.draws, self.room, *inner)
        place = part[name]
        if place.shape[2:] != inner:
            _check_lengths(name, place.shape, value.shape)
            if inner[0] > place.shape[2]:
                place = part[name] = _longer(place, inner[0])
            place[draw : draw + len(value), start : start + value.shape[1], inner[0] :] = torch.nan
            place = place[:, :, : inner[0]]
        place[draw : draw + len(value), start : start + value.shape[1]] = value

    def tensors(self) -> Params:
        """The result; parts are given up as they are copied, so that the whole is in memory about once."""
        if not self.filled[0]:
            raise ValueError("inputs must have at least one example; got none.")
        if len(self.parts) == 1:
            return {name: value[:, : self.filled[0]] for name, value in self.parts[0].items()}
        return {name: self._joined(name) for name in list(self.parts[0])}

    def _joined(self, name: str) -> Tensor:
        first, total = self.parts[0][name], sum(self.filled)
        inner = list(first.shape[2:])
        if inner:
            inner[0] = max(part[name].shape[2] for part in self.parts)
        whole, start = first.new_empty(self.draws, total, *inner), 0
        del first
        for part, filled in zip(self.parts, self.filled, strict=True):
            value = part.pop(name)[:, :filled]
            if inner and value.shape[2] < inner[0]:
                value = _longer(value, inner[0])
            whole[:, start : start + filled] = value
            start += filled
        return whole


def _longer(value: Tensor, length: int) -> Tensor:
    """The tensor (L, N, T, ...) with NaN in positions from T up to `length`."""
    grown = value.new_full((*value.shape[:2], length, *value.shape[3:]), torch.nan)
    grown[:, :, : value.shape[2]] = value
    return grown


def _check_lengths(name: str, there: torch.Size, here: torch.Size) -> None:
    if len(there) != len(here) or len(here) < 4 or there[3:] != here[3:]:
        raise ValueError(
            "outputs of all batches must have one shape, but for the number of positions; "
            f"got {tuple(there[2:])} and {tuple(here[2:])} per example ({name})."
        )


def _rounds(batches: Iterable[Inputs], examples: int = ROUND) -> Iterator[list[Inputs]]:
    """Batches in groups of at least so many examples."""
    some: list[Inputs] = []
    count = 0
    for batch in batches:
        some.append(batch)
        count += len(first_tensor(batch))
        if count >= examples:
            yield some
            some, count = [], 0
    if some:
        yield some


def tensors_of(predictive: Any) -> Params:
    """The tensors of a predictive by the names of its fields; those that are None are left out."""
    if not is_dataclass(predictive):
        raise ValueError(f"a predictive must be a dataclass of tensors (L, B, ...); got {type(predictive).__name__}.")
    found = {field.name: getattr(predictive, field.name) for field in fields(predictive)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}
