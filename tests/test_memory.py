"""Freed memory is kept: steps of a small model do not take page faults over and over."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    import bayesformer

def step():  # 8 MiB of temporaries
    return [torch.ones(2**18) for _ in range(8)]

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other rules")
def test_a_step_takes_its_memory_once():
    def faults(kind):
        done = subprocess.run([sys.executable, "-c", FAULTS, kind], capture_output=True, text=True, check=True)
        return float(done.stdout)

    assert faults("kept") < 0.2 * faults("given back")
