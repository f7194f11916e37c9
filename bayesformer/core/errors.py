"""Errors that say what to do.

A wrong argument is a `ValueError` naming the argument, the rule and the value. The classes here are
for events a program may want to catch apart from those.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch


class DamagedFileError(ValueError):
    """A saved posterior or checkpoint that is truncated, altered or belongs to something else."""


class TrainingDivergedError(RuntimeError):
    """The loss became NaN or infinite."""


class OracleBeatenError(RuntimeError):
    """A method scored significantly above the true process, which only a leak can do."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is not in a list: says the name, the nearest one and the list."""
    names = sorted(known)
    if not names:
        return ValueError(f"unknown {kind} {name!r}; there is none.")
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(names)}.")


class WorkerDiedError(RuntimeError):
    """A worker process ended in the middle of a task: killed, out of memory, crashed, or by its own exit."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice: that of an accelerator, or the RuntimeError of the CPU's."""
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in words)
