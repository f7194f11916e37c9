"""Gaussian outputs by the rule that a calibration has chosen: see the package for the rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bayesformer.core.types import GaussianOutputs, Inputs
from bayesformer.data.inputs import map_inputs
from bayesformer.jacobians.capture import backpropagate
from bayesformer.jacobians.sites import slope_numbers
from bayesformer.laws import Law
from bayesformer.model.shell import Shell
from bayesformer.predict.covariance_roots import gram
from bayesformer.predict.head import HeadCovariance, block_variance, features_of
from bayesformer.predict.joining import join_outputs
from bayesformer.predict.linearised import SLOPES, UNKNOWN, BatchSites, Linearised, factor_rank, last_linear
from bayesformer.predict.streamlined.drawn_passes import RULE_SEED, DrawnPasses, MeanPass
from bayesformer.predict.streamlined.leading_outputs import LeadingOutputs, OutputCovariance
from bayesformer.predict.streamlined.output_calibration import FEW_OUTPUTS, TINY, WIDE_DRAWS, Calibration
from bayesformer.predict.streamlined.rule_settings import Rule, RuleSettings

DRAWS = 4  # of the rule "draws"


class HeadParts(NamedTuple):
    """The last linear layer where its noise can be told from all other noise."""

    module: nn.Linear
    names: frozenset[str]  # of its parameters


class Streamliner:
    """A shell at the mean of a Gaussian over its weights, in evaluation mode. One thread may use it at a time."""

    def __init__(self, shell: Shell, law: Law) -> None:
        self.shell, self.law = shell, law
        self.linearised = Linearised(shell.module, shell.space, law)
        self.made: tuple[Calibration, int, LeadingOutputs] | None = None  # of the calibration last used
        self.heads: dict[bool, HeadParts | None] = {}
        self.passes: dict[bool, DrawnPasses] = {}

    def over(
        self,
        batches: Iterable[Inputs],
        calibration: Calibration,
        settings: RuleSettings | None = None,
        num_data: int | None = None,
    ) -> GaussianOutputs:
        """Mean and covariance of the outputs of every example, position by position; batches are read one by one."""
        settings = settings or RuleSettings()
        examples = num_data or UNKNOWN
        parts = (part for batch in batches for part in self.pieces(batch, calibration, settings, examples))
        with torch.inference_mode(False), torch.no_grad():
            return join_outputs(parts, num_data)

    def pieces(
        self, inputs: Inputs, calibration: Calibration, settings: RuleSettings, examples: int
    ) -> Iterator[GaussianOutputs]:
        """A batch by the rule that is due, in as many pieces as memory needs."""
        rule = calibration.rule if settings.rule == "auto" else settings.rule
        if rule == "leading" and calibration.positions == 1 and len(calibration.root):
            for piece in self.linearised.near(inputs, settings.outputs):
                yield from self._leading(piece, calibration, settings.outputs, examples)
        elif rule in ("closed", "exact"):
            for part in self.linearised.pieces(inputs, examples):
                yield (
                    part
                    if rule == "closed"
                    else scaled(part, calibration.factor(part.variance.reshape(len(part.mean), -1).sum(-1)))
                )
        elif rule == "leading":
            raise ValueError("rule='leading' needs outputs at one position, at least 4; use 'exact' or 'draws'.")
        else:
            yield self._drawn(inputs, calibration, settings.draws, examples)

    # Which rule is due.

    def rule_for(self, inputs: Inputs) -> tuple[Rule, Tensor]:
        """The rule for outputs of this form, and the outputs of these examples at the mean."""
        mean = self.passes_of(False).at_mean(inputs).outputs
        if self._closed(inputs):
            return "closed", mean
        if mean[0].numel() <= FEW_OUTPUTS:
            return "exact", mean
        return ("leading" if mean[0].numel() == _width(mean) else "draws"), mean

    def _closed(self, inputs: Inputs) -> bool:
        """Whether nothing but the last layer has spread, so that its closed form is all there is."""
        linearised = self.linearised
        if linearised.capture is None:
            return True
        if linearised.roots.factor:
            return False
        batch = linearised.captured(map_inputs(inputs, lambda x: x[:2]))
        return len(linearised.head_blocks(features_of(batch.outputs, batch.sites))) == len(linearised.roots.blocks)

    # The last layer.

    def head(self, inputs: Inputs, backward: bool) -> HeadParts | None:
        """The last linear layer if its noise is to be apart, by the first examples.

        For `backward` rules it must not be used anywhere else; where draws are made, it may be an embedding, too.
        """
        if backward not in self.heads:
            self.heads[backward] = self._find_head(map_inputs(inputs, lambda x: x[:2]), backward)
        return self.heads[backward]

    def _find_head(self, inputs: Inputs, backward: bool) -> HeadParts | None:
        linearised = self.linearised
        module = last_linear(self.shell.module, inputs)
        if module is None or linearised.roots.factor or type(module).forward is not nn.Linear.forward:
            return None
        by_id = {id(p): name for name, p in self.shell.module.named_parameters()}
        names = frozenset(by_id[id(p)] for p in module.parameters())
        uncertain = names.intersection(linearised.roots.names)
        apart = {name for placed in linearised.roots.blocks if names.issuperset(placed.names) for name in placed.names}
        if not uncertain <= apart:
            return None
        if backward and uncertain:
            batch = linearised.captured(inputs)
            if not uncertain <= set(features_of(batch.outputs, batch.sites)):
                return None
        return HeadParts(module, names)

    def passes_of(self, apart: bool, head: HeadParts | None = None) -> DrawnPasses:
        """Passes whose signal is the features of the last layer, if its noise is `apart`; otherwise the outputs."""
        if apart not in self.passes:
            self.passes[apart] = DrawnPasses(self.shell, self.law, head.module if apart and head else None)
        return self.passes[apart]

    def head_variance(self, found: MeanPass, head: HeadParts | None) -> Tensor:
        """(B, ..., C): what the last layer's own noise adds to every variance, in closed form; 0 if it is not apart."""
        variance = torch.zeros_like(found.outputs)
        if head is None:
            return variance
        known = {id(p): name for name, p in self.shell.module.named_parameters()}
        features = {known[id(head.module.weight)]: found.signal}
        if head.module.bias is not None:
            features[known[id(head.module.bias)]] = torch.ones_like(found.outputs[..., :1])
        for number, own in self.linearised.head_blocks(features).items():
            variance = variance + block_variance(self.linearised.roots.blocks[number].block, own, variance.shape[-1])
        return variance

    # Leading outputs.

    def _leading(self, inputs: Inputs, calibration: Calibration, rows: int, examples: int) -> Iterator[GaussianOutputs]:
        head = self.head(inputs, backward=True) if calibration.apart else None
        batch = self.linearised.captured(inputs, rows)
        few = max(1, SLOPES * len(batch.mean) // max(1, rows * slope_numbers(batch.sites)))
        if few < len(batch.mean):
            for start in range(0, len(batch.mean), few):
                piece = map_inputs(inputs, lambda x, a=start: x[a : a + few])
                yield from self._leading(piece, calibration, rows, examples)
            return
        below = self.below(batch, head, calibration, rows)
        rank = min(factor_rank(batch.mean, examples), below.factor.shape[-1])
        found = self._noise_of(batch, head, rank)
        lift = calibration.lift if rows == calibration.rows else 1.0
        factor = lift * calibration.factor(lift * below.variance.sum(-1))[:, None]  # (B, 1)
        root = below.factor.mul_(factor.sqrt().unsqueeze(-1))  # (B, C, r), in place: it may be large
        left = root[..., rank:].square().sum(-1) + factor * below.diagonal
        found.diagonal = found.diagonal + left.view(batch.mean.shape)
        found.added.append(root[..., :rank].view(*batch.mean.shape, -1))
        yield found.outputs(batch.mean)

    def _noise_of(self, batch: BatchSites, head: HeadParts | None, rank: int) -> HeadCovariance:
        if head is None:
            return HeadCovariance(torch.zeros_like(batch.mean), rank)
        blocks = self.linearised.head_blocks(features_of(batch.outputs, batch.sites))
        return self.linearised.closed_form(batch.mean, blocks, rank)

    def below(self, batch: BatchSites, head: HeadParts | None, calibration: Calibration, rows: int) -> OutputCovariance:
        """The linearised covariance due to everything that is not apart, by the rule of leading outputs."""
        if self.made is None or self.made[0] is not calibration or self.made[1] != rows:
            self.made = calibration, rows, LeadingOutputs(calibration.root, calibration.rest, rows)
        rule, mean = self.made[2], batch.mean.flatten(1)
        chosen = rule.regressions(mean)
        sites = [site for site in batch.sites if head is None or site.name not in head.names]
        columns = chosen.rows.transpose(0, 1).reshape(-1, *batch.outputs.shape)  # (K, B, ..., C)
        seen = mean.new_zeros(len(mean), len(columns), len(columns))
        slopes = backpropagate(sites, batch.outputs, columns, together=not self.linearised.in_turn(rows))
        with torch.no_grad():
            for some, root in self.linearised.roots(sites, slopes):
                seen[some] += gram(root, len(columns))[:, 0]
        return rule.covariance(chosen, seen)

    def linear_variance(self, inputs: Inputs, calibration: Calibration, rows: int | None = None) -> Tensor:
        """(B, C): variances by a backward rule, without what is apart, kappa and lift; exact with as many rows as C."""
        if calibration.rule == "exact":
            return torch.cat(
                [part.variance.reshape(len(part.mean), -1) for part in self.linearised.pieces(inputs, UNKNOWN)]
            )
        head = self.head(inputs, backward=True) if calibration.apart else None
        rows = rows or calibration.rows
        return self.below(self.linearised.captured(inputs, rows), head, calibration, rows).variance

    # Few draws and the pattern.

    def _drawn(self, inputs: Inputs, calibration: Calibration, draws: int | None, examples: int) -> GaussianOutputs:
        head = self.head(inputs, backward=False) if calibration.apart else None
        passes = self.passes_of(calibration.apart, head)
        found = passes.at_mean(inputs)
        count = draws or (WIDE_DRAWS if calibration.wide else DRAWS)
        size = self.sizes(inputs, found, passes, count) / calibration.size.clamp_min(TINY)  # τ, (B, ...)
        variance = self.head_variance(found, head)
        if found.outputs.dim() == 1:
            return GaussianOutputs(found.outputs, variance + size * calibration.pattern)
        columns = min(calibration.pattern_root.shape[-1], factor_rank(found.outputs, examples) - 1)
        root = calibration.pattern_root[:, :columns]
        variance = variance + size.unsqueeze(-1) * (calibration.pattern - root.square().sum(-1)).clamp_min(0)
        factor = size[..., None, None].sqrt() * root if columns > 0 else None
        return GaussianOutputs(found.outputs, variance, factor)

    def drawn_sizes(self, inputs: Inputs, calibration: Calibration) -> Tensor:
        """(B, ...): the sizes that the rule's own draws find."""
        head = self.head(inputs, backward=False) if calibration.apart else None
        passes = self.passes_of(calibration.apart, head)
        return self.sizes(inputs, passes.at_mean(inputs), passes, WIDE_DRAWS if calibration.wide else DRAWS)

    def sizes(self, inputs: Inputs, mean: MeanPass, passes: DrawnPasses, draws: int) -> Tensor:
        """(B, ...): the mean over draws of the squared deviations, summed over the outputs of each position."""
        gram_matrix = None
        if passes.head is not None:
            gram_matrix = passes.weight.mT @ passes.weight  # the outputs, a vocabulary, need not be formed
        total: Tensor | None = None
        for deviation, _ in passes.deviations(inputs, mean, draws, RULE_SEED):
            if gram_matrix is None:
                square = deviation.square()
                own = square.sum(-1) if square.dim() > 1 else square
            else:
                own = ((deviation @ gram_matrix) * deviation).sum(-1)
            total = own if total is None else total + own
        assert total is not None
        return total / draws


def scaled(outputs: GaussianOutputs, factor: Tensor) -> GaussianOutputs:
    """The same means, covariances times a factor for each example, (B,)."""
    each = factor.view(-1, *[1] * (outputs.mean.dim() - 1))
    root = None if outputs.factor is None else outputs.factor * each.sqrt().unsqueeze(-1)
    return GaussianOutputs(outputs.mean, outputs.diagonal * each, root)


def _width(mean: Tensor) -> int:
    return 1 if mean.dim() == 1 else mean.shape[-1]
