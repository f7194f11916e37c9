"""Handwritten digits, 8 by 8, bundled with scikit-learn: no download, a model trains in seconds.

And two probes that a model should be unsure about: digits with their patches shuffled, and noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.data import Data

TEST, VALIDATION = 500, 297  # of 1797; the other 1000 are for training


@dataclass(frozen=True)
class Digits:
    """Images (N, 1, 8, 8) in units of the training images' spread, labels (N,), in three disjoint parts."""

    train: Data
    validation: Data
    test: Data
    mean: float  # of the training pixels, on the scale 0..16
    std: float


def load() -> Digits:
    """The digits, always split in the same way, every class in the same share in every part."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(bunch.target, dtype=torch.long)
    test, rest = _deal(labels.argsort(stable=True), TEST)
    validation, train = _deal(rest, VALIDATION)
    std, mean = torch.std_mean(images[train])

    def part(index: Tensor) -> Data:
        index = index.sort().values  # as in the source, where the classes are mixed
        return Data((images[index] - mean) / std, labels[index])

    return Digits(part(train), part(validation), part(test), mean.item(), std.item())


def shuffled_patches(images: Tensor, patch_size: int, generator: torch.Generator) -> Tensor:
    """Each image (N, channels, H, W) with its patches in another order: any but its own, all as likely."""
    height, width = images.shape[-2:]
    count = (height // patch_size) * (width // patch_size)
    if height % patch_size or width % patch_size or count < 2:
        raise ValueError(
            "patch_size must divide the images into at least 2 patches; "
            f"got patch_size={patch_size}, images {tuple(images.shape)}."
        )
    order = _permutations(len(images), count, generator).to(images.device)  # (N, patches)
    patches = F.unfold(images, patch_size, stride=patch_size)  # (N, channels · size², patches)
    shuffled = patches.gather(-1, order.unsqueeze(1).expand_as(patches))
    return F.fold(shuffled, (height, width), patch_size, stride=patch_size)


def noise(count: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """`count` images of Gaussian noise with the mean and spread that each pixel has in `like` (N, ...)."""
    if count < 1:
        raise ValueError(f"count must be at least 1; got {count}.")
    draws = torch.randn(count, *like.shape[1:], generator=generator, dtype=like.dtype, device=generator.device)
    std, mean = torch.std_mean(like, 0)
    return mean + std * draws.to(like.device)


def probes(images: Tensor, generator: torch.Generator, patch_size: int = 2) -> dict[str, Tensor]:
    """Inputs that are no digits, as many as `images`, by name."""
    return {
        "shuffled": shuffled_patches(images, patch_size, generator),
        "noise": noise(len(images), generator, images),
    }


def _deal(index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` entries evenly spaced through `index` (sorted by class: every class gives its share), and the
    rest."""
    taken = torch.zeros(len(index), dtype=torch.bool)
    taken[torch.arange(count) * len(index) // count] = True
    return index[taken], index[~taken]


def _permutations(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """(rows, length): uniform permutations, the identity redrawn."""
    identity = torch.arange(length, device=generator.device)
    order = identity.repeat(rows, 1)
    while (same := (order == identity).all(1)).any():
        order[same] = torch.rand(int(same.sum()), length, generator=generator, device=generator.device).argsort(1)
    return order
