"""Ambiguous-MNIST made anew: digits that are several digits at once (Mukhoti et al. 2021, "Deep Deterministic
Uncertainty").

`bayesformer data make ambiguous_mnist` makes the files by their recipe (`study/ambiguous_digits.py`). It is not the
original, which is no part of any package, but another draw of the same kind.
"""

from __future__ import annotations

from torch import Tensor

from bayesformer.core.errors import unknown_name
from bayesformer.core.storage import read_checked
from bayesformer.datasets.mnist import scaled
from bayesformer.datasets.places import locate

NAME = "ambiguous_mnist"
PARTS = ("train", "test")
FORMAT = "ambiguous_mnist 1"


def file_of(part: str) -> str:
    """The path of a part in a data folder."""
    return f"{NAME}/{part}.safetensors"


def load(part: str, mean: float, std: float) -> Tensor:
    """The images of "train" or "test", (N, 1, 28, 28), in the units of the digits they are held against."""
    if part not in PARTS:
        raise unknown_name("part", part, PARTS)
    path = locate(file_of(part), "ambiguous digits")
    tensors, facts = read_checked(path, "ambiguous digits")
    if facts.get("format") != FORMAT:
        raise ValueError(
            f"ambiguous digits {path} must be of the format {FORMAT!r}; got {facts.get('format')!r}: "
            f"call `bayesformer data make {NAME}` again."
        )
    return scaled(tensors["images"].float() / 255, mean, std)
