"""Freed memory is kept: a step of a small model does not take its temporaries from the system over and over."""

import platform
import subprocess
import sys

import pytest

WHERE = """
import sys, torch
if sys.argv[1] == "kept":
    import bayesformer
x = torch.empty(5 * 2**20)  # 20 MiB
for line in open("/proc/self/maps"):
    start, end = (int(number, 16) for number in line.split()[0].split("-"))
    if start <= x.data_ptr() < end:
        print("heap" if "[heap]" in line else "mapped")
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other rules")
def test_temporaries_are_not_mapped_anew_each_time():
    def where(kind):
        return subprocess.run([sys.executable, "-c", WHERE, kind], capture_output=True, text=True, check=True).stdout

    assert where("plain") == "mapped\n"
    assert where("kept") == "heap\n"
