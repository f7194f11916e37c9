"""Work spread over processes of this machine.

Every worker is a loky pool (of joblib) with one process. So a death is known to be of one task, and the other workers
go on; nothing needs a main guard or an importable function. Workers write progress and standard error to files of a
temporary folder, which the parent reads while it waits: a killed worker can leave no lock behind. Starting one takes as
long as importing torch, several seconds; a `Workers` that is kept open serves many calls.
"""

from __future__ import annotations

import codecs
import json
import os
import pickle
import re
import reprlib
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from bayesformer.core.errors import WorkerDiedError
from bayesformer.core.progress import Reporter, Silent
from bayesformer.core.serving import become_worker, drop_function, in_worker, serve
from bayesformer.core.transfer import mapped_file, pack, unpack

POLL_SECONDS = 0.1  # between looks at the files of the workers
LAST_WORDS = 2000  # characters of a dead worker's standard error that its error repeats
EXTENSIONS = re.compile(r"^Extension modules: .*$", re.MULTILINE)  # a long line that ends Python's report of a crash
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Failure:
    """What stands in place of a result when a task failed and the others were to go on."""

    index: int
    error: Exception


def cores() -> int:
    """Processors this process may use; 1 inside a worker."""
    if in_worker():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_workers(workers: object) -> int:
    """The number of workers, if it is a whole number of at least 1."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers must be a whole number of at least 1; got {workers!r}.")
    return workers


def run_in_processes(
    fn: Callable[[Any, Reporter], Any],
    arguments: Sequence[Any],
    workers: int | Workers,
    reporter: Reporter | None = None,
    shared: Mapping[str, Tensor] | None = None,
    keep_going: bool = False,
) -> Iterator[tuple[int, Any]]:
    """Yield `(i, fn(arguments[i], reporter))` as each ends, from worker processes of one torch thread each.

    Args:
        fn: what to do; any callable, also of a script or a notebook. Tensors in its result arrive on the CPU.
        arguments: one per task; tasks start in this order.
        workers: how many processes, or open `Workers`. Inside a worker the tasks run one after the other.
        reporter: hears, in the caller's thread, what `fn` reports in a worker.
        shared: tensors that `fn` or `arguments` hold and only read. They are not sent: workers map one file, which
            is deleted in the end.
        keep_going: yield `(i, Failure(i, error))` for a task that fails and do the others, instead of raising. An
            exception is raised as itself, with the worker's traceback as a note; a dead worker is a `WorkerDiedError`.
    """
    count = workers if isinstance(workers, Workers) else check_workers(workers)
    reporter = reporter or Silent()
    if in_worker() or not len(arguments):
        return _one_after_the_other(fn, arguments, reporter, keep_going)
    return _spread(fn, arguments, count, reporter, shared or {}, keep_going)


def _spread(
    fn: Callable[[Any, Reporter], Any],
    arguments: Sequence[Any],
    workers: int | Workers,
    reporter: Reporter,
    shared: Mapping[str, Tensor],
    keep_going: bool,
) -> Iterator[tuple[int, Any]]:
    if isinstance(workers, Workers):
        yield from workers.run(fn, arguments, reporter, shared, keep_going)
        return
    with Workers(min(workers, len(arguments))) as pool:
        yield from pool.run(fn, arguments, reporter, shared, keep_going)


def _one_after_the_other(
    fn: Callable[[Any, Reporter], Any], arguments: Sequence[Any], reporter: Reporter, keep_going: bool
) -> Iterator[tuple[int, Any]]:
    for i, argument in enumerate(arguments):
        try:
            result = fn(argument, reporter)
        except Exception as error:
            if not keep_going:
                raise
            result = Failure(i, error)
        yield i, result


class Workers:
    """Some worker processes, started when first needed and kept until the block ends. One call uses them at a time."""

    def __init__(self, count: int) -> None:
        self.count = check_workers(count)
        self._folder = tempfile.TemporaryDirectory(prefix="bayesformer-", ignore_cleanup_errors=True)
        self._slots = [_Slot(Path(self._folder.name), i) for i in range(count)]
        self._calls = 0
        self._running = threading.Lock()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and delete their files."""
        for slot in self._slots:
            slot.stop()
        self._folder.cleanup()

    def run(
        self,
        fn: Callable[[Any, Reporter], Any],
        arguments: Sequence[Any],
        reporter: Reporter,
        shared: Mapping[str, Tensor],
        keep_going: bool,
    ) -> Iterator[tuple[int, Any]]:
        """As `run_in_processes`. When the caller stops early, by an error or Ctrl-C, running tasks are killed."""
        if not self._running.acquire(blocking=False):
            raise RuntimeError("these Workers are busy with another call; open others for it.")
        self._calls += 1
        try:
            with mapped_file(Path(self._folder.name) / f"shared-{self._calls}.pt", shared) as mapped, self._tidied():
                tasks = [(i, one, _packed(one, f"arguments[{i}]", mapped)) for i, one in enumerate(arguments)]
                call = _Call(self._calls, _packed(fn, "fn", mapped), deque(tasks))
                yield from self._results(call, reporter, keep_going)
        finally:
            self._running.release()

    def _results(self, call: _Call, reporter: Reporter, keep_going: bool) -> Iterator[tuple[int, Any]]:
        busy = {slot.begin(call): slot for slot in self._slots[: len(call.waiting)]}
        while busy:
            done, _ = wait(busy, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            self._listen(reporter)
            for future in done:
                slot = busy.pop(future)
                index, outcome = slot.end(future)
                if isinstance(outcome, _Again):
                    busy[slot.resend(call)] = slot
                    continue
                if isinstance(outcome, Failure) and not keep_going:
                    raise outcome.error
                if call.waiting:  # before the caller gets the result, whatever time it takes over it
                    busy[slot.begin(call)] = slot
                yield index, outcome

    @contextmanager
    def _tidied(self) -> Iterator[None]:
        """Afterwards no worker is busy, and none holds on to what the call gave it."""
        try:
            yield
        finally:
            for slot in self._slots:
                slot.release()

    def _listen(self, reporter: Reporter) -> None:
        for slot in self._slots:
            slot.listen(reporter)


@dataclass
class _Call:
    """One call: its function as bytes, and the tasks that no worker has begun, with their arguments as bytes."""

    number: int
    fn: bytes
    waiting: deque[tuple[int, Any, bytes]]


class _Again:
    """Answer of a worker that does not have the function of this call: loky may replace a process between tasks."""


class _Slot:
    """One worker process, with its files. A dead or stopped process is replaced at the next task."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number, self.lives = folder, number, 0
        self.executor: Any = None
        self.unfinished = ""  # a line of news of which only the beginning is there
        self.task: tuple[int, Any, bytes] | None = None  # the one it works on
        self.call = 0  # the call whose function it has
        self.future: Future[Any] | None = None  # of the last thing it was given

    def begin(self, call: _Call) -> Future[bytes | None]:
        """Give the worker the next task that waits."""
        self.task = task = call.waiting.popleft()
        try:
            return self._send(call, task)
        except BrokenProcessPool:  # the process died while it had nothing to do
            self.stop()
            return self._send(call, task)

    def resend(self, call: _Call) -> Future[bytes | None]:
        """Give the worker its task again, with the function."""
        assert self.task is not None
        self.call = 0
        return self._send(call, self.task)

    def _send(self, call: _Call, task: tuple[int, Any, bytes]) -> Future[bytes | None]:
        self.task = task
        if self.executor is None:
            self._start()
        fn = None if self.call == call.number else call.fn
        self.call = call.number
        self.future = self.executor.submit(serve, call.number, fn, task[2])
        return self.future

    def end(self, future: Future[bytes | None]) -> tuple[int, Any]:
        """The index of the task and its result, its `Failure`, or that the worker wants the function again."""
        assert self.task is not None
        index, argument, _ = self.task
        try:
            answer = future.result()
        except BrokenProcessPool as broken:
            dead = self._death(index, argument, broken)
            self.stop()
            return index, Failure(index, dead)
        if answer is None:
            return index, _Again()
        self.task = None
        result, error, trace = unpack(answer)
        return index, result if not trace else Failure(index, _error(error, trace, index))

    def release(self) -> None:
        """Kill the worker if it is busy; else let it drop its function, whose tensors may be mapped."""
        if self.task is not None:
            self.stop()
        elif self.executor is not None and self.call:
            self.call = 0
            try:
                self.future = self.executor.submit(drop_function)
            except BrokenProcessPool:
                self.stop()

    def stop(self) -> None:
        """End the process at once, whatever it does."""
        self.task, self.call = None, 0
        if self.executor is not None:
            self._wait_until_taken()
            self.executor.shutdown(wait=True, kill_workers=True)
            self.executor = self.future = None

    def listen(self, reporter: Reporter) -> None:
        """Pass on what the worker has reported and written to standard error since the last time."""
        if self.executor is None:
            return
        if (words := self.words.read()) and sys.stderr is not None:
            sys.stderr.write(words)
        lines = (self.unfinished + self.news.read()).split("\n")
        self.unfinished = lines.pop()
        for line in lines:
            reporter.update(*json.loads(line))

    def _wait_until_taken(self) -> None:
        """Let loky's thread take what was submitted last, a millisecond: in between, a shutdown makes it raise."""
        end = time.monotonic() + 1.0
        while self.future and not (self.future.running() or self.future.done()) and time.monotonic() < end:
            time.sleep(0.001)

    def _start(self) -> None:
        from joblib.externals.loky import ProcessPoolExecutor

        self.lives += 1
        files = [self.folder / f"{self.number}-{self.lives}.{kind}" for kind in ("news", "stderr")]
        self.news, self.words = map(_Tail, files)
        self.unfinished = ""
        where = (str(self.folder), *map(str, files), os.getpid())
        self.executor = ProcessPoolExecutor(1, initializer=become_worker, initargs=where, env=ONE_THREAD)

    def _death(self, index: int, argument: Any, error: Exception) -> WorkerDiedError:
        """What is known of a death: the task, the exit code or signal, and the end of its standard error."""
        codes = re.search(r"\{(\w+)\((-?\d+)\)", str(error))  # as loky writes them: {SIGKILL(-9)} or {EXIT(3)}
        name, code = codes.groups() if codes else ("", "")
        how = f"signal {name}" if code.startswith("-") else f"exit code {code}" if code else str(error)
        if name == "SIGKILL":
            how += ", perhaps by the system for want of memory"
        words = self.words.path.read_text(encoding="utf-8", errors="replace")
        words = EXTENSIONS.sub("", words)[-LAST_WORDS:].strip()
        said = f" The end of its standard error:\n{words}" if words else " It wrote nothing to standard error."
        return WorkerDiedError(f"a worker process died at arguments[{index}] = {_short.repr(argument)}: {how}.{said}")


class _Tail:
    """What a worker appends to a file, read from where the last look ended; the file is open during a look only."""

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a look may end inside a character
        path.touch()

    def read(self) -> str:
        """The text that was appended since the last call."""
        with self.path.open("rb") as file:
            file.seek(self.place)
            content = file.read()
        self.place += len(content)
        return self.decoder.decode(content)


_short = reprlib.Repr()
_short.maxother = _short.maxstring = 80


def _packed(value: object, name: str, mapped: Any) -> bytes:
    try:
        return pack(value, mapped)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ValueError(
            f"{name} must be able to leave this process for a worker; something in it cannot: {error}. Take such "
            "attributes (locks, open files, generators) off the model or the data, or leave out workers."
        ) from error


def _error(sent: bytes | None, trace: str, index: int) -> Exception:
    """The exception of a worker with its traceback as a note; a RuntimeError if it cannot be pickled."""
    error = unpack(sent) if sent is not None else RuntimeError(trace.strip().splitlines()[-1])
    error.add_note(f"It was raised in a worker process, at arguments[{index}]:\n{trace}")
    return error
