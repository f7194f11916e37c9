"""Peak memory of a block of work."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from types import TracebackType

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Extra MiB at the peak of a block, over what was in use before; None where the system cannot say."""

    def __enter__(self) -> PeakMemory:
        self.mib: float | None = None
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated() / 2**20
            return self
        _give_back()
        try:
            RESET.write_text("5")  # sets the high-water mark back to the present use
            self._before = _status("VmRSS")
        except OSError:
            self._before = -1.0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if torch.cuda.is_available():
            self.mib = torch.cuda.max_memory_allocated() / 2**20 - self._before
        elif self._before >= 0:
            self.mib = round(max(_status("VmHWM") - self._before, 0.0), 1)


def peak_of_process() -> float:
    """MiB this process has used at most. Not `ru_maxrss`, which starts from what the parent used."""
    return _status("VmHWM")


def _give_back() -> None:
    """Return freed memory to the system; what an earlier block left cached would hide this one's peak."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _status(name: str) -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024
