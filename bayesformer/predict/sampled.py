"""Outputs under draws of the weights, one forward pass per draw and batch.

Draws of stochastic attention share their weights. Several of them can go through one pass, which does everything
before the first stochastic layer once; each still has a noise stream of its own, so that they are the draws that
separate passes would make.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from bayesformer.attention import attention_mode, families
from bayesformer.dataset import first_tensor, map_inputs, tensors_of
from bayesformer.engine import Strategy, run_members
from bayesformer.model.randomness import Randomness, find_randomness
from bayesformer.network import FlatModel, apply, batched_outputs, stochastic_mode
from bayesformer.progress import Reporter, Silent
from bayesformer.seeds import generator
from bayesformer.types import Inputs, Params

VALUES = "values"
TOGETHER = 4096  # input numbers of all draws in one pass: more leave the cache


@dataclass
class PredictTask:
    """Outputs of every draw on one set of inputs.

    A draw is a row of `theta` with its own `buffers`; with `noisy`, all draws use row 0 and differ by the noise of
    dropout or attention, from a stream of their own. With `attention`, a row's attention is drawn as well.
    """

    model: FlatModel
    theta: Tensor  # (L, P), or (1, P) with `noisy`
    buffers: Params
    inputs: Inputs
    batch_size: int
    noisy: bool = False
    seed: int = 0
    attention: bool = False
    _loaded: int | None = field(default=None, init=False)  # the row that the model holds

    def single(self, member: int, reporter: Reporter) -> Params:  # noqa: ARG002
        """Outputs of one draw, (N, ...)."""
        passing = self.randomness.passing
        self._load(member)
        source = generator(self.seed, "draw", member, device=self.device)
        with torch.inference_mode(), passing(source), self._drawing():
            parts = [apply(self.model.module, chunk) for chunk in self.chunks()]
        return {VALUES: torch.cat(parts)}

    def batched(self, members: Sequence[int], reporter: Reporter) -> Params:  # noqa: ARG002
        """Outputs of several draws, (L, N, ...)."""
        if self.noisy:
            return {VALUES: self._together(members, self.chunks())}
        self.model.module.eval()
        params = self.model.layout.views(self.theta[list(members)])
        params |= {name: value[list(members)] for name, value in self.buffers.items()}
        with torch.no_grad():
            parts = [batched_outputs(self.model.module, params, chunk) for chunk in self.chunks()]
        return {VALUES: torch.cat(parts, 1)}

    def trial(self, members: Sequence[int]) -> Callable[[], object]:
        """One batch."""
        chunk = next(self.chunks())
        if len(members) > 1 and self.noisy:
            return lambda: self._together(members, [chunk])
        if len(members) > 1:
            params = self.model.layout.views(self.theta[list(members)])
            return lambda: batched_outputs(self.model.module, params, chunk)

        def one() -> Tensor:
            self._load(members[0])
            source = generator(self.seed, "trial", device=self.device)
            with torch.inference_mode(), self.randomness.passing(source), self._drawing():
                return apply(self.model.module, chunk)

        return one

    @property
    def chunk(self) -> int | None:
        """Draws per pass, where they share their weights; None leaves it to the engine."""
        if not self.noisy or self.device.type != "cpu":
            return None
        numbers = first_tensor(next(self.chunks())).numel()
        return max(2, TOGETHER // max(numbers, 1))

    def _together(self, members: Sequence[int], chunks: Iterable[Inputs]) -> Tensor:
        """(L, N, ...): draws of attention in one pass per batch."""
        module, passing = self.model.module, self.randomness.passing
        self._load(0)
        own = [generator(self.seed, "draw", member, device=self.device) for member in members]
        with torch.inference_mode(), attention_mode(module, "draw", len(members), kl=False), passing(own):
            return torch.cat([apply(module, chunk) for chunk in chunks], 1)

    @property
    def randomness(self) -> Randomness:
        """What a pass draws, by a trial on two examples, once per model, way of drawing and kind of inputs."""
        kinds = tuple(self.inputs) if isinstance(self.inputs, Mapping) else len(tensors_of(self.inputs))
        known, way = self.model.randomness, (self.noisy, self.attention, kinds)
        if way not in known:
            self._load(0)
            few = map_inputs(self.inputs, lambda x: x[:2])
            with torch.no_grad(), self._drawing():
                known[way] = find_randomness(self.model.module, lambda: apply(self.model.module, few))
        return known[way]

    def chunks(self) -> Iterator[Inputs]:
        """The inputs, `batch_size` examples at a time."""
        for start in range(0, len(first_tensor(self.inputs)), self.batch_size):
            yield map_inputs(self.inputs, lambda x, a=start: x[a : a + self.batch_size])

    @property
    def units(self) -> int:
        """Batches."""
        return -(-len(first_tensor(self.inputs)) // self.batch_size)

    @property
    def device(self) -> torch.device:
        """The weights' device."""
        return self.theta.device

    @cached_property
    def signature(self) -> str:
        """Model, batch and number of batches."""
        shapes = [(min(len(t), self.batch_size), *t.shape[1:]) for t in tensors_of(self.inputs)]
        text = f"{self.model.layout}{shapes}{self.units}{self.noisy}{self.attention}{self.model.module}{self.device}"
        return "predict " + hashlib.sha256(text.encode()).hexdigest()[:12]

    def why_not_batched(self) -> str | None:
        """Noise of separate streams has a batched form in attention only, and some models cannot be vmapped."""
        if self.noisy:
            return self._why_not_together()
        if self.attention:
            return "every draw has weights and an attention stream of its own"
        try:
            self.trial([0, 0])()
        except RuntimeError as error:
            return f"the model cannot be vmapped ({str(error).splitlines()[0]})"
        return None

    def _why_not_together(self) -> str | None:
        """Draws made together must be the draws made alone; whether they are is seen by making two of each."""
        reason = "every draw has a dropout stream of its own"
        if not families(self.model.module):
            return reason
        few = replace(self, inputs=map_inputs(self.inputs, lambda x: x[:2]))
        alone = [few.single(member, Silent())[VALUES] for member in (0, 1)]
        try:
            together = few.batched((0, 1), Silent())[VALUES]
        except (RuntimeError, ValueError, IndexError) as error:
            return f"the model does not take several draws at once ({str(error).splitlines()[0]})"
        same = together.shape == (2, *alone[0].shape) and torch.allclose(together, torch.stack(alone), 1e-3, 1e-4)
        return None if same else reason

    def _drawing(self) -> AbstractContextManager[None]:
        return attention_mode(self.model.module, "draw", kl=False) if self.attention or self.noisy else nullcontext()

    def _load(self, member: int) -> None:
        row = 0 if self.noisy else member
        if row == self._loaded and not self.buffers:  # a pass may have changed those
            return  # noise has one row only; looking through all modules again would cost a part of a pass
        self.model.load(self.theta[row])
        self.model.load_buffers({name: value[row] for name, value in self.buffers.items()})
        if self.noisy:
            stochastic_mode(self.model.module)
        else:
            self.model.module.eval()
        self._loaded = row


def sampled_outputs(
    task: PredictTask,
    draws: int,
    strategy: Strategy = "auto",
    workers: int | None = None,
    reporter: Reporter | None = None,
) -> Tensor:
    """(L, N, ...): outputs of the first `draws` draws."""
    return run_members(task, range(draws), strategy, workers, reporter)[VALUES]
