"""What every stochastic family of attention shares: its modes, its KL in the record of the pass, full precision.

A family is a law of attention weights given logits, `family(logits, mask) -> Draw(weights, kl)`; one whose prior
is read off the keys, `wants_keys`, is called as `family(logits, mask, keys)` with keys (B, H, S, d). It knows no
model. Axes may stand before B, as that of several draws made together, (L, B, H, T, S).

On a graph, `Edges` stand in for the mask, logits and weights are (B, H, 1, E), and keys are those of the nodes,
(B, H, N, d).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from bayesformer.attention.edges import Visible
from bayesformer.attention.forward_pass import ForwardPass
from bayesformer.attention.multi_head import Dropout, masked_softmax
from bayesformer.attention.ranges import check_rate
from bayesformer.core.types import Draw, Params

Mode: TypeAlias = Literal["draw", "mean"]
Drawn: TypeAlias = tuple[Tensor, Tensor | None]
"""Weights and the KL of each example, (B,). None while a family does not `count`: prediction has no use for it."""


class AttentionFamily(nn.Module):
    """A law of attention weights. Subclasses say how to `draw`; weights are drawn in training mode.

    In evaluation mode it is softmax attention, the law without its noise ("mean mode"). `mode` overrides that
    either way. `draws` asks for several draws at once: the first family of a model to be asked spreads its logits
    (B, H, T, S) over a new leading axis, and everything before it was computed once.

    A class of one's own keeps its constructor's arguments as attributes of the same names, so that a saved posterior
    can describe it, and is made known by `register_family`.
    """

    wants_keys: bool = False
    mode: Mode | None = None
    draws: int | None = None
    counts: bool = True
    """whether the KL of draws is computed"""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        check_rate("dropout", dropout)
        self.dropout = Dropout(dropout)
        self.forward_pass = ForwardPass()

    def forward(self, logits: Tensor, mask: Visible, keys: Tensor | None = None) -> Draw:
        """Weights (B, H, T, S), drawn or the softmax, in the dtype of the logits, and the KL of each example, (B,)."""
        # bfloat16 has 8 bits, too few for the sum of a row.
        full = torch.promote_types(logits.dtype, torch.float32)
        if self.draws_now:
            spread = logits.to(full)
            if self.draws is not None and logits.dim() == 4:
                spread = spread.expand(self.draws, *logits.shape)  # (L, B, H, T, S)
            weights, cost = self.draw(spread, mask, keys)
            kl = weights.new_zeros(weights.shape[:-3]) if cost is None else cost
        else:
            weights, kl = masked_softmax(logits, mask), logits.new_zeros(logits.shape[:-3], dtype=full)
        self.forward_pass.add(kl if self.counts else None, self.draws_now)
        return Draw(self.dropout(weights).to(logits.dtype), kl)

    @property
    def draws_now(self) -> bool:
        """Whether weights are drawn in this call, rather than those of mean mode given."""
        return self.training if self.mode is None else self.mode == "draw"

    def draw(self, logits: Tensor, mask: Visible, keys: Tensor | None) -> Drawn:
        """Weights, and their KL if it counts, for logits in single precision or better."""
        raise NotImplementedError


def families(model: nn.Module) -> list[AttentionFamily]:
    """All stochastic families among a model's modules, each once, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, AttentionFamily)]


def family_weights(model: nn.Module) -> Params:
    """The parameters of a model that belong to its stochastic families, by name: of spreads and contextual priors.

    Outputs need not depend on them: those of a prior are learned through the KL alone.
    """
    return {
        f"{where}.{name}" if where else name: weight
        for where, module in model.named_modules()
        if isinstance(module, AttentionFamily)
        for name, weight in module.named_parameters()
    }


def attention_kl(model: nn.Module) -> Tensor:
    """(B,): KL of each example's attention weights in the latest pass, in nats, over all families; 0 in mean mode.

    An example's attention weights are latent variables of its own, so the evidence lower bound is
    Σ_n E log p(y_n | x_n, S_n) - KL_n: subtract the mean of this from the mean log-likelihood, without 1/N. Windows of
    an example, as in Swin, are summed. A pass that drops every layer with attention has KL 0, (1,) if it is not known
    how many examples it had.
    """
    found = families(model)
    if not found:
        raise ValueError(
            f"model must have stochastic attention; {type(model).__name__} has none. "
            "Build it with a family of bayesformer.attention, or make it so with bayesformer.attention.install."
        )
    passes = {id(family.forward_pass): family.forward_pass for family in found}.values()
    terms = [kl for each in passes for kl in each.kl_terms]
    if not terms:
        if all(each.calls == 0 for each in passes):
            return next(model.parameters()).new_zeros(max(each.examples or 1 for each in passes), dtype=torch.float32)
        raise ValueError(
            f"model must be called before its KL is read; {type(model).__name__} was not, or only to predict."
        )
    shapes = sorted({tuple(kl.shape) for kl in terms})
    if len(shapes) > 1:
        raise ValueError(
            f"attention modules of {type(model).__name__} must give one KL per example; they gave shapes "
            f"{', '.join(map(str, shapes))}. Leave some out with names=, a pattern of install."
        )
    return torch.stack(terms).sum(0)


@contextmanager
def attention_mode(model: nn.Module, mode: Mode, draws: int | None = None, kl: bool = True) -> Iterator[None]:
    """Within it all families draw, `draws` at once if given, or all are in mean mode, whatever the model's mode.

    Without `kl` their KL is neither computed nor recorded.
    """
    found = families(model)
    before = [(family.mode, family.draws, family.counts) for family in found]
    for family in found:
        family.mode, family.draws, family.counts = mode, draws, kl
    try:
        yield
    finally:
        for family, old in zip(found, before, strict=True):
            family.mode, family.draws, family.counts = old
