"""How the C library treats memory that is freed."""

import torch

LARGEST = 2**25 - 2**16  # bytes: blocks of up to 32 MiB move malloc's limits


def keep_freed() -> None:
    """Let malloc keep up to 64 MiB of what is freed, instead of giving it back to the system.

    glibc's limits follow the largest block freed so far (`man mallopt`, M_MMAP_THRESHOLD). Until there was one, every
    step of a small model gives its temporaries back and takes them again, page by page, which can be a quarter of its
    time. The block is never written to, so it is free; other C libraries do not care.
    """
    torch.empty(LARGEST, dtype=torch.uint8)
