"""Outputs under draws of the weights, one forward pass per draw and batch.

Draws of stochastic attention share their weights. Several of them can go through one pass, which does everything
before the first stochastic layer once; each still has a noise stream of its own, so that they are the draws that
separate passes would make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from bayesformer.attention import attention_mode, families
from bayesformer.core.seeds import fold
from bayesformer.core.strategy import CHUNK, Strategy, check_strategy, choose, largest_tensor
from bayesformer.core.types import Inputs, Params
from bayesformer.data.inputs import first_tensor, map_inputs, tensors_of
from bayesformer.laws import Law, buffers_of, telling_rows
from bayesformer.model.calling import apply, select_output, split_inputs
from bayesformer.model.modes import set_training
from bayesformer.model.randomness import Randomness, find_randomness, plain_attention
from bayesformer.model.shell import Shell
from bayesformer.predict.member_layers import SharedBase, find_shared_base

TOGETHER = 4096  # input numbers of all draws of attention in one pass: more leave the cache


@dataclass(frozen=True)
class DrawPlan:
    """How the outputs of draws are computed.

    A draw is a row of the law with its own buffers. With `noisy`, all draws use row 0 and differ by the noise of
    dropout, random weights or attention, each from a stream of its own. With `attention`, a row's attention is drawn
    as well.
    """

    law: Law
    noisy: bool = False
    attention: bool = False
    seed: int = 0
    dropout_rate: float | None = None
    held: tuple[str, ...] = ()
    """modules in evaluation mode while the noise of the others is on"""

    def generators(self, draws: Sequence[int], device: torch.device) -> list[torch.Generator]:
        """One per draw, named by the seed and the draw's number."""
        return [torch.Generator(device).manual_seed(fold(self.seed, "draw", draw)) for draw in draws]

    def load(self, shell: Shell, draw: int) -> None:
        """Weights, buffers and modes of one draw."""
        row = 0 if self.noisy else draw
        shell.load(self.law.row(row, self.seed))
        shell.load_buffers(buffers_of(self.law, row))
        if self.noisy:
            set_training(shell.module, self.held)
        else:
            shell.module.eval()

    def drawing(self, shell: Shell, together: int | None = None) -> AbstractContextManager[None]:
        """Stochastic attention drawn, where draws are of it."""
        if self.attention or (self.noisy and families(shell.module)):
            return attention_mode(shell.module, "draw", together, kl=False)
        return nullcontext()

    def randomness(self, shell: Shell, inputs: Inputs) -> Randomness:
        """How a pass draws its random numbers, by one trial on two examples: some models do in evaluation mode, too."""
        self.load(shell, 0)
        trial_inputs = map_inputs(inputs, lambda x: x[:2])
        with self.drawing(shell), torch.no_grad():
            return find_randomness(shell.module, lambda: shell(trial_inputs), dropout_rate=self.dropout_rate)


