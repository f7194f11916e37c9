"""Results of a study whose cells are not those of `bayesformer run`: one JSON line per cell, in the same form.

A line is appended when its cell is done. A study that is called again reads them and does what is missing; a line that
was cut off counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bayesformer.bench.provenance import provenance
from bayesformer.bench.records import read_lines
from bayesformer.core.errors import DamagedFileError
from bayesformer.core.storage import with_texts


@dataclass(frozen=True)
class StudyCell:
    """What is done at a time: a name of the task and the method, the seed, and every setting."""

    task: str
    method: str
    seed: int
    settings: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Eight hexadecimal digits from a hash of task, method and settings."""
        facts = [self.task, self.method, dict(self.settings)]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


class CellLog:
    """The stored cells of a study, in one file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Results by key and seed; of a cell stored twice the later line counts."""
        if not self.path.exists():
            return {}
        found = [record for record in read_lines(self.path) if not isinstance(record, DamagedFileError)]
        return {(record.result["key"], record.result["seed"]): record.result for record in found}

    def add(
        self,
        cell: StudyCell,
        metrics: Mapping[str, float],
        cost: Mapping[str, float],
        figures: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Append the result of a cell, whole and on a line of its own."""
        result = {
            "task": cell.task,
            "method": cell.method,
            "seed": cell.seed,
            "key": cell.key,
            "settings": dict(cell.settings),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            **provenance(),
            "metrics": dict(metrics),
            "cost": dict(cost),
            "figures": dict(figures or {}),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(with_texts(result)).encode() + b"\n"
        place = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if self._torn():
                line = b"\n" + line
            os.write(place, line)
        finally:
            os.close(place)
        return result

    def _torn(self) -> bool:
        """Whether the last line has no end: a write that was cut off."""
        content = self.path.read_bytes()
        return bool(content) and not content.endswith(b"\n")
