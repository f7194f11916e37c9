"""The ways from weights to outputs, by name."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from bayesformer.core.errors import unknown_name

Way: TypeAlias = Literal["sampled", "linearised", "streamlined", "one_pass"]
"""From weights to outputs: a forward pass per draw of the weights; the network made linear in its weights, whose
outputs are Gaussian; the same for a few passes, with the pattern over outputs calibrated beforehand; or moments carried
through one forward pass, which are far too small on trained transformers."""
WAYS: tuple[str, ...] = get_args(Way)


def check_way(way: str) -> None:
    """Refuse a way to outputs that does not exist."""
    if way not in WAYS:
        raise unknown_name("predictive", way, WAYS)
