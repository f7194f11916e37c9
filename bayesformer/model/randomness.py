"""Randomness of a forward and backward pass, thread by thread: equal generators give equal passes.

`pass_noise(generator)` lets everything that a pass draws come from one generator: dropout and all other random
functions of torch that the model calls, and the library's own attention and layers. Nothing global is touched, so
that any number of threads may run passes at once. What cannot be given a generator (numpy and `random` inside a
model, segments that are computed again during the backward pass) needs the global streams. `find_randomness` looks
which of this a model does, by one trial pass, and `Randomness.passing` is the right context manager for it:

    randomness = find_randomness(model, lambda: model(x), backward=True)
    with randomness.passing(generator):
        loss(model(x)).backward()

Where the global streams are needed, a pass with its backward pass holds a lock of the process, and the streams are
seeded from the generator and restored afterwards. Threads of the library then wait for each other; a user's own
thread that draws from a global stream at that moment can still disturb them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from bayesformer.core.compat import ElementaryMode, tree_leaves
from bayesformer.core.draws import Generators, drawing_from
from bayesformer.core.global_random import GLOBAL_STREAMS, global_streams
from bayesformer.model.pass_mode import (
    PassMode,
    bound,
    device_of,
    draws_numbers,
    in_parts,
    in_training,
    taking_generator,
)


@contextmanager
def pass_noise(generators: Generators, dropout_rate: float | None = None) -> Iterator[PassMode]:
    """Let every draw of a pass in this thread come from the given generators; torch's global stream is not touched.

    Gives the mode that it is done by, whose `called` names the random functions of torch that were called.

    Args:
        generators: one, on the device of the weights; or one per row of the leading axis, where several draws go
            through one pass (our own attention and layers know that axis, a user's own dropout does not: an error).
        dropout_rate: of every dropout that is in force (modules in training mode, and every fused attention, which
            does not know the mode), in the place of its own rate; 0.0 switches dropout off.
    """
    if dropout_rate is not None and not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate must be at least 0 and below 1; got {dropout_rate}.")
    with drawing_from(generators, dropout_rate), PassMode() as mode:
        yield mode


@contextmanager
def plain_attention() -> Iterator[None]:
    """Scaled dot-product attention as products and a softmax, in this thread, which is what vmap can batch.

    The fused kernel of the CPU has no batching rule: under vmap it would run for one member after the other.
    """
    with PassMode(plain=True):
        yield


@dataclass(frozen=True)
class Randomness:
    """What a model draws during a pass; made by `find_randomness`."""

    functions: tuple[str, ...] = ()
    """random functions of torch that the model calls"""
    library: bool = False
    """whether attention or layers of this library draw, and nothing else does"""
    torch_stream: str = ""
    """why torch's global stream is needed; empty if it is not"""
    python_streams: str = ""
    """why the global streams of numpy or `random` are needed; empty if they are not"""
    unrepeatable: str = ""
    """why two passes with equal seeds can differ all the same; empty if they cannot"""

    @property
    def kind(self) -> Literal["none", "own", "global"]:
        """Whether a pass draws nothing, draws from the generator that it is given, or needs a global stream."""
        if self.torch_stream or self.python_streams:
            return "global"
        return "own" if self.functions or self.library else "none"

    @contextmanager
    def passing(
        self, generators: Generators, dropout_rate: float | None = None, watch: bool = False
    ) -> Iterator[PassMode | None]:
        """Around a pass and its backward pass: all that they draw is determined by the generators; see `pass_noise`.

        With `watch`, random functions of torch are given the generator even if the model calls none: for code around
        the pass, such as a step of an algorithm, that may call some. Gives the mode, if it is on, or None.
        """
        if self.kind == "global":
            with self._global(generators, dropout_rate) as mode:
                yield mode
        elif watch or self.functions or dropout_rate is not None:
            with pass_noise(generators, dropout_rate) as mode:
                yield mode
        else:
            with drawing_from(generators):
                yield None

    @contextmanager
    def _global(self, generators: Generators, dropout_rate: float | None) -> Iterator[PassMode | None]:
        one, *others = (generators,) if isinstance(generators, torch.Generator) else generators
        if others:
            reason = self.torch_stream or self.python_streams
            raise RuntimeError(f"{1 + len(others)} draws cannot be made in one pass: {reason}.")
        if self.torch_stream and dropout_rate is not None:
            raise ValueError(
                f"dropout_rate cannot be {dropout_rate} here, it must be None: {self.torch_stream}, and would do so at "
                "the model's own rates. Switch gradient checkpointing off, or change the rates in the model."
            )
        seed = int(torch.empty((), dtype=torch.int64, device=one.device).random_(generator=one))
        with global_streams(seed, torch_too=bool(self.torch_stream)):
            if self.torch_stream:  # what is computed again is not seen by a mode: it must be torch's own dropout twice
                with drawing_from(()):
                    yield None
            else:
                with pass_noise(one, dropout_rate) as mode:
                    yield mode


TRIAL = 0x5EED_0F_A_7121A1  # a seed that no model is likely to use for a generator of its own


def find_randomness(
    module: nn.Module, call: Callable[[], Any], backward: bool = False, dropout_rate: float | None = None
) -> Randomness:
    """What a module draws in the mode it is in, by one trial pass that leaves buffers, gradients and streams as before.

    Torch's draws are told apart by the operations of this thread alone, whatever other threads do. Where numpy's or
    `random`'s stream has moved, a second trial tells whether it was the module, while other threads of the library keep
    away. A user's own thread that draws from them at that moment is taken for the module: its passes are then locked.

    Args:
        module: whose buffers and gradients are restored.
        call: runs the forward pass; tensors in what it returns are summed for the backward pass.
        backward: whether a backward pass belongs to it.
        dropout_rate: as the passes will be given it.
    """
    alone, before = _nobody_seeds(), _python_states()
    found = _tried(module, call, backward, dropout_rate)
    if not _moved(before):
        return found
    with GLOBAL_STREAMS:
        with global_streams(TRIAL, torch_too=False):
            seeded = _python_states()
            found = _tried(module, call, backward, dropout_rate)
            moved = _moved(seeded)
        if moved and alone:
            numpy.random.set_state(before["numpy"])  # noqa: NPY002
            random.setstate(before["random"])
    return replace(found, python_streams=f"the model draws from the global stream of {moved}" if moved else "")


def _tried(module: nn.Module, call: Callable[[], Any], backward: bool, dropout_rate: float | None) -> Randomness:
    """What one trial pass draws by functions of torch."""
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    generator = torch.Generator(device).manual_seed(TRIAL)
    watch, mode = _Watch(generator), PassMode()
    grad = backward or torch.is_grad_enabled()
    with restored(module), torch.set_grad_enabled(grad), drawing_from(generator, dropout_rate), watch, mode:
        outputs = _tensors(call())
        if backward:
            watch.in_backward = True
            try:
                _total(outputs).backward()
            except CheckpointError:  # dropout in fused attention is taken apart in the forward pass alone
                watch.reason = "the backward pass computes checkpointed segments again, with dropout in them"
    return Randomness(
        functions=tuple(sorted(mode.called)),
        library=watch.given and not mode.called,
        torch_stream=watch.reason,
        unrepeatable=watch.unrepeatable,
    )


class _Watch(ElementaryMode):
    """Looks which elementary operations of this thread draw, and from where; also those of the backward pass."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator, self.in_backward = generator, False
        self.given, self.reason, self.unrepeatable = False, "", ""
        self.scratch: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        parts = in_parts(self, func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        if draws_numbers(func):
            given = bound(func, args, kwargs)
            if in_training(func, given):
                self._note(func.overloadpacket.__name__, given.get("generator"))
                with_generator = taking_generator(func)
                if given.get("generator") is None and with_generator is not None:  # let the trial move no global stream
                    return with_generator(self._scratch(device_of(args, given)), given)
        return func(*args, **(kwargs or {}))

    def _scratch(self, device: torch.device) -> torch.Generator:
        if device not in self.scratch:
            self.scratch[device] = torch.Generator(device).manual_seed(TRIAL + 1)
        return self.scratch[device]

    def _note(self, name: str, generator: torch.Generator | None) -> None:
        if self.in_backward:
            self.reason = f"the backward pass draws again ({name}), as checkpointed segments do"
        elif generator is None:
            self.reason = self.reason or f"{name} takes no generator"
        elif self._ours(generator):
            self.given = True
        else:
            self.unrepeatable = f"the model draws from a generator of its own ({name})"

    def _ours(self, generator: torch.Generator) -> bool:
        """Generators come here as new objects and cannot be compared, but for their states."""
        if generator.device.type != self.generator.device.type:
            return True  # made for another device, see PassMode.generator
        return torch.equal(generator.get_state(), self.generator.get_state())


def _tensors(outputs: Any) -> list[Tensor]:
    return [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]


def _total(outputs: list[Tensor]) -> Tensor:
    learned = [x.float().sum() for x in outputs if x.requires_grad]
    if not learned:
        raise ValueError("call must return a tensor with a gradient for a trial with a backward pass; got none.")
    return torch.stack(learned).sum()


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Buffers and gradients as before, the latter by identity: they may be views of a vector.

    Gradients of the pass are thrown away one by one, so that they never take the memory of all weights.
    """
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    gradients = [(p, p.grad) for p in module.parameters() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(_forget) for p, _ in gradients]
    try:
        for p, _ in gradients:
            p.grad = None
        yield
    finally:
        for handle in handles:
            handle.remove()
        for p, grad in gradients:
            p.grad = grad
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _python_states() -> dict[str, Any]:
    return {"numpy": numpy.random.get_state(legacy=False), "random": random.getstate()}  # noqa: NPY002


def _moved(before: dict[str, Any]) -> str:
    """Which streams have moved since, for a sentence; empty if none has."""
    now = _python_states()
    numbers = not _equal(now["numpy"]["state"], before["numpy"]["state"])
    moved = (["numpy"] if numbers else []) + (["random"] if now["random"] != before["random"] else [])
    return " and ".join(moved)


def _nobody_seeds() -> bool:
    """Whether no other thread is using the global streams under seeds of its own at this moment."""
    free = GLOBAL_STREAMS.acquire(blocking=False)
    if free:
        GLOBAL_STREAMS.release()
    return free


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(numpy.array_equal(a[key], b[key]) for key in a)
