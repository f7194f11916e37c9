"""MNIST and Fashion-MNIST: grey images of 28 by 28 pixels in ten classes, from files in the idx format.

MNIST is what is learned; Fashion-MNIST, in MNIST's units of brightness, are inputs that are no digits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesformer.core.errors import DamagedFileError
from bayesformer.core.seeds import generator
from bayesformer.data import Data
from bayesformer.datasets.contents import read_content
from bayesformer.datasets.places import locate
from bayesformer.datasets.sources import FASHION, MNIST, DataSource

SIDE, CLASSES = 28, 10
IMAGES, LABELS = 2051, 2049  # the first number of a file says what it holds


class Standardised(NamedTuple):
    """Images (N, 1, 28, 28) in units of the training images' spread, labels (N,), in three disjoint parts."""

    train: Data
    validation: Data
    test: Data
    mean: float  # of the training pixels, on the scale 0..1
    std: float


def load(validation: int = 12_000, split_seed: int = 0, source: DataSource = MNIST) -> Standardised:
    """MNIST with `validation` of its training images set aside, at random but always the same."""
    images, labels = read("train", source)
    if not 0 < validation < len(images):
        raise ValueError(f"validation must be in 1..{len(images) - 1}; got {validation}.")
    order = torch.randperm(len(images), generator=generator(split_seed, "mnist", "split"))
    kept, aside = order[validation:].sort().values, order[:validation].sort().values
    std, mean = (value.item() for value in torch.std_mean(images[kept].double()))

    def part(pixels: Tensor, answers: Tensor) -> Data:
        return Data(scaled(pixels, mean, std), answers)

    tested = part(*read("t10k", source))
    return Standardised(part(images[kept], labels[kept]), part(images[aside], labels[aside]), tested, mean, std)


def clothing(mean: float, std: float, source: DataSource = FASHION) -> Tensor:
    """The test images of Fashion-MNIST, (N, 1, 28, 28), in units of the digits."""
    return scaled(read("t10k", source)[0], mean, std)


def scaled(images: Tensor, mean: float, std: float) -> Tensor:
    """Images (N, 28, 28) on the scale 0..1 as (N, 1, 28, 28) in other units."""
    return ((images - mean) / std).unsqueeze(1)


def read(part: str, source: DataSource) -> tuple[Tensor, Tensor]:
    """Images (N, 28, 28) on the scale 0..1 and labels (N,) of "train" or "t10k", checked to be the published ones."""
    images = _read_idx(f"{source.name}/{part}-images-idx3-ubyte.gz", source, IMAGES)
    labels = _read_idx(f"{source.name}/{part}-labels-idx1-ubyte.gz", source, LABELS)
    if images.shape[1:] != (SIDE, SIDE) or len(images) != len(labels) or int(labels.max()) >= CLASSES:
        raise DamagedFileError(
            f"images of {source.name} must be {SIDE} by {SIDE} with one label in 0..{CLASSES - 1} each; "
            f"got {tuple(images.shape)} and {len(labels)} labels."
        )
    return images.float() / 255, labels.long()


def _read_idx(file: str, source: DataSource, magic: int) -> Tensor:
    """The array of an idx file: its kind, its shape, then bytes; LeCun's format."""
    path = locate(file, "images")
    content = read_content(path, "images", source.file(file).sha256)
    axes = 3 if magic == IMAGES else 1
    found, *shape = np.frombuffer(content, ">i4", count=1 + axes).tolist()
    if found != magic or len(content) != 4 * (1 + axes) + math.prod(shape):
        raise DamagedFileError(
            f"images {path} must begin with {magic} and hold as many bytes as they say; got {found}."
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 * (1 + axes)).reshape(shape).copy())