class Sampler:
    """Draws made ready on one shell: call `passes` with batches of inputs.

    Args:
        shell: of one thread.
        how: what a draw is.
        count: draws.
        trial_inputs: inputs of some examples, for trial passes.
        strategy: "auto", "looped" or "batched".
        known: findings of earlier trials on the same model, added to.
        examples: in a batch, about, which decides whether draws go through one pass.
    """

    def __init__(
        self,
        shell: Shell,
        how: DrawPlan,
        count: int,
        trial_inputs: Inputs,
        strategy: Strategy = "auto",
        known: dict[Any, Any] | None = None,
        examples: int = 1,
    ) -> None:
        check_strategy(strategy)
        if strategy == "processes":
            raise ValueError(f"strategy must be 'auto', 'looped' or 'batched' for predictions; got {strategy!r}.")
        self.shell, self.how, self.count, self.examples = shell, how, count, examples
        self.known = {} if known is None else known  # findings of earlier trials on the same model
        self.random = self._found(("randomness", how.noisy, how.attention), lambda: how.randomness(shell, trial_inputs))
        self.device = shell.theta.device
        self.generators = how.generators(range(count), self.device)
        self.shared = None if strategy == "looped" else self._shared_base(trial_inputs)
        self.together = 1 if self.shared else self._group(trial_inputs, strategy)

    def passes(self, batches: Sequence[Inputs]) -> Iterator[tuple[int, int, Tensor]]:
        """(first draw, number of the batch, outputs (l, B, ...)) for all draws and batches; weights are loaded once."""
        if self.shared is not None:
            yield from self._on_shared_base(self.shared, batches)
            return
        if self.together == 1:
            for draw in range(self.count):
                for number, batch in enumerate(batches):
                    yield draw, number, self.one(draw, batch, number == 0)[None]
            return
        size = self._pass_draws(batches)
        for start in range(0, self.count, size):
            draws = range(start, min(start + size, self.count))
            for number, batch in enumerate(batches):
                yield start, number, self._several(draws, batch)

    def _on_shared_base(self, base: SharedBase, batches: Sequence[Inputs]) -> Iterator[tuple[int, int, Tensor]]:
        """Passes of as many draws as pay on the largest batch, all others one by one."""
        size = base.draws_per_pass(max(tokens_of(batch) for batch in batches))
        for start in range(0, self.count, size):
            rows = [self.how.law.row(draw, self.how.seed) for draw in range(start, min(start + size, self.count))]
            with torch.inference_mode(), base.holding(self.shell, torch.stack(rows)):
                for number, batch in enumerate(batches):
                    yield start, number, apply(self.shell.module, batch).unflatten(0, (len(rows), -1))

    def _shared_base(self, trial_inputs: Inputs) -> SharedBase | None:
        """The base that all draws share, where most weights are the same in all of them and one pass can take several.

        Two draws in one pass must be what they are alone on the trial inputs.
        """
        if self.how.noisy or self.how.attention or self.count == 1 or self.how.law.buffers:
            return None
        key = "shared base"

        def find() -> SharedBase | None:
            base = find_shared_base(self.shell, telling_rows(self.how.law, self.how.seed))
            return base if base is not None and self._agrees(base, trial_inputs) else None

        return self._found(key, find) if self.random.kind == "none" else None

    def _agrees(self, base: SharedBase, trial_inputs: Inputs) -> bool:
        alone = torch.stack([self.one(draw, trial_inputs) for draw in (0, 1)])
        rows = torch.stack([self.how.law.row(draw, self.how.seed) for draw in (0, 1)])
        try:
            with torch.inference_mode(), base.holding(self.shell, rows):
                together = apply(self.shell.module, trial_inputs)
        except (
            RuntimeError,
            ValueError,
            IndexError,
            TypeError,
            AttributeError,
        ):  # the model does not take such batches
            return False
        return len(together) == 2 * alone.shape[1] and torch.allclose(together.view_as(alone), alone, 1e-2, 1e-3)

    def _pass_draws(self, batches: Sequence[Inputs]) -> int:
        """Draws per pass: of attention on a CPU, as many as leave the numbers of a pass in the cache."""
        if not (self.how.noisy and self.device.type == "cpu"):
            return self.together
        numbers = max((first_tensor(batch).numel() for batch in batches), default=1)
        return min(self.together, max(2, TOGETHER // max(numbers, 1)))

    def one(self, draw: int, inputs: Inputs, fresh: bool = True) -> Tensor:
        """(B, ...): outputs of one draw; without `fresh`, the shell holds its weights already."""
        if fresh and not (self.how.noisy and draw):  # all noise has the weights of row 0
            self.how.load(self.shell, draw)
        elif self.how.law.buffers:
            row = 0 if self.how.noisy else draw
            self.shell.load_buffers(buffers_of(self.how.law, row))  # a pass may have changed them
        generator, rate = self.generators[draw], self.how.dropout_rate
        with torch.inference_mode(), self.random.passing(generator, rate), self.how.drawing(self.shell):
            return apply(self.shell.module, inputs)

    def trial(self, inputs: Inputs) -> Tensor:
        """(B, ...): outputs of draw 0 by a generator of its own, so that the draws to come are not disturbed."""
        return self._apart(1).one(0, inputs)

    def _several(self, draws: Sequence[int], inputs: Inputs) -> Tensor:
        if self.how.noisy:
            self.how.load(self.shell, 0)
            own = [self.generators[draw] for draw in draws]
            passing = self.random.passing(own, self.how.dropout_rate)
            with torch.inference_mode(), self.how.drawing(self.shell, len(own)), passing:
                return apply(self.shell.module, inputs)
        self.shell.module.eval()
        rows = torch.stack([self.how.law.row(draw, self.how.seed) for draw in draws])
        params = dict(self.shell.space.views(rows))
        buffers = [buffers_of(self.how.law, draw) for draw in draws]
        params |= {name: torch.stack([own[name] for own in buffers]) for name in buffers[0]}
        return vmapped_outputs(self.shell, params, inputs)

    def _group(self, trial_inputs: Inputs, strategy: Strategy) -> int:
        """Draws per pass: by the size of the problem, and only if draws made together are those made alone."""
        if self.count == 1 or strategy == "looped":
            return 1
        size = self.count if self.how.noisy else CHUNK
        key = ("together", self.how.noisy, self.how.attention)

        def veto() -> str | None:
            reason: str | None = self._found(key, lambda: self._why_not_together(trial_inputs))
            return reason

        if strategy == "batched":
            reason = veto()
            if reason is not None:
                raise ValueError(f"strategy 'batched' is not possible here: {reason}. Use 'looped'.")
            return size
        weights = 0 if self.how.noisy else self.shell.space.size
        shapes = tuple(tuple(x.shape) for x in tensors_of(trial_inputs))

        def largest() -> int:
            """Numbers in the largest tensor of a pass over one batch, scaled up from the trial inputs."""
            found: int = self._found(("largest", *shapes), lambda: largest_tensor(lambda: self.trial(trial_inputs)))
            return found * self.examples // len(first_tensor(trial_inputs))

        return size if choose(self.count, weights, largest, self.device, veto=veto) == "batched" else 1

    def _found(self, key: Any, find: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = find()
        return self.known[key]

    def _why_not_together(self, trial_inputs: Inputs) -> str | None:
        noisy, random = self.how.noisy, self.random
        rules = (
            (random.kind == "global", f"one pass has one stream: {random.torch_stream or random.python_streams}"),
            (self.how.attention, "every draw has weights and an attention stream of its own"),
            (noisy and not families(self.shell.module), "every draw has a dropout stream of its own"),
            (not noisy and random.kind != "none", "the model draws random numbers in evaluation mode"),
            (
                bool(self.shell.facts.staged),
                "inferred weights have another precision than the vector they are kept in",
            ),
        )
        reason = next((reason for holds, reason in rules if holds), None)
        return reason or self._compared(trial_inputs)

    def _compared(self, trial_inputs: Inputs) -> str | None:
        """Two draws in one pass against the same two one by one: in what way they differ, or None."""
        trial_inputs = map_inputs(trial_inputs, lambda x: x[:2])
        first = self._apart(2)
        alone = torch.stack([first.one(draw, trial_inputs) for draw in (0, 1)])
        try:
            together = self._apart(2)._several((0, 1), trial_inputs)
        except (RuntimeError, ValueError, IndexError) as error:
            return f"the model does not take several draws at once ({str(error).splitlines()[0]})"
        same = together.shape == alone.shape and torch.allclose(together, alone, 1e-3, 1e-4)
        return None if same else "draws made together are not the draws made alone"

    def _apart(self, draws: int) -> Sampler:
        """The same sampler with generators of its own."""
        other = object.__new__(Sampler)
        other.__dict__ = {**self.__dict__, "generators": self.how.generators(range(draws), self.device), "together": 1}
        return other


def tokens_of(inputs: Inputs) -> int:
    """Vectors in the first input of a batch: tokens of a text, patches of a picture, or rows of a table."""
    first = first_tensor(inputs)
    return first.numel() if not first.is_floating_point() else max(1, first[..., 0].numel())


def vmapped_outputs(shell: Shell, params: Params, inputs: Inputs) -> Tensor:
    """(L, B, ...): outputs on one input under L sets of weights and buffers with a leading axis, by one vmap."""
    args, kwargs = split_inputs(inputs)

    def one(own: Params) -> Tensor:
        return select_output(functional_call(shell.module, own, args, kwargs))

    with plain_attention(), torch.no_grad():
        return torch.vmap(one)(params)
