"""Log-probabilities of the next token under every draw, token by token.

A draw of the weights is held for a whole sequence. Each draw has a cache of keys and values of its own; what a prompt
leaves there below the first layer that differs between draws is shared, and nothing else. Where attention or dropout
is random, the noise of a token is drawn once, when it is read, and stays with its entry in the cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from bayesformer.likelihoods.language import unwrapped
from bayesformer.model.adapters import virtual_tokens
from bayesformer.model.calling import select_output
from bayesformer.model.shell import Shell
from bayesformer.predict.by_draws import draw_plan
from bayesformer.predict.member_layers import SharedBase, find_shared_base
from bayesformer.predict.sampled import DrawPlan

if TYPE_CHECKING:
    from bayesformer.posterior import Posterior


class Decoder(Protocol):
    """The next token under L draws of the weights."""

    def read(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """(L, B, V), float32: logits after the last of these tokens.

        Args:
            ids: (B, t), tokens that were not read yet: the prompt first, then one at a time.
            mask: (B, S), which of all tokens up to the last one count.
            positions: (B, t), of the tokens in their own sequence.
        """
        ...


class CachedModule:
    """A language model that remembers what it has read, or reads all of it again where it cannot remember."""

    def __init__(self, module: nn.Module, cached: bool | None) -> None:
        self.module = module
        self.takes = arguments(module)
        self.asked, reason = cached, _no_cache(module, self.takes)
        if cached and reason is not None:
            raise _cannot(reason)
        self.cached = reason is None if cached is None else cached
        self.past: Any = None
        self.ids: Tensor | None = None  # all that was read, without a cache
        self.positions: Tensor | None = None

    def read(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """(rows, V): logits after the last token."""
        options: dict[str, Any] = {}
        if self.cached:
            options |= {"past_key_values": self.past, "use_cache": True}
        else:
            ids = ids if self.ids is None else torch.cat([self.ids, ids], 1)
            positions = positions if self.positions is None else torch.cat([self.positions, positions], 1)
            self.ids, self.positions = ids, positions
            options |= {"use_cache": False} if "use_cache" in self.takes else {}
        known = {"attention_mask": mask, "position_ids": positions, "logits_to_keep": 1}
        options |= {name: value for name, value in known.items() if name in self.takes}
        output = self.module(input_ids=ids, **options) if "input_ids" in self.takes else self.module(ids, **options)
        if self.cached:
            self._remember(output, ids, positions)
        return select_output(output)[:, -1].float()

    def _remember(self, output: Any, ids: Tensor, positions: Tensor) -> None:
        """Keep the cache of a pass; if the first pass gives none, what was read."""
        self.past = getattr(output, "past_key_values", None)
        if self.past is None:
            if self.asked:
                raise _cannot(f"{type(unwrapped(self.module)).__name__} returned no past_key_values")
            self.cached, self.ids, self.positions = False, ids, positions


def _no_cache(module: nn.Module, takes: frozenset[str]) -> str | None:
    """Why a model cannot continue from keys and values of what it has read; None where it can, as far as is known."""
    if virtual_tokens(module):
        return "PEFT puts the virtual tokens of a prompt or prefix before whatever a pass reads"
    missing = [name for name in ("use_cache", "past_key_values") if name not in takes]
    return f"{type(unwrapped(module)).__name__} takes no {' and no '.join(missing)}" if missing else None


def _cannot(reason: str) -> ValueError:
    return ValueError(f"cached must be None or False for this model; got True, but {reason}.")


def arguments(module: nn.Module) -> frozenset[str]:
    """The names that a language model's own forward takes."""
    return frozenset(inspect.signature(unwrapped(module).forward).parameters)


def trial_inputs(module: nn.Module, trial: dict[str, Tensor]) -> Any:
    """Token numbers and mask as inputs of a model: by name where it has these names, else the numbers alone."""
    takes = arguments(module)
    return {name: value for name, value in trial.items() if name in takes} or trial["input_ids"]


class LoopedDecoder:
    """One draw after the other: a shell each where weights differ, a cache and a stream of random numbers each."""

    def __init__(
        self, posterior: Posterior, plan: DrawPlan, draws: int, trial: dict[str, Tensor], cached: bool | None
    ) -> None:
        self.plan, self.draws = plan, draws
        count = 1 if plan.noisy else draws
        self.shells = [posterior.skeleton.shell(gradients=False) for _ in range(count)]
        self.random = plan.randomness(self.shells[0], trial_inputs(self.shells[0].module, trial))
        for draw, shell in enumerate(self.shells):
            plan.load(shell, draw)
        self.generators = plan.generators(range(draws), posterior.device)
        self.models = [CachedModule(self.shell(draw).module, cached) for draw in range(draws)]

    def shell(self, draw: int) -> Shell:
        """The shell of a draw; draws of noise alone share one."""
        return self.shells[0 if self.plan.noisy else draw]

    def read(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """(L, B, V): logits after the last token under every draw."""
        found = []
        for draw, model in enumerate(self.models):
            passing = self.random.passing(self.generators[draw], self.plan.dropout_rate)
            with torch.inference_mode(), passing, self.plan.drawing(self.shell(draw)):
                found.append(model.read(ids, mask, positions))
        return torch.stack(found)


class ExpandedDecoder:
    """All draws as one batch: weights that differ stand side by side in their linear layers."""

    def __init__(self, base: SharedBase, shell: Shell, rows: Tensor, cached: bool | None, stack: ExitStack) -> None:
        self.draws = len(rows)
        stack.enter_context(base.holding(shell, rows))
        self.model = CachedModule(shell.module, cached)

    def read(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """(L, B, V): logits after the last token under every draw."""
        with torch.inference_mode():
            return self.model.read(ids, mask, positions).unflatten(0, (self.draws, len(ids)))


def make_decoder(
    posterior: Posterior, draws: int, seed: int, trial: dict[str, Tensor], cached: bool | None, stack: ExitStack
) -> Decoder:
    """The decoder for a posterior: draws of adapters and other linear layers as one batch, others one by one.

    One batch it is where most weights are the same in all draws, the others are in plain linear layers, nothing else is
    random, and two draws in one batch are the draws one by one on the trial inputs.
    """
    plan = draw_plan(posterior, draws, seed)
    looped: Callable[[], Decoder] = lambda: LoopedDecoder(posterior, plan, draws, trial, cached)  # noqa: E731
    if plan.noisy or plan.attention or draws == 1 or posterior.law.buffers:
        return looped()
    rows = torch.stack([posterior.law.row(draw, seed) for draw in range(draws)])  # (L, P)
    shell = posterior.skeleton.shell(gradients=False)
    base = find_shared_base(shell, rows)
    if base is None or plan.randomness(shell, trial_inputs(shell.module, trial)).kind != "none":
        return looped()
    if not _agree(posterior, plan, base, shell, rows[:2], trial):
        return looped()
    return ExpandedDecoder(base, shell, rows, cached, stack)


def _agree(
    posterior: Posterior, plan: DrawPlan, base: SharedBase, shell: Shell, rows: Tensor, trial: dict[str, Tensor]
) -> bool:
    """Whether two draws in one batch give what they give alone."""
    ids, mask = trial["input_ids"], trial["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    alone = LoopedDecoder(posterior, plan, 2, trial, None).read(ids, mask, positions)
    try:
        with ExitStack() as inner:
            together = ExpandedDecoder(base, shell, rows, None, inner).read(ids, mask, positions)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):  # the model does not take such batches
        return False
    return together.shape == alone.shape and torch.allclose(together, alone, 1e-2, 1e-2)
