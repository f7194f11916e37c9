"""Finds code of the library that makes a tensor or a generator without saying where.

A CPU build of torch has no device on which such code would fail. But a factory without a device gives a tensor on the
CPU whatever the model's device is, and that is what breaks on an accelerator: so every one of them is an error here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import bayesformer

HOME = str(Path(bayesformer.__file__).parent)
TORCH = str(Path(torch.__file__).parent)
# fmt: off
FACTORIES: frozenset[Callable[..., Any]] = frozenset({
    torch.zeros, torch.ones, torch.full, torch.empty, torch.eye, torch.arange, torch.range, torch.linspace,
    torch.logspace, torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.empty_strided, torch.rand, torch.randn,
    torch.randint, torch.randperm, torch.tril_indices, torch.triu_indices, torch.complex, torch.hann_window,
    torch.normal, torch.sparse_coo_tensor,
} - {torch.complex})
# fmt: on
TAKES_TENSORS = (torch.as_tensor, torch.normal)
"""with a tensor as first argument the result is where that is"""
MOVES = ("cuda", "xpu", "mps")

ALLOWED: frozenset[str] = frozenset()
"""`file:function` of calls that name no device on purpose, each with its reason"""


class UnnamedDeviceError(AssertionError):
    """Code of the library made something without naming its device."""


class DeviceWatch(TorchFunctionMode):
    """Raises where a line of the library calls a factory without `device`, or moves a tensor to a fixed accelerator."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        unnamed = func in FACTORIES and given.get("device") is None and not _follows(func, args)
        if unnamed or getattr(func, "__name__", "") in MOVES:
            _blame(func.__name__)
        return func(*args, **given)


def _follows(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether the result is on the device of a tensor that is given."""
    return func in TAKES_TENSORS and any(isinstance(value, torch.Tensor) for value in args)


def _blame(what: str) -> None:
    frame = caller(sys._getframe(2))
    if frame is None or not frame.f_code.co_filename.startswith(HOME):
        return
    place = f"{frame.f_code.co_filename.removeprefix(HOME + '/')}:{frame.f_code.co_name}"
    if place not in ALLOWED:
        raise UnnamedDeviceError(f"{what} without a device in bayesformer/{place}, line {frame.f_lineno}")


def caller(frame: FrameType | None) -> FrameType | None:
    """The line that made a call; modes that pass it on are skipped, and distributions, which make what is asked."""
    skipped = (f"{TORCH}/distributions", f"{TORCH}/overrides", f"{TORCH}/utils", f"{TORCH}/_tensor", f"{TORCH}/nn/init")
    while frame is not None:
        code = frame.f_code
        if code.co_name != "__torch_function__" and not code.co_filename.startswith(skipped):
            return frame
        frame = frame.f_back
    return None


class _Watched(type(torch.Generator)):
    """A stand-in for torch.Generator that every generator is an instance of."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.real)

    def __call__(cls, device: Any = None) -> torch.Generator:
        if device is None:
            _blame("torch.Generator")
        return cls.real() if device is None else cls.real(device)


@contextmanager
def watching_devices(monkeypatch: Any) -> Iterator[None]:
    """Every factory and generator of the library in this thread must name its device."""
    monkeypatch.setattr(torch, "Generator", _Watched("Generator", (), {"real": torch.Generator}))
    with DeviceWatch():
        yield
