"""A skeleton on its way to another process: structure by value as bytes, tensors apart so that a file can be mapped."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import cloudpickle
from torch import Tensor, nn

from bayesformer.model.admission import view_key
from bayesformer.model.walk import reduce_module

if TYPE_CHECKING:
    from bayesformer.model.skeleton import Skeleton

CARRIED = ("space", "data", "leaves", "table", "weights", "device", "wide", "widened", "origin", "facts")
LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}


class _Writer(cloudpickle.Pickler):
    """cloudpickle with tensors put aside and locks made anew."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors = dict[str, Tensor]()
        self._keys = dict[Any, str]()

    def persistent_id(self, obj: Any) -> str | None:
        """A key for every tensor, the same for equal views of the same memory."""
        if not issubclass(type(obj), Tensor):
            return None
        key = self._keys.setdefault(view_key(obj), str(len(self._keys)))
        self.tensors.setdefault(key, obj.detach())
        return key

    def reducer_override(self, obj: Any) -> Any:
        """A new lock for a lock, cloudpickle's own ways for the rest."""
        if issubclass(type(obj), nn.Module):  # reached from a class or a function: not built, but held
            return reduce_module(obj)
        maker = LOCKS.get(type(obj))
        return (maker, ()) if maker is not None else super().reducer_override(obj)


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self.tensors = tensors

    def persistent_load(self, key: str) -> Tensor:
        return self.tensors[key]


def dump(skeleton: Skeleton) -> tuple[bytes, dict[str, Tensor]]:
    """Bytes of the structure and the tensors by key; raises where an attribute cannot leave the process."""
    file = io.BytesIO()
    writer = _Writer(file)
    state = {key: getattr(skeleton, key) for key in CARRIED}
    try:
        writer.dump(state)
    except Exception as error:  # whatever the own code of an attribute's class raises
        raise ValueError(
            f"model must be able to leave the process; something it holds is not: {error}. "
            "Remove it from the model or work without processes."
        ) from error
    return file.getvalue(), writer.tensors


def load(structure: bytes, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The attributes of a skeleton from what `dump` gave."""
    state: dict[str, Any] = _Reader(structure, tensors).load()
    return state
