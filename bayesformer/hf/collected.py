"""What a Trainer callback has collected, as a file in the Trainer's own checkpoints: safetensors, no pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bayesformer.core.storage import checksum, read_checked, write_tensors

WEIGHTS = "weights"  # a hash of those that were trained when the file was written


def checkpoint_folders(args: Any, step: int) -> list[Path]:
    """Where the checkpoint of a step may be: the Trainer tells its callbacks the folder of all, and seldom this one."""
    asked = getattr(args, "resume_from_checkpoint", None)
    return [*([Path(asked)] if isinstance(asked, str) else []), Path(args.output_dir) / f"checkpoint-{step}"]


def write_collected(path: Path, tensors: Mapping[str, Tensor], theta: Tensor, facts: Mapping[str, Any]) -> None:
    """Write what was collected until the weights θ (P,), if the folder of the checkpoint is there."""
    if path.parent.is_dir():
        write_tensors(path, tensors, {**facts, WEIGHTS: checksum({WEIGHTS: theta})})


def read_collected(path: Path, theta: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """What was collected until the weights θ (P,); None without a file, or if it is of a run with other weights."""
    if not path.exists():
        return None
    tensors, facts = read_checked(path, "collected snapshots")
    if facts.get(WEIGHTS) != checksum({WEIGHTS: theta}):
        return None
    return {name: tensor.to(theta.device) for name, tensor in tensors.items()}, facts
