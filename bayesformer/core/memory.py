"""How much memory may be kept for draws."""

from __future__ import annotations

import os

import torch

MOST = 2**30  # bytes
SHARE = 0.1  # of the device's memory


def room_for(size: int, device: torch.device) -> int:
    """How many things of `size` bytes may be kept on a device: those that fit in 1 GiB or a tenth of its memory."""
    return int(min(MOST, SHARE * total_memory(device)) // max(size, 1))


def total_memory(device: torch.device) -> int:
    """Bytes of memory that a device has; of one that does not tell, as much as the computer."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
