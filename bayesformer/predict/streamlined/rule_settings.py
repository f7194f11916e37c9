"""Which rule of streamlined prediction is used, and how much work it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Rule: TypeAlias = Literal["closed", "exact", "leading", "draws"]
"""How a covariance of outputs is found; see the package."""
Choice: TypeAlias = Literal["auto", "exact", "leading", "draws"]
ROWS = 3


@dataclass(frozen=True)
class RuleSettings:
    """Choices of streamlined prediction; the defaults are right in size on the networks that were measured."""

    rule: Choice = "auto"
    """"auto": by the outputs and positions of an example, and by the calibration. "exact": a backward pass per output
    and position. "leading": outputs at one position by regression on a few. "draws": few draws and the pattern"""
    outputs: int = ROWS
    """K, backward passes of the rule "leading": the error of single variances falls with it, the cost rises"""
    draws: int | None = None
    """draws of the weights of the rule "draws"; 4 by default, 16 where a linearised network is far from draws"""

    def __post_init__(self) -> None:
        if self.rule not in get_args(Choice):
            raise ValueError(f"rule must be one of {', '.join(map(repr, get_args(Choice)))}; got {self.rule!r}.")
        for name in ("outputs", "draws"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number, at least 1; got {value!r}.")
