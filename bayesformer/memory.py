"""How the C library treats memory that is freed."""

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of options, `man mallopt`
KEPT, LARGEST = 2**28, 2**25  # bytes: all that is kept, and the largest block that is


def keep_freed() -> None:
    """Let glibc keep up to 256 MiB of what is freed, instead of giving it back to the system.

    By itself it keeps 128 KiB, so that every pass of a small model gives its temporaries back and takes them again,
    page by page: a quarter of its time. Nothing is taken that was not in use before. Who has set limits of their own
    keeps them; other C libraries have other rules, and are left alone.
    """
    if sys.platform != "linux" or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & set(os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, KEPT)
        mallopt(MMAP_THRESHOLD, LARGEST)
