"""Whether a pass has segments of torch.utils.checkpoint, which run a part of the model again in the backward pass."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

from bayesformer.core.compat import checkpointing


class CheckpointWatch(TorchFunctionMode):
    """Notes in `kinds` how operations of this thread are checkpointed: "reentrant", "plain"."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation after looking where it is called from."""
        kind = checkpointing()
        if kind is not None:
            self.kinds.add(kind)
        return func(*args, **(kwargs or {}))
