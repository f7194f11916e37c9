"""Objects as bytes for another process on the same machine.

Functions and classes of a script, of `python -c` or of a notebook travel by value (cloudpickle). Tensors travel whole
in any dtype; tensors that share memory here share memory there. Tensors named as shared do not travel at all: they are
written once to a file which every process maps, so that processes that only read them pay for no copy of their own.
The bytes stay in memory and are read only by processes of the same program; the file holds tensors only.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from cloudpickle import CloudPickler
from torch import Tensor, nn

Mapped: TypeAlias = Mapping[int, "_Stored"]  # by the address of the memory that is in the file


def pack(value: object, mapped: Mapped | None = None) -> bytes:
    """The value as bytes; tensors whose memory is in `mapped` become references to its file."""
    return _dump(value, dict(mapped or {}), compact=False)


def pack_result(value: object) -> bytes:
    """The value as bytes, its tensors detached, moved to the CPU and without the memory around them.

    A row of a large matrix costs a row; tensors that shared memory are separate afterwards.
    """
    return _dump(value, {}, compact=True)


def unpack(data: bytes) -> Any:
    """The value that `pack` or `pack_result` was given."""
    return pickle.loads(data)


@contextmanager
def mapped_file(path: Path, tensors: Mapping[str, Tensor]) -> Iterator[Mapped]:
    """Write the memory of the tensors to a file while the block runs; what `pack` needs to refer to it."""
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise ValueError(f"shared tensors must be on the CPU; {name!r} is on {tensor.device}.")
    memory = {tensor.untyped_storage().data_ptr(): _bytes_of(tensor) for tensor in tensors.values() if tensor.numel()}
    if not memory:
        yield {}
        return
    file = _File(path)
    try:
        torch.save({str(address): content for address, content in memory.items()}, path)
        yield {address: _Stored(content, file, str(address)) for address, content in memory.items()}
    finally:
        path.unlink(missing_ok=True)


class _File:
    """A file of tensors; in the other process the tensors themselves, mapped once per unpacked object."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (str(self.path),)


class _Stored:
    """The memory of one or several tensors, which travels as its bytes or as its name in a file."""

    def __init__(self, content: Tensor, file: _File | None = None, key: str = "") -> None:
        self.content, self.file, self.key = content, file, key

    def __reduce__(self) -> tuple[Any, ...]:
        if self.file is not None:
            return _entry, (self.file, self.key)
        return _filled, (pickle.PickleBuffer(self.content.numpy().data),)


class _Pickler(CloudPickler):
    """cloudpickle with rules of its own for ordinary tensors and parameters."""

    def __init__(self, file: io.BytesIO, stored: dict[int, _Stored], compact: bool) -> None:
        super().__init__(file)
        self.stored, self.compact = stored, compact

    def reducer_override(self, obj: Any) -> Any:
        """How to rebuild an object: dense tensors by their memory, everything else as cloudpickle does."""
        if type(obj) not in (Tensor, nn.Parameter) or obj.layout != torch.strided or obj.is_quantized:
            return super().reducer_override(obj)
        state = vars(obj) or None  # attributes that were set on the tensor
        if self.compact:
            obj = _whole(obj)
        elif obj.device.type != "cpu" or obj.is_conj() or obj.is_neg():
            return super().reducer_override(obj)
        shape = obj.dtype, obj.storage_offset(), tuple(obj.shape), obj.stride()
        made = _view, (self._memory(obj), *shape, obj.requires_grad, isinstance(obj, nn.Parameter))
        return made if state is None else (*made, state, None, None, _set_attributes)

    def _memory(self, tensor: Tensor) -> _Stored:
        """The same object for all tensors that share memory, so that the bytes are written once."""
        address = tensor.untyped_storage().data_ptr()
        if not address or self.compact:
            return _Stored(_bytes_of(tensor))
        if address not in self.stored:
            self.stored[address] = _Stored(_bytes_of(tensor))
        return self.stored[address]


def _dump(value: object, stored: dict[int, _Stored], compact: bool) -> bytes:
    file = io.BytesIO()
    _Pickler(file, stored, compact).dump(value)
    return file.getvalue()


def _whole(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, alone in its memory and without a graph; a parameter stays one."""
    alone = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if alone.untyped_storage().nbytes() != alone.numel() * alone.element_size():
        alone = alone.clone()
    return nn.Parameter(alone, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else alone


def _bytes_of(tensor: Tensor) -> Tensor:
    """All memory that the tensor is a view of, as one uint8 vector."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _filled(content: bytearray) -> Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(content, dtype=torch.uint8)


def _open(path: str) -> dict[str, Tensor]:
    """Mapped copy-on-write: reading is free, and a change is seen by this process alone."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _entry(tensors: dict[str, Tensor], key: str) -> Tensor:
    return tensors[key]


def _set_attributes(tensor: Tensor, attributes: dict[str, Any]) -> None:
    vars(tensor).update(attributes)


def _view(
    memory: Tensor,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    gradient: bool,
    parameter: bool,
) -> Tensor:
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(memory.untyped_storage(), offset, shape, stride)
    return nn.Parameter(tensor, gradient) if parameter else tensor.requires_grad_(gradient)
