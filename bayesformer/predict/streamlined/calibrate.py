"""Making a calibration: draws of the weights, and their tangents, on a few inputs.

A tangent J (θ_k - θ*) costs a forward pass at θ* + h (θ_k - θ*), less the one at θ*, over h. Draws and tangents of the
same weights err together, so that the ratio of their variances, κ, is known from few. Inputs are split into groups
with draws of their own, where draws are cheap: what draws have by chance then averages out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bayesformer.core.seeds import fold
from bayesformer.core.types import Inputs
from bayesformer.data.inputs import first_tensor, map_inputs
from bayesformer.predict.joining import NotFiniteError
from bayesformer.predict.linearised import UNKNOWN
from bayesformer.predict.streamlined.drawn_passes import DrawnPasses
from bayesformer.predict.streamlined.output_calibration import BELIEVED, Calibration
from bayesformer.predict.streamlined.rule_settings import ROWS, RuleSettings
from bayesformer.predict.streamlined.second_moment import SecondMoment, root_of, variances_of
from bayesformer.predict.streamlined.streamliner import HeadParts, Streamliner

INPUTS = 32  # examples of a calibration
POSITIONS = 8192  # of all examples: fewer examples where each has many
DRAWS = 32
FEWER_DRAWS = 16  # of more weights than `MANY`
MANY = 2**24
GROUPS = 4  # of examples with draws of their own, up to so many weights:
CHEAP = 2**20
STEP = 0.03  # h: small beside the posterior's curvature, large beside rounding in float32
RANK = 32  # columns of the root of M
CORRELATED = 32  # outputs up to which the pattern of draws has correlations
PATTERN_RANK = 8
LEAST = 8  # examples from which a change of kappa can be told
SHRINK = 2.0  # of the sum of squares that the slope is divided by: few or equal examples say little of it
STEEPEST = -0.7
COMPARED = 4096  # numbers of an example's outputs up to which they are compared with draws of all weights
WHOLE = (0.8, 1.25)  # ratios of variances within which the noise of the last layer stays apart
EXACT = 32  # outputs up to which the rule of leading outputs is compared with all backward passes


def calibrate(
    streamliner: Streamliner, inputs: Inputs, seed: int = 0, noisy: bool = False, rows: int = ROWS
) -> Calibration:
    """The calibration of a posterior by at most 32 examples; equal inputs and seeds give equal ones.

    `rows` are the backward passes that the rule "leading" will take: what it leaves out depends on them.
    `noisy` says that passes draw random numbers of their own, so that tangents cannot be had from two of them.
    """
    inputs = map_inputs(inputs, lambda x: x[:INPUTS])
    rule, mean = streamliner.rule_for(inputs)
    count = len(mean)
    _check_finite(mean, "at the mean of the weights")
    if rule == "closed":
        return Calibration(rule, inputs=count, rows=rows)
    backward = rule in ("exact", "leading")
    positions = 1 if mean.dim() == 1 else mean[0].numel() // mean.shape[-1]
    count = max(4, min(count, POSITIONS // positions))
    inputs = map_inputs(inputs, lambda x: x[:count])
    head = None if rule == "exact" else streamliner.head(inputs, backward)
    rounded = bool(streamliner.shell.facts.staged)  # weights in few bits would not move by a small step
    step = 1.0 if noisy or rounded or not backward else STEP
    compared = backward and not noisy
    found = _calibrated(
        streamliner, inputs, Calibration(rule, positions=positions, rows=rows), head, seed, step, compared
    )
    if head is None or mean[0].numel() > COMPARED or _is_whole(streamliner, inputs, found, seed):
        return found
    return _calibrated(
        streamliner, inputs, Calibration(rule, positions=positions, rows=rows), None, seed, step, compared
    )


def _calibrated(
    streamliner: Streamliner,
    inputs: Inputs,
    plan: Calibration,
    head: HeadParts | None,
    seed: int,
    step: float,
    compared: bool,
) -> Calibration:
    """The calibration of a rule, with the noise of the last layer apart if `head` is given.

    `compared` says that outputs of draws are kept, for their variance beside that of the linearised network.
    """
    passes = streamliner.passes_of(head is not None, head)
    seen = DeviationMoments(passes, inputs, seed, step, compared)
    found = replace(
        _patterns(seen, passes),
        rule=plan.rule,
        positions=plan.positions,
        rows=plan.rows,
        apart=head is not None,
        inputs=len(first_tensor(inputs)),
        draws=seen.draws,
    ).to(streamliner.law.mean)
    if plan.rule == "draws":
        return replace(found, ratio=_ratio_of_draws(streamliner, inputs, found))
    claimed = streamliner.linear_variance(inputs, found)  # (B, C)
    exact = claimed if plan.rule == "exact" else _linear_variance(streamliner, inputs, found, seen)
    found = replace(found, lift=_median_ratio(exact, claimed))
    found = replace(found, **seen.kappa(found.lift * claimed.sum(-1), exact))
    if seen.tangents:
        found = replace(found, ratio=found.lift * float(claimed.double().sum()) / float(seen.tangents))
    if BELIEVED[0] <= found.kappa <= BELIEVED[1]:
        return found
    found = replace(found, rule="draws", wide=True)
    return replace(found, ratio=_ratio_of_draws(streamliner, inputs, found))


def _is_whole(streamliner: Streamliner, inputs: Inputs, found: Calibration, seed: int) -> bool:
    """Whether variances with the noise of the last layer apart are those of draws of all weights.

    That noise is taken at the features of the mean, and features vary under the last layer's mean weights: products of
    both are left out. Where the posterior is wide they are most of the variance (50 times the rest on a ReLU network).
    """
    passes = streamliner.passes_of(False)
    mean = passes.at_mean(inputs)
    deviations = passes.deviations(inputs, mean, found.draws, fold(seed, "whole"))
    drawn = torch.stack([real for real, _ in deviations]).var(0)
    claimed = torch.cat(
        [part.variance for part in streamliner.pieces(inputs, found, RuleSettings(outputs=found.rows), UNKNOWN)]
    )
    return WHOLE[0] <= _median_ratio(drawn, claimed) <= WHOLE[1]


def _linear_variance(streamliner: Streamliner, inputs: Inputs, found: Calibration, seen: DeviationMoments) -> Tensor:
    """(B, C): variances of the linearised network without what is apart: exact where a pass per output is cheap."""
    width = len(found.rest)
    if width > EXACT and seen.squares:
        return seen.squared_tangents
    return streamliner.linear_variance(inputs, found, min(width, EXACT))


class DeviationMoments:
    """Second moments of draws and tangents over all calibration inputs, in the signal and per output."""

    def __init__(self, passes: DrawnPasses, inputs: Inputs, seed: int, step: float, compared: bool) -> None:
        self.step, self.compared = step, compared
        weights = passes.law.size
        self.draws = DRAWS if weights <= MANY else FEWER_DRAWS
        count = len(first_tensor(inputs))
        groups = min(GROUPS, count) if weights <= CHEAP else 1
        self.real: SecondMoment | None = None
        self.near: SecondMoment | None = None
        self.drawn: list[Tensor] = []  # variances of draws, (b, S, C), where they are compared
        self.straight: list[Tensor] = []  # of their tangents, where these are not the draws
        self.squares: list[Tensor] = []  # mean squared tangents, (b, S, C)
        for number, some in enumerate(torch.arange(count, device="cpu").tensor_split(groups)):
            group = map_inputs(inputs, lambda x, i=some: x[i.to(x.device)])
            self._add(passes, group, fold(seed, "calibration", number))

    def _add(self, passes: DrawnPasses, inputs: Inputs, seed: int) -> None:
        mean = passes.at_mean(inputs)
        shape = (len(mean.signal), -1, 1 if mean.signal.dim() == 1 else mean.signal.shape[-1])
        signal = mean.signal.reshape(shape)
        if self.real is None:
            self.real, self.near = SecondMoment(signal.shape[-1]), SecondMoment(signal.shape[-1])
        assert self.near is not None
        sums = [torch.zeros_like(signal) for _ in range(2)]
        outputs: list[list[Tensor]] = [[], []]
        for pair in passes.deviations(inputs, mean, self.draws, seed, self.step):
            for moment, own, kept, deviation in zip((self.real, self.near), sums, outputs, pair, strict=True):
                flat = deviation.reshape(shape)
                moment.add(flat, own)
                if self.compared:
                    kept.append(passes.spread(flat))
        for moment, own in zip((self.real, self.near), sums, strict=True):
            moment.close(own, self.draws)
            finite = bool(torch.isfinite(moment.total).all())
            _check_finite(own if finite else torch.full_like(own, torch.nan), "under draws of the weights")
        if not self.compared:
            return
        self.drawn.append(torch.stack(outputs[0]).var(0))
        if self.step != 1.0:
            near = torch.stack(outputs[1])
            self.straight.append(near.var(0))
            self.squares.append(near.square().mean(0))

    def kappa(self, claimed: Tensor, linear: Tensor) -> dict[str, Any]:
        """Variance of draws over that of their tangents: the median over inputs and outputs, and how it changes.

        `claimed` (B,) are the variances that a rule gives the examples, by which the change is described; `linear`
        (B, C) those of the linearised network, which take the place of tangents where there are none.
        """
        if not self.drawn:
            return {}
        real = torch.cat(self.drawn).flatten(1).double()
        near = torch.cat(self.straight).flatten(1).double() if self.straight else linear.double()
        kappa, known = _median_ratio(real, near), (near.sum(-1) > 0) & (claimed > 0)
        if int(known.sum()) < LEAST:
            return {"kappa": kappa}
        x = claimed.double().to(near.device)[known].log()
        y = (real.sum(-1)[known] / near.sum(-1)[known]).log()
        level, away = x.mean(), x - x.mean()
        slope = float((away * y).sum() / (away.square().sum() + SHRINK))
        slope = min(0.0, max(STEEPEST, slope))
        centred = (real[known] / near[known].clamp_min(torch.finfo(near.dtype).tiny)) * (-slope * away).exp()[:, None]
        return {"kappa": float(centred.median()), "slope": slope, "level": float(level.exp())}

    @property
    def squared_tangents(self) -> Tensor:
        """(B, C): the mean over draws, of outputs at one position."""
        return torch.cat(self.squares).flatten(1)

    @property
    def tangents(self) -> float:
        """Mean squared tangents, summed over all outputs; 0 where none were made."""
        return float(self.squared_tangents.double().sum()) if self.squares else 0.0


def _median_ratio(above: Tensor, below: Tensor) -> float:
    """The median of the ratios of two tensors of one shape where the second is not 0; 1 if it is nowhere."""
    known = below > 0
    return float((above[known] / below[known]).median()) if bool(known.any()) else 1.0


def _patterns(seen: DeviationMoments, passes: DrawnPasses) -> Calibration:
    """Root and rest of M from the tangents; size and pattern from the draws."""
    assert seen.real is not None
    assert seen.near is not None
    weight = None if passes.head is None else passes.weight
    average = seen.near.about_zero(seen.draws)
    root = root_of(average, weight)
    variances = variances_of(average, root)
    central = seen.real.central(seen.draws)
    whole = root_of(central, weight)
    pattern = variances_of(central, whole).clamp_min(0)
    about_zero = seen.real.about_zero(seen.draws)
    size = variances_of(about_zero, root_of(about_zero, weight)).sum()
    few = PATTERN_RANK if len(pattern) <= CORRELATED else 0
    return Calibration(
        rule="draws",
        root=root[:, :RANK],
        rest=(variances - root[:, :RANK].square().sum(-1)).clamp_min(0),
        pattern=pattern,
        pattern_root=whole[:, :few],
        size=size,
    )


def _ratio_of_draws(streamliner: Streamliner, inputs: Inputs, found: Calibration) -> float:
    """The size that the rule's own few draws have, over that of the calibration."""
    if not float(found.size):
        return 1.0
    return float((streamliner.drawn_sizes(inputs, found) / found.size).mean())


def _check_finite(values: Tensor, where: str) -> None:
    if bool(torch.isfinite(values).all()):
        return
    bad = int((~torch.isfinite(values)).flatten(1 if values.dim() > 1 else 0).any(-1).sum())
    raise NotFiniteError(
        f"outputs must be finite; {bad} of {len(values)} examples have NaN or infinite values {where}. Are the model's "
        "own outputs finite on them? A very wide posterior may overflow: use predictive='sampled'."
    )
