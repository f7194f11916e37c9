"""One thread, one seed per test, and a switch that frees the seeds (FREE_SEEDS=1)."""

import os
import zlib

import pytest

# Before torch is imported: torch.set_num_threads is for the calling thread alone, and threads of the tests would sum in
# another order than the one they are compared with.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded(request):
    """Every test starts from a seed of its own name, so that order and parallel runs do not matter."""
    if os.environ.get("FREE_SEEDS"):
        torch.seed()
    else:
        torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
