"""What runs inside a worker process: one task after the other, until the parent ends it or is gone."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import parent_process
from typing import Any

import torch

from bayesformer.core.progress import Queued, Reporter
from bayesformer.core.transfer import pack_result, unpack

PARENT_SECONDS = 0.5  # between two looks at whether the parent still lives


@dataclass
class _Worker:
    """What this process has been given, if it is a worker."""

    reporter: Reporter | None = None
    call: int = 0
    fn: Callable[[Any, Reporter], Any] | None = None


_here = _Worker()  # filled in when a worker process starts


def in_worker() -> bool:
    """Whether this process is a worker, which never starts workers of its own."""
    return _here.reporter is not None


class _Lines:
    """A file of reports for the parent to read, one JSON list per line."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115  as long as the process lives

    def put(self, news: tuple[str, int, int, str]) -> None:
        """Append one progress report (task, units done, units in total, note) to the file, as a line of JSON."""
        task, done, total, note = news
        self.file.write(json.dumps([task, int(done), int(total), str(note)]) + "\n")
        self.file.flush()


def become_worker(folder: str, news: str, words: str, parent: int) -> None:
    """Make this process a worker: one thread, Ctrl-C ignored (the parent acts on it), ended when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = os.open(words, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 2)
    os.close(file)
    threading.Thread(target=_end_with_parent, args=(folder, parent), daemon=True).start()
    torch.set_num_threads(1)
    # A DataLoader with workers starts them by the default method, which is loky's here and is not meant for others.
    multiprocessing.set_start_method("fork" if sys.platform == "linux" else "spawn", force=True)
    _here.reporter = Queued(_Lines(news))


def _end_with_parent(folder: str, parent: int) -> None:
    """End this process, and delete its files, when the parent is gone, even by a kill."""
    if sys.platform == "win32":
        started_by = parent_process()
        assert started_by is not None
        started_by.join()
    else:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def serve(call: int, fn: bytes | None, argument: bytes) -> bytes | None:
    """Do a task: (result, None, "") or (None, the exception as bytes, its traceback); None if `fn` is not here."""
    assert _here.reporter is not None
    try:
        if fn is not None:
            _here.call, _here.fn = call, unpack(fn)
        if _here.call != call or _here.fn is None:
            return None
        return pack_result((_here.fn(unpack(argument), _here.reporter), None, ""))
    except BaseException as error:
        return pack_result((None, _as_bytes(error), traceback.format_exc()))


def _as_bytes(error: BaseException) -> bytes | None:
    """The exception, or None if it does not survive: some cannot be made again from their arguments."""
    if not isinstance(error, Exception):  # sys.exit in a task must not end the parent
        return None
    try:
        data = pack_result(error)
        unpack(data)
    except Exception:  # whatever it is, the traceback tells the rest
        return None
    return data


def drop_function() -> None:
    """Drop the function of the last call, and with it what it has mapped; functions are often part of cycles."""
    _here.call, _here.fn = 0, None
    gc.collect()
