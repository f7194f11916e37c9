"""Freed memory is kept: a step of a small model does not take its temporaries from the system over and over."""

import os
import platform
import subprocess
import sys

import pytest

HEAP = """
import sys, torch
if sys.argv[1] == "kept":
    import bayesformer
    bayesformer
def heap():
    lines = [line.split()[0].split("-") for line in open("/proc/self/maps") if "[heap]" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in lines) / 2**20
blocks = [torch.empty(5 * 2**20) for _ in range(10)]  # 20 MiB each
full = heap()
del blocks
print(int(full > 200), int(heap() > 200))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other rules")
@pytest.mark.parametrize(
    ("kind", "own", "expected"),
    [
        ("plain", {}, "0 0\n"),  # mapped one by one, and given back
        ("kept", {}, "1 1\n"),
        ("kept", {"MALLOC_TRIM_THRESHOLD_": str(2**17), "MALLOC_MMAP_THRESHOLD_": str(2**17)}, "0 0\n"),
        ("kept", {"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={2**17}"}, "0 0\n"),
    ],
)
def test_what_is_freed_is_kept_unless_told_otherwise(kind, own, expected):
    command = [sys.executable, "-c", HEAP, kind]
    assert subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | own).stdout == expected
