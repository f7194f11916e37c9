"""Which weights of a model are inferred, by name, and where each lies in one vector θ (P,)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bayesformer.core.types import Params
from bayesformer.model.adapters import adapters_of
from bayesformer.model.admission import refuse_inferred, refuse_tensor, unwrap, view_key

Choice: TypeAlias = str | Iterable[str] | Callable[[str, Tensor], bool] | None
"""How weights are chosen: a pattern as of a shell (`*.bias`), several, a predicate (name, weight) -> bool, or None."""

SAY_WHICH = "Say which weights are inferred by infer=."

Others: TypeAlias = Mapping[str, tuple[str, ...]]
"""The first name of every weight and its other names."""


@dataclass(frozen=True)
class Space:
    """Names and shapes of the inferred weights in the order in which they lie in θ (P,).

    Tied weights appear once, under the first of their names. A Space is a value: it is compared by content, can be
    a key of a dict, and is remembered in files by `to_json`.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32  # of θ: float64 if an inferred weight is, else float32
    aliases: tuple[tuple[str, ...], ...] = field(default=(), compare=False, repr=False)  # per name, its other names

    @classmethod
    def of(cls, model: nn.Module, infer: Choice = None) -> Space:
        """The Space of a model's weights that `infer` chooses; None chooses those that require a gradient."""
        groups = _tied(unwrap(model))
        names = {group[0]: (*group[1:],) for group, _ in groups}
        weights = {group[0]: weight for group, weight in groups}
        if infer is None:
            chosen = [name for name, weight in weights.items() if weight.requires_grad]
            if not chosen:
                disabled = any(disabled for *_, disabled in adapters_of(model))
                way = "Its adapters are disabled: call enable_adapter_layers()." if disabled else SAY_WHICH
                raise ValueError(f"model must have at least one parameter with requires_grad=True; it has none. {way}")
        else:
            chosen = _choose(infer, names, weights, "infer")
        for name in chosen:
            refuse_tensor(weights[name], name)
            refuse_inferred(weights[name], name)
        double = any(weights[name].dtype == torch.float64 for name in chosen)
        return cls(
            tuple(chosen),
            tuple(tuple(weights[name].shape) for name in chosen),
            torch.float64 if double else torch.float32,
            tuple(names[name] for name in chosen),
        )

    @property
    def sizes(self) -> list[int]:
        """How many numbers each weight has."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        """P, how many numbers all weights have together."""
        return sum(self.sizes)

    @property
    def slices(self) -> dict[str, slice]:
        """Where each weight lies in θ, by name."""
        ends = list(accumulate(self.sizes, initial=0))
        return {name: slice(start, stop) for name, start, stop in zip(self.names, ends[:-1], ends[1:], strict=True)}

    def select(self, subset: Choice, label: str = "subset") -> Space:
        """The smaller Space that `subset` chooses, in the order of this one; None chooses all.

        A predicate is asked with the name and a tensor of that shape and dtype that has no values.
        """
        if subset is None:
            return self
        stand_ins = {
            name: torch.empty(shape, dtype=self.dtype, device="meta")
            for name, shape in zip(self.names, self.shapes, strict=True)
        }
        return self._only(set(_choose(subset, dict(zip(self.names, self._others(), strict=True)), stand_ins, label)))

    def without(self, other: Space) -> Space:
        """The weights of this Space that are not in `other`; it may be empty."""
        self._contains(other)
        return self._only(set(self.names) - set(other.names))

    def places(self, sub: Space, device: torch.device | str = "cpu") -> slice | Tensor:
        """Where the numbers of `sub` lie in θ: a slice if they are neighbours, else an index (Q,) int64 on `device`."""
        self._contains(sub)
        if not sub.names:
            return slice(0, 0)
        slices = self.slices
        parts = [slices[name] for name in sub.names]
        if all(before.stop == after.start for before, after in pairwise(parts)):
            return slice(parts[0].start, parts[-1].stop)
        return torch.cat([torch.arange(part.start, part.stop, device=device) for part in parts])

    def views(self, flat: Tensor) -> Params:
        """Weights by name as views of a vector (P,), or of a matrix (L, P) with the member axis kept in front."""
        if flat.shape[-1] != self.size:
            raise ValueError(f"flat must end in an axis of {self.size} numbers; got shape {tuple(flat.shape)}.")
        parts = flat.split(self.sizes, -1)
        named = zip(self.names, parts, self.shapes, strict=True)
        return {name: part.view((*flat.shape[:-1], *shape)) for name, part, shape in named}

    def pack(self, params: Mapping[str, Tensor]) -> Tensor:
        """(P,): the weights of these names as one new vector of this Space's dtype, on the first one's device."""
        missing = [name for name in self.names if name not in params]
        if missing:
            raise ValueError(f"params must hold every weight of the space; {missing[0]} is missing.")
        for name, shape in zip(self.names, self.shapes, strict=True):
            if tuple(params[name].shape) != shape:
                raise ValueError(
                    f"params must have the space's shapes; {name} is {tuple(params[name].shape)}, not {shape}."
                )
        if not self.names:
            raise ValueError("a space without weights has no vector; choose at least one weight.")
        flat = torch.empty(self.size, dtype=self.dtype, device=params[self.names[0]].device)
        for name, place in self.views(flat).items():
            place.copy_(params[name].detach())
        return flat

    def to_json(self) -> dict[str, Any]:
        """The Space as plain lists and strings, for a file."""
        return {
            "names": list(self.names),
            "shapes": [list(shape) for shape in self.shapes],
            "dtype": str(self.dtype).removeprefix("torch."),
            "aliases": [list(names) for names in self._others()],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Space:
        """The Space that `to_json` wrote down."""
        if record.get("dtype") not in ("float32", "float64"):
            raise ValueError(f"dtype of a saved space must be float32 or float64; got {record.get('dtype')!r}.")
        return cls(
            tuple(record["names"]),
            tuple(tuple(shape) for shape in record["shapes"]),
            getattr(torch, record["dtype"]),
            tuple(tuple(names) for names in record.get("aliases", ())),
        )

    def _others(self) -> tuple[tuple[str, ...], ...]:
        return self.aliases or ((),) * len(self.names)

    def _only(self, keep: set[str]) -> Space:
        rows = zip(self.names, self.shapes, self._others(), strict=True)
        kept = [row for row in rows if row[0] in keep]
        names, shapes, aliases = zip(*kept, strict=True) if kept else ((), (), ())
        return Space(names, shapes, self.dtype, aliases)

    def _contains(self, other: Space) -> None:
        shapes = dict(zip(self.names, self.shapes, strict=True))
        for name, shape in zip(other.names, other.shapes, strict=True):
            if name not in shapes:
                raise ValueError(f"the smaller space must lie in this one; {name} is not in it.")
            if shapes[name] != shape:
                raise ValueError(
                    f"the smaller space must have this one's shapes; {name} is {shape}, not {shapes[name]}."
                )


def _tied(model: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Every weight with all its names, first name first; two Parameters that are one view of one memory are tied."""
    groups = dict[Any, tuple[list[str], nn.Parameter]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        refuse_tensor(parameter, name)
        groups.setdefault(view_key(parameter), ([], parameter))[0].append(name)
    return list(groups.values())


def _choose(choice: Choice, names: Others, weights: Mapping[str, Tensor], label: str) -> list[str]:
    """First names of the chosen weights, in the model's order."""
    if isinstance(choice, nn.Module):
        raise ValueError(
            f"{label} must be a pattern of names, several or a predicate; got a module, {type(choice).__name__}. "
            "Give the names of its weights, for example 'head.*'."
        )
    if callable(choice):
        chosen = {name for name, others in names.items() if any(choice(n, weights[name]) for n in (name, *others))}
        if not chosen:
            raise ValueError(f"{label} must choose at least one weight; the predicate chose none of {len(names)}.")
    else:
        if choice is not None and not isinstance(choice, str | Iterable):
            raise ValueError(
                f"{label} must be a pattern, several, or a function (name, weight) -> bool; got {choice!r}."
            )
        patterns = [choice] if isinstance(choice, str) else list(choice or ())
        if not patterns:
            raise ValueError(f"{label} must name at least one pattern; got an empty {type(choice).__name__}.")
        chosen = set().union(*(_matches(pattern, names, label) for pattern in patterns))
    return [name for name in names if name in chosen]


def _matches(pattern: str, names: Others, label: str) -> set[str]:
    if not isinstance(pattern, str):
        raise TypeError(f"{label} must be a pattern, several, or a predicate; got {type(pattern).__name__} among them.")
    every = {n: name for name, others in names.items() for n in (name, *others)}
    found = {name for n, name in every.items() if n == pattern or fnmatchcase(n, pattern)}
    if not found:
        near = difflib.get_close_matches(pattern, every, n=3, cutoff=0.0)
        raise ValueError(
            f"{label}={pattern!r} matches no weight. Nearest names: {', '.join(near) or 'there are none'}."
        )
    return found
