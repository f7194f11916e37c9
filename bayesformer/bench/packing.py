"""Packs the results of an experiment: from a file per cell to one file of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bayesformer.bench.records import ASIDE, Record, cell_path, newest, read_cell, read_lines
from bayesformer.core.errors import DamagedFileError
from bayesformer.core.storage import write_atomically


class Packing(NamedTuple):
    """The outcome of packing one results folder."""

    path: Path  # the file of lines
    cells: int  # in it now
    moved: int  # files of single cells that are now lines of it
    replaced: list[str]  # cells of which an older result was given up
    left: list[str]  # why a file stays where it is


def pack(folder: Path) -> Packing:
    """Move every cell FOLDER/TASK/METHOD-KEY/seedN.json to a line of FOLDER/NAME.jsonl, NAME being the folder's.

    A line is the file's content, unchanged. Lines are sorted by task, method, key and seed, so that packing twice, or
    the same cells in another order, gives the same bytes. Of two results of a cell the later one stays. The new file
    is on disk before a cell's file is removed. Files that cannot be read, and figures, posteriors and failures beside
    them, stay where they are.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"results folder {folder} does not exist.")
    target = folder / f"{folder.resolve().name}.jsonl"
    with _alone(folder):
        packed = sorted(path for path in folder.glob("*.jsonl") if path.is_file())
        lines = [_whole(record) for path in packed for record in read_lines(path)]
        own, left = _own_files(folder)
        if not lines and not own:
            reason = f"; {left[0]}" if left else "."
            raise ValueError(f"results folder {folder} must hold cells, TASK/METHOD-KEY/seedN.json; got none{reason}")
        found: dict[Path, list[Record]] = {}
        for record in [*lines, *own]:
            found.setdefault(record.path, []).append(record)
        kept = {path: newest(records) for path, records in found.items()}
        content = b"".join(_one_line(kept[path]) + b"\n" for path in sorted(kept, key=_order))
        write_atomically(target, content)
        for path in [*(record.path for record in own), *(path for path in packed if path != target)]:
            path.unlink()
            _remove_empty(path.parent, folder)
    replaced = [kept[p].label for p, several in found.items() if any(r.line != kept[p].line for r in several)]
    return Packing(target, len(kept), len(own), replaced, left)


def _own_files(folder: Path) -> tuple[list[Record], list[str]]:
    """Cells with a file of their own, and sentences on those that cannot become a line."""
    records, left = [], []
    for path in sorted(folder.glob("*/*/seed*.json")):
        if path.relative_to(folder).parts[0] in ASIDE or not path.is_file():
            continue
        record = read_cell(path)
        if isinstance(record, DamagedFileError):
            left.append(str(record))
            continue
        result = record.result
        named = folder / cell_path(result["task"], result["method"], str(result.get("key")), result["seed"])
        if named == path:
            records.append(record)
        else:
            left.append(f"result {path} says that it belongs to {named}, and was left.")
    return records, left


def _whole(record: Record | DamagedFileError) -> Record:
    """A line that can be read; packing would lose any other."""
    if isinstance(record, DamagedFileError):
        raise DamagedFileError(f"{record} Mend or delete the line before packing.")
    return record


def _one_line(record: Record) -> bytes:
    """The record's JSON on one line, byte for byte unless it was spread over several."""
    several = b"\n" in record.line or b"\r" in record.line
    return json.dumps(json.loads(record.line)).encode() if several else record.line


def _order(path: Path) -> tuple[str, str, int]:
    task, method, seed = path.parts[-3:]
    return task, method, int(seed.removeprefix("seed").removesuffix(".json"))


def _remove_empty(path: Path, folder: Path) -> None:
    while path != folder and not any(path.iterdir()):
        path.rmdir()
        path = path.parent


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process packs this folder: two at once could give up each other's cells."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
