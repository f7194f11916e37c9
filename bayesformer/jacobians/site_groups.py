"""Sites of one parameter that must be added up before anything is squared.

A parameter used in several places has the sum of its sites' gradients, cross terms included. Sites that see
separate stretches of it (query and key rows of a packed weight) have none and are apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer.jacobians.sites import EVERY, EmbeddingSite, LinearSite, Site


class SiteGroup(NamedTuple):
    """Sites that see the same numbers of one parameter."""

    name: str
    stretch: slice  # of the flat parameter
    numbers: list[int]  # places of its sites among those of a pass
    kind: str  # "linear", "embedding" or "tied" (both) if all sites see the whole stretch, or "other"
    direct: list[bool]  # which sites see the whole stretch
    sites: Sequence[Site] = ()  # the rest is the same in all passes

    @property
    def size(self) -> int:
        """How many numbers of the parameter the stretch has."""
        return self.stretch.stop - self.stretch.start

    @property
    def key(self) -> tuple[str, int, int]:
        """The parameter and the stretch, to remember it by."""
        return self.name, self.stretch.start, self.stretch.stop

    def pick(self, gradients: list[Tensor]) -> list[Tensor]:
        """The gradients of this group's sites, from those of all sites of a pass."""
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
        for site, g, direct in zip(self.sites, gradients, self.direct, strict=True):
            values = site.values(g, examples) if direct else self._whole(site, g, examples)
            total = values if total is None else total + values
        assert total is not None
        return total

    def _whole(self, site: Site, g: Tensor, examples: slice) -> Tensor:
        found = site.per_example(g, examples)
        return found.reshape(*found.shape[:2], -1)[..., self.stretch]


class SiteSignature(NamedTuple):
    """What of a site decides its group."""

    name: str
    size: int  # of the parameter
    ends: tuple[int, int] | None
    kind: str
    turned: bool


def site_groups(sites: list[Site]) -> list[SiteGroup]:
    """All sites of a pass, by parameter and stretch."""
    signs = tuple(
        SiteSignature(
            site.name, site.part.size, site.part.ends, site.kind, isinstance(site, LinearSite) and site.turned
        )
        for site in sites
    )
    return [group._replace(sites=[sites[i] for i in group.numbers]) for group in _without_sites(signs)]


@lru_cache(maxsize=16)  # passes differ in nothing but their tensors, most of the time
def _without_sites(signs: tuple[SiteSignature, ...]) -> list[SiteGroup]:
    names: dict[str, list[int]] = {}
    for i, sign in enumerate(signs):
        names.setdefault(sign.name, []).append(i)
    found = []
    for name, numbers in names.items():
        for ends, members in _stretches([signs[i] for i in numbers]):
            chosen = [numbers[m] for m in members]
            direct = [signs[i].ends == ends for i in chosen]
            found.append(SiteGroup(name, slice(*ends), chosen, _kind([signs[i] for i in chosen], direct), direct))
    return found


def _kind(signs: list[SiteSignature], direct: list[bool]) -> str:
    kinds = {sign.kind for sign in signs}
    orders = {sign.turned for sign in signs if sign.kind == "linear"}
    if len(orders) > 1 or not kinds <= {"linear", "embedding"} or not all(direct):
        return "other"
    if kinds == {"linear", "embedding"}:
        return "other" if True in orders else "tied"
    return kinds.pop()


def _stretches(signs: list[SiteSignature]) -> list[tuple[tuple[int, int], list[int]]]:
    """Disjoint stretches with the parts that lie in them; the whole parameter if they overlap otherwise."""
    whole = [((0, signs[0].size), list(range(len(signs))))]
    grouped: dict[tuple[int, int], list[int]] = {}
    for i, sign in enumerate(signs):
        if sign.ends is None:
            return whole
        grouped.setdefault(sign.ends, []).append(i)
    ends = sorted(grouped)
    if any(a[1] > b[0] for a, b in pairwise(ends)):
        return whole
    return [(end, grouped[end]) for end in ends]
