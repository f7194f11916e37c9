"""Stored results in their two forms: a file per cell, and one file of JSON lines per experiment.

`bayesformer run` writes every cell to FOLDER/TASK/METHOD-KEY/seedN.json as soon as it is done, so that a killed run
loses nothing. `bayesformer results pack` moves them to FOLDER/NAME.jsonl, one cell per line. Everything here reads
both forms, also side by side in one folder; what cannot be read is named and left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bayesformer.core.errors import DamagedFileError
from bayesformer.core.storage import NOT_FINITE, with_numbers

FAILED, CHECKPOINTS, POSTERIORS = "failed", ".checkpoints", "posteriors"
ASIDE = {FAILED, CHECKPOINTS, POSTERIORS}
"""Folders beside the results that hold something else."""
REQUIRED = {"task": str, "method": str, "seed": int, "metrics": dict, "cost": dict}
OPTIONAL = {"key": str, "variant": str, "primary": str, "started": str, "settings": dict, "figures": dict}
"""Types of what every result has, and of what it may lack."""
NUMERIC = ("settings", "fit", "validation", "cost", "metrics", "oracle", "checks")
"""Parts in which infinities and NaN are written as text."""


class Record(NamedTuple):
    """One stored cell, and where it was found."""

    path: Path  # the cell's own file, or the one it would have
    source: str  # "FILE" or "FILE, line N"
    line: bytes  # JSON without the end of the line
    result: dict[str, Any]

    @property
    def label(self) -> str:
        """Task, method, key and seed as one text for messages."""
        return str(Path(*self.path.parts[-3:]).with_suffix(""))


@dataclass(frozen=True)
class Stored:
    """What a results folder holds: at most one record per cell, in the order of their paths."""

    records: list[Record]
    damaged: list[str]  # a sentence for every file or line that cannot be read
    repeated: list[str]  # a sentence for every cell that was found more than once

    @property
    def results(self) -> list[dict[str, Any]]:
        """The results alone, in the same order."""
        return [record.result for record in self.records]

    @property
    def paths(self) -> set[Path]:
        """Paths of all cells that have a readable result."""
        return {record.path for record in self.records}


def cell_path(task: str, method: str, key: str, seed: int) -> Path:
    """The file of a cell, relative to the results folder: TASK/METHOD-KEY/seedN.json with "/" in TASK as "-"."""
    return Path(task.replace("/", "-")) / f"{method}-{key}" / f"seed{seed}.json"


def read_results(folder: Path) -> Stored:
    """All results below a folder, of both forms. Of a cell that is stored twice the one that started later counts.

    Raises FileNotFoundError if there is no such folder; damaged files and lines are listed in the answer instead.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"results folder {folder} does not exist.")
    found: dict[Path, list[Record]] = {}
    damaged = []
    for path in sorted([*folder.rglob("seed*.json"), *folder.rglob("*.jsonl")]):
        if ASIDE & set(path.relative_to(folder).parts) or not path.is_file():
            continue
        for record in read_lines(path) if path.suffix == ".jsonl" else [read_cell(path)]:
            if isinstance(record, DamagedFileError):
                damaged.append(str(record))
            else:
                found.setdefault(record.path, []).append(record)
    repeated = [_twice(several) for several in found.values() if len(several) > 1]
    return Stored([newest(found[path]) for path in sorted(found)], damaged, repeated)


def read_cell(path: Path) -> Record | DamagedFileError:
    """The record of a cell that has a file of its own, or what is wrong with the file."""
    try:
        content = path.read_bytes().strip()
        return Record(path, str(path), content, parse(content, str(path)))
    except DamagedFileError as error:
        return error
    except OSError as error:
        return DamagedFileError(f"result {path} cannot be read: {error.strerror}.")


def read_lines(path: Path) -> Iterator[Record | DamagedFileError]:
    """The record of every line of a packed file, or what is wrong with the line; empty lines do not count."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        yield DamagedFileError(f"results {path} cannot be read: {error.strerror}.")
        return
    for number, line in enumerate(lines, 1):
        source = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            result = parse(line, source)
            if not isinstance(result.get("key"), str):
                raise DamagedFileError(f"result {source} lacks key, which names the cell.")
        except DamagedFileError as error:
            yield error
        else:
            own = cell_path(result["task"], result["method"], result["key"], result["seed"])
            yield Record(path.parent / own, source, line.strip(), result)


def parse(line: bytes, source: str) -> dict[str, Any]:
    """A result from its JSON; a DamagedFileError names the source if it is not one."""
    try:
        result = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"result {source} is not valid JSON ({error}): truncated or altered.") from error
    if not isinstance(result, dict):
        raise DamagedFileError(f"result {source} must hold a JSON object; got {type(result).__name__}.")
    if lacking := sorted(REQUIRED.keys() - result.keys()):
        raise DamagedFileError(f"result {source} lacks {', '.join(lacking)}.")
    for name, kind in {**REQUIRED, **{k: v for k, v in OPTIONAL.items() if k in result}}.items():
        if not isinstance(result[name], kind) or isinstance(result[name], bool):
            raise DamagedFileError(f"result {source}: {name} must be {kind.__name__}; got {result[name]!r:.40}.")
    if any(f'"{text}"'.encode() in line for text in NOT_FINITE):
        result |= {name: with_numbers(result[name]) for name in NUMERIC if name in result}
    return result


def newest(records: list[Record]) -> Record:
    """Of several records of one cell the one that started last; in a tie the one with a file of its own."""
    return max(records, key=lambda r: (str(r.result.get("started") or ""), r.source == str(r.path)))


def _twice(records: list[Record]) -> str:
    places = " and ".join(record.source for record in records)
    if all(record.line == records[0].line for record in records):
        return f"cell {records[0].label} is stored in {places}, with the same content."
    return f"cell {records[0].label} is stored in {places}; the newer one, of {newest(records).source}, counts."
