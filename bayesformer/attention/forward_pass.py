"""What the stochastic families of one model share while it runs: the KL they add up, and facts about the inputs."""

from __future__ import annotations

from torch import Tensor, is_grad_enabled

from bayesformer.core.compat import in_backward


class ForwardPass:
    """The KL of the latest forward pass of a model, and what attention must know of the pass while it runs.

    `install` gives all families of a model one `ForwardPass` and lets the model's forward hooks call `begin` and `end`:
    the KLs of all calls in between are collected, also those of a layer that is called twice. A family that is not
    installed has one of its own that never begins: then each call replaces the KL of the one before.
    A copy or a pickle starts empty, since a tensor with a gradient can be neither copied nor sent.
    """

    def __init__(self) -> None:
        self.kl_terms: list[Tensor] = []
        """(B,) each, in nats: one per call of a family in the latest pass"""
        self.calls: int | None = None
        """calls of families in the latest pass, 0 where it left out all layers (layer drop); None before the first"""
        self.outermost: int | None = None
        """id() of the module whose call began the pass; None while no pass is running"""
        self.with_gradients = False
        """whether gradients were on when the pass began"""
        self.examples: int | None = None
        """B where the model says so; attention may see more rows than that, several windows of each example"""
        self.is_cross = False
        """whether the attention module that is running attends to other positions than its own"""
        self.valid_queries: Tensor | None = None
        """(B, 1, T, 1), boolean: queries of the latest self-attention that are no padding; None if unknown"""

    def begin(self, module: int) -> None:
        """A model begins its forward pass; `module` is its id(). A model inside one that runs belongs to that pass."""
        if self.outermost in (None, module):  # the same: its latest pass was interrupted and had no end
            self.kl_terms, self.calls, self.examples, self.valid_queries = [], 0, None, None
            self.outermost, self.with_gradients = module, is_grad_enabled()

    def end(self, module: int) -> None:
        """The model ends its forward pass; the KL stays until the next one begins."""
        if self.outermost == module:
            self.outermost, self.valid_queries = None, None

    def add(self, kl: Tensor | None, drawn: bool) -> None:
        """Record the KL (B,) or (B·W,) of one call of a family; None if it was not computed."""
        if in_backward():  # a checkpoint computes its part of the pass again, which has been recorded already
            return
        self.calls = (self.calls or 0) + 1
        terms = [] if kl is None else [self._per_example(kl)]
        if self.outermost is None:
            self.kl_terms = terms
            return
        if terms and drawn and self.with_gradients and not is_grad_enabled():
            raise RuntimeError(
                "attention must be drawn with gradients in a pass that has them, or its KL has none; they are off. "
                "Checkpointing must have use_reentrant=False; got the re-entrant one, or no_grad inside the model."
            )
        self.kl_terms = [*self.kl_terms, *terms]

    def _per_example(self, kl: Tensor) -> Tensor:
        """(B,): the sum over the W windows of each example, which stand next to each other, (B·W,)."""
        rows, examples = kl.shape[-1], self.examples
        if examples is None or rows == examples:
            return kl
        if rows % examples:
            raise ValueError(
                f"attention must see the same number of windows of every example; got {rows} rows of attention for "
                f"{examples} examples. Leave these modules out with names=, a pattern of install."
            )
        return kl.unflatten(-1, (examples, rows // examples)).sum(-1)

    def __reduce__(self) -> tuple[type[ForwardPass], tuple[()]]:
        return ForwardPass, ()
