"""Passes at the mean of a law, in evaluation mode: what linearised, streamlined and one-pass prediction start from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from bayesformer.core.pool import Pool
from bayesformer.core.seeds import generator
from bayesformer.core.types import Inputs
from bayesformer.data.inputs import inputs_to, map_inputs
from bayesformer.laws import Law, buffers_of
from bayesformer.model.randomness import Randomness, find_randomness
from bayesformer.model.shell import Shell
from bayesformer.model.skeleton import Skeleton
from bayesformer.predict.linearised import Linearised
from bayesformer.predict.streamlined import Streamliner

TRIAL_EXAMPLES = 2  # examples of a trial pass
T = TypeVar("T")


class MeanPasses:
    """Shells with the weights at the mean of a law, and what is built on them, lent to any number of threads."""

    def __init__(self, skeleton: Skeleton, law: Law) -> None:
        self.skeleton, self.law, self.device = skeleton, law, law.mean.device
        self.shells = Pool(self._shell)
        self._linearised = Pool(lambda: Linearised(self._shell().module, skeleton.space, law))
        self._streamliners = Pool(lambda: Streamliner(self._shell(), law))
        self._randomness: Randomness | None = None  # of a pass in evaluation mode, found by the first

    def _shell(self) -> Shell:
        shell = self.skeleton.shell()
        shell.load(self.law.mean)
        shell.load_buffers(buffers_of(self.law, 0))
        shell.module.eval()
        for parameter in shell.module.parameters():
            parameter.grad = None
        if self.law.buffers:  # a pass may change them, and the next starts from those of the law all the same
            shell.module.register_forward_pre_hook(lambda *_: shell.load_buffers(buffers_of(self.law, 0)))
        return shell

    def release(self) -> None:
        """Let go of all shells that are not lent, at once and not when garbage is collected."""
        for pool in (self.shells, self._linearised, self._streamliners):
            pool.clear()

    @contextmanager
    def passing(self, inputs: Inputs) -> Iterator[bool]:
        """A context for passes; yields whether they draw random numbers even in evaluation mode.

        Such a model takes them from a stream of its own. What is made on its first batch must be made anew for each
        call, since that draws random numbers, too.
        """
        if self._randomness is None:
            trial_inputs = inputs_to(map_inputs(inputs, lambda x: x[:TRIAL_EXAMPLES]), self.device)
            with self.shells.borrow() as shell, torch.no_grad():
                self._randomness = find_randomness(shell.module, lambda: shell(trial_inputs))
        found = self._randomness
        with found.passing(generator(0, "mean", device=self.device)):
            yield found.kind != "none"

    @contextmanager
    def linearised(self, inputs: Inputs) -> Iterator[Linearised]:
        """The network made linear in its weights, within `passing`."""
        with self.passing(inputs) as noisy, _lent(self._linearised, noisy) as one:
            yield one

    @contextmanager
    def streamliner(self, inputs: Inputs) -> Iterator[tuple[Streamliner, bool]]:
        """A streamliner, within `passing`, and whether passes draw random numbers."""
        with self.passing(inputs) as noisy, _lent(self._streamliners, noisy) as one:
            yield one, noisy


@contextmanager
def _lent(pool: Pool[T], anew: bool) -> Iterator[T]:
    """An object of the pool, or a new one of its kind."""
    with (Pool(pool.make) if anew else pool).borrow() as one:
        yield one
