"""Tensors and facts on disk: safetensors and JSON, written whole or not at all, read with suspicion."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save
from torch import Tensor

from bayesformer.core.errors import DamagedFileError

SMALL = 16 * 2**20
FACTS, SUM = "facts", "checksum"  # the metadata our files carry: a JSON object, and a hash of it and all tensors
ORDERS = "orders"  # and how tensors lie in memory, where that is not row by row
LONGEST = 256 * 2**20  # bytes of JSON that are read at all
NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}  # JSON has no such numbers


def check_folder(path: str | Path, name: str) -> Path:
    """The path of a folder that may not exist yet; refuses that of a file."""
    if Path(path).is_file():
        raise ValueError(f"{name} must be a folder; {path} is a file.")
    return Path(path)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`: a reader, or a crash, sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def plain(value: Any) -> Any:
    """The value as JSON knows it: lists, dicts with text keys, numbers; inf and nan as text, all else as its text."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str | type(None)) else str(value)


def write_json(path: Path, value: Any) -> None:
    """One line of JSON, in which infinities and NaN are the texts of `NOT_FINITE`; `with_numbers` reads them back."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:  # a number that JSON does not have
        text = json.dumps(with_texts(value), allow_nan=False)
    write_atomically(path, (text + "\n").encode())


def with_texts(value: Any) -> Any:
    """The value with "inf", "-inf" or "nan" in place of every float that is not finite, in lists and dicts, too."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {name: with_texts(entry) for name, entry in value.items()}
    return [with_texts(entry) for entry in value] if isinstance(value, list | tuple) else value


def with_numbers(value: Any) -> Any:
    """The value with floats in place of the texts "inf", "-inf" and "nan", in lists and dicts, too."""
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {name: with_numbers(entry) for name, entry in value.items()}
    return [with_numbers(entry) for entry in value] if isinstance(value, list) else value


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object, or an error naming the file."""
    try:
        _check_regular(path, what)
        if path.stat().st_size > LONGEST:
            raise DamagedFileError(f"{what} {path} must be at most {LONGEST} bytes; got {path.stat().st_size}.")
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{what} {path} does not exist.") from None
    except DamagedFileError:
        raise
    except (ValueError, RecursionError) as error:  # a JSONDecodeError, bad UTF-8, numbers without end: ValueErrors all
        raise DamagedFileError(f"{what} {path} is not valid JSON ({error}): truncated or altered.") from error
    except OSError as error:
        raise DamagedFileError(f"{what} {path} cannot be read: {error.strerror or error}.") from error
    if not isinstance(value, dict):
        raise DamagedFileError(f"{what} {path} must hold a JSON object; got {type(value).__name__}.")
    return value


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Tensors with their facts in one file, under one checksum."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    orders = {name: order for name, tensor in tensors.items() if (order := _order(tensor)) is not None}
    known = {FACTS: json.dumps(facts), **({ORDERS: json.dumps(orders)} if orders else {})}
    write_atomically(path, save(plain, metadata={**known, SUM: checksum(plain, "".join(known.values()))}))


def _order(tensor: Tensor) -> list[int] | None:
    """The axes of a tensor that is not row by row in memory, the slowest first; files have rows only.

    Factors of matrices are column by column, and a product with them is rounded otherwise than with their copy in rows.
    """
    if tensor.is_contiguous() or 0 in tensor.stride():
        return None
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _ordered(tensor: Tensor, order: list[int]) -> Tensor:
    """The tensor with its axes in this order in memory."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


def read_tensors(path: Path, what: str) -> dict[str, Tensor]:
    """Tensors in memory of their own, or an error naming the file and what is wrong with it."""
    with _reading(path, what):
        if path.stat().st_size < SMALL:
            tensors = load(path.read_bytes())  # one read beats mapping a small file
        else:
            # cloned, because mapped tensors are the file itself and would change or vanish with it
            tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        with safe_open(path, framework="pt") as file:
            known = file.metadata() or {}
    orders = known.get(ORDERS, "")
    if SUM in known and known[SUM] != checksum(tensors, known.get(FACTS, "") + orders):
        raise DamagedFileError(f"{what} {path} was altered: its checksum differs.")
    return tensors | {name: _ordered(tensors[name], order) for name, order in json.loads(orders or "{}").items()}


def read_checked(path: Path, what: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and the facts written with them, both under a checksum that must be there."""
    tensors = read_tensors(path, what)
    with _reading(path, what), safe_open(path, framework="pt") as file:
        known = file.metadata() or {}
        if SUM not in known or FACTS not in known:
            raise DamagedFileError(f"{what} {path} was altered: it has no checksum.")
        return tensors, json.loads(known[FACTS])


def _check_regular(path: Path, what: str) -> None:
    """Refuse folders, pipes and devices: to read them may take for ever."""
    if path.exists() and not path.is_file():
        raise DamagedFileError(f"{what} {path} must be a regular file; it is a folder, a pipe or a device.")


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    try:
        _check_regular(path, what)
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{what} {path} does not exist.") from None
    except DamagedFileError:
        raise
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise DamagedFileError(f"{what} {path} cannot be read ({error}): truncated or altered.") from error


def checksum(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """A hash of names, shapes, every byte and a text; XXH3, since it keeps up with the memory and SHA-256 does not."""
    digest = xxhash.xxh3_128(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
