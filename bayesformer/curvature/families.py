"""Sites of one parameter that must be added up before anything is squared.

A parameter used in several places has the sum of its sites' gradients, cross terms included. Sites that see
separate stretches of it (query and key rows of a packed weight) have none and are apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from bayesformer.curvature.sites import EVERY, EmbeddingSite, LinearSite, Part, Site


@dataclass(frozen=True)
class Family:
    """Sites that see the same numbers of one parameter; `numbers` are their places among the sites of a pass."""

    name: str
    stretch: slice  # of the flat parameter
    sites: list[Site]
    numbers: list[int]

    @property
    def size(self) -> int:
        """Numbers of the stretch."""
        return self.stretch.stop - self.stretch.start

    @property
    def key(self) -> tuple[str, int, int]:
        """The parameter and the stretch, to remember it by."""
        return self.name, self.stretch.start, self.stretch.stop

    @cached_property
    def kind(self) -> str:
        """ "linear", "embedding" or "tied" (both) if all sites see the whole stretch, or "other"."""
        kinds = {site.kind for site in self.sites}
        orders = {site.turned for site in self.sites if isinstance(site, LinearSite)}
        if len(orders) > 1 or not kinds <= {"linear", "embedding"} or not all(self._direct):
            return "other"
        if kinds == {"linear", "embedding"}:
            return "other" if True in orders else "tied"
        return kinds.pop()

    def pick(self, gradients: list[Tensor]) -> list[Tensor]:
        """The gradients of these sites."""
        return [gradients[i] for i in self.numbers]

    def linear(self) -> list[int]:
        """Which of the sites are linear."""
        return [i for i, site in enumerate(self.sites) if isinstance(site, LinearSite)]

    def inputs(self) -> Tensor:
        """(B, R, in): inputs of the linear sites. Two uses are one use at more positions."""
        found = [site.inputs for site in self.sites if isinstance(site, LinearSite)]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def tokens(self) -> Tensor:
        """(B, R): tokens of the embedding sites."""
        found = [site.tokens for site in self.sites if isinstance(site, EmbeddingSite)]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def gradient(self, gradients: list[Tensor], kind: str) -> Tensor:
        """(S, B, R, out) of the sites of one kind, positions joined; `gradients` as `pick` gives them."""
        found = [g for site, g in zip(self.sites, gradients, strict=True) if site.kind == kind]
        return found[0] if len(found) == 1 else torch.cat(found, 2)

    def per_example(self, gradients: list[Tensor], examples: slice = EVERY) -> Tensor:
        """(S, B, numbers of the stretch): the sum over the sites."""
        total: Tensor | None = None
        for site, g, direct in zip(self.sites, gradients, self._direct, strict=True):
            values = site.values(g, examples) if direct else self._whole(site, g, examples)
            total = values if total is None else total + values
        assert total is not None
        return total

    @cached_property
    def _direct(self) -> list[bool]:
        return [site.part.stretch() == self.stretch for site in self.sites]

    def _whole(self, site: Site, g: Tensor, examples: slice) -> Tensor:
        return site.per_example(g, examples).flatten(2)[..., self.stretch]


def families(sites: list[Site]) -> list[Family]:
    """All sites of a pass, by parameter and stretch."""
    names: dict[str, list[int]] = {}
    for i, site in enumerate(sites):
        names.setdefault(site.name, []).append(i)
    found = []
    for name, numbers in names.items():
        parts = [sites[i].part for i in numbers]
        for stretch, members in _stretches(parts):
            chosen = [numbers[m] for m in members]
            found.append(Family(name, stretch, [sites[i] for i in chosen], chosen))
    return found


def _stretches(parts: list[Part]) -> list[tuple[slice, list[int]]]:
    """Disjoint stretches with the parts that lie in them; the whole parameter if they overlap otherwise."""
    grouped: dict[tuple[int, int], list[int]] = {}
    for i, part in enumerate(parts):
        stretch = part.stretch()
        if stretch is None:
            return [(slice(0, part.size), list(range(len(parts))))]
        grouped.setdefault((stretch.start, stretch.stop), []).append(i)
    ends = sorted(grouped)
    if any(a[1] > b[0] for a, b in pairwise(ends)):
        return [(slice(0, parts[0].size), list(range(len(parts))))]
    return [(slice(*end), grouped[end]) for end in ends]
