"""What streamlined prediction learns once from a few inputs, and keeps with the posterior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

import torch
from torch import Tensor

from bayesformer.core.doubts import Doubt
from bayesformer.core.types import Params
from bayesformer.predict.streamlined.rule_settings import ROWS, Rule

FEW_OUTPUTS = 3  # outputs of an example up to which each has a backward pass of its own
BELIEVED = (0.6, 1.6)  # ratios of variances beyond which a rule is doubted
REACH = 100.0  # how far from those of the calibration variances may be for the slope of kappa to go on
TINY = 1e-30
WIDE_DRAWS = 16  # draws of a rule whose linearised network is beyond them
NUMBERS = ("rule", "kappa", "slope", "level", "lift", "ratio", "rows", "positions", "apart", "wide", "inputs", "draws")
TENSORS = ("root", "rest", "pattern", "pattern_root", "size")


def _empty() -> Tensor:
    return torch.zeros(0, device="cpu")


@dataclass(frozen=True)
class Calibration:
    """The rule for a posterior's outputs, with the numbers that it needs.

    M is the linearised covariance of the outputs, averaged over calibration inputs; where `apart`, without the noise
    of the last layer, which is known in closed form.
    """

    rule: Rule
    kappa: float = 1.0
    """variance of draws over variance of their tangents, the median over inputs and outputs: what linearisation loses
    or adds; covariances of backward rules are multiplied by it"""
    slope: float = 0.0
    """how kappa changes with the linearised variance v of an example, summed over its outputs: kappa (v / level)^slope;
    0 or negative, since outputs saturate where a linear network goes on"""
    level: float = 1.0
    lift: float = 1.0
    """exact linearised variance over that of the rule "leading", the median over inputs and outputs"""
    ratio: float = 1.0
    """self-check: variance by the rule over the mean squared tangents (or deviations) of draws, summed over all"""
    rows: int = ROWS
    """backward passes of the rule "leading" that this was made for"""
    positions: int = 1
    """1, or more where an example has outputs at several positions"""
    apart: bool = False
    wide: bool = False
    """whether draws are used because kappa is out of bounds"""
    inputs: int = 0
    draws: int = 0
    root: Tensor = field(default_factory=_empty)  # L, (C, r): M = L Lᵀ + diag(ρ)
    rest: Tensor = field(default_factory=_empty)  # ρ, (C,)
    pattern: Tensor = field(default_factory=_empty)  # (C,): variances of draws about their mean
    pattern_root: Tensor = field(default_factory=_empty)  # (C, s): the leading part of a root of their covariance
    size: Tensor = field(
        default_factory=_empty
    )  # (): mean squared deviation from the mean weights, summed over outputs

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        """What the calibration found against the posterior's Gaussian outputs; empty if nothing."""
        found = []
        low, high = BELIEVED
        if not low <= self.kappa <= high:
            limit = low if self.kappa < low else high
            found.append(
                Doubt(
                    "linearisation",
                    f"outputs under draws of the weights have {self.kappa:.2g} times the variance of the linearised "
                    f"network (between {low} and {high} is expected): this Gaussian reaches beyond where the network "
                    "is linear in its weights, and its ways of predicting disagree. Streamlined prediction follows the "
                    f"draws, by {WIDE_DRAWS} of them. Where predictive='sampled' scores far below the network itself, "
                    "as posterior.check(data) says, use predictive='linearised' or a larger prior precision.",
                    self.kappa,
                    limit,
                )
            )
        if not low <= self.ratio <= high:
            found.append(
                Doubt(
                    "streamlined",
                    f"streamlined variances are {self.ratio:.2f} times those of draws of the same posterior on "
                    f"{self.inputs} inputs (between {low} and {high} is expected). Use predictive='sampled'.",
                    self.ratio,
                    low if self.ratio < low else high,
                )
            )
        return tuple(found)

    def factor(self, variance: Tensor) -> Tensor:
        """(B,): what linearised covariances are multiplied by, from the variance of every example, summed."""
        away = (variance.clamp_min(TINY) / self.level).clamp(1 / REACH, REACH)
        return self.kappa * away**self.slope

    def facts(self) -> dict[str, Any]:
        """Everything but the tensors, to save as JSON."""
        return {name: getattr(self, name) for name in NUMBERS}

    def tensors(self) -> Params:
        """The tensors by name, as a file stores them."""
        return {name: getattr(self, name).contiguous() for name in TENSORS}

    @classmethod
    def load(cls, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Calibration:
        """The calibration that `facts()` and `tensors()` describe; older ones do not say their number of passes."""
        facts = {"rows": ROWS, **facts}
        if set(facts) != set(NUMBERS) or set(tensors) != set(TENSORS) or facts["rule"] not in get_args(Rule):
            raise ValueError(f"a calibration must have {', '.join((*NUMBERS, *TENSORS))}; got {sorted(facts)}.")
        return cls(**facts, **dict[str, Any](tensors))

    def to(self, like: Tensor) -> Calibration:
        """With tensors of the dtype and on the device of `like`."""
        return replace(self, **{f.name: getattr(self, f.name).to(like) for f in fields(self) if f.name in TENSORS})
