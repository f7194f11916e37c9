"""A small vision transformer: patches, the encoder, the mean over patches."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from bayesformer.attention.multi_head import Linear, Softmax
from bayesformer.attention.ranges import check_positive
from bayesformer.models.transformer import Encoder


class VisionTransformer(nn.Module):
    """Square images (B, channels, H, W) in, the logits of C classes out, (B, C).

    Dosovitskiy et al. (2021), with the mean over patches in place of a class token.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        channels: int,
        classes: int,
        *,
        dim: int = 32,
        depth: int = 2,
        heads: int = 1,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
        family: Callable[[], nn.Module] = Softmax,
    ) -> None:
        super().__init__()
        check_positive(image_size=image_size, patch_size=patch_size, channels=channels, classes=classes)
        if image_size % patch_size:
            raise ValueError(
                f"image_size must be a multiple of patch_size; got image_size={image_size}, patch_size={patch_size}."
            )
        self.image_shape, self.patch_size = (channels, image_size, image_size), patch_size
        self.embedding = Linear(channels * patch_size**2, dim)
        self.encoder = Encoder(
            dim,
            depth,
            heads,
            mlp_ratio=mlp_ratio,
            dropout=dropout,
            positions="learned",
            max_length=(image_size // patch_size) ** 2,
            family=family,
        )
        self.projection = Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        """From (B, channels, H, W) to (B, C)."""
        if images.shape[1:] != self.image_shape:
            raise ValueError(f"images must have shape (B, {_list(self.image_shape)}); got ({_list(images.shape)}).")
        x = self.encoder(self.embedding(patches(images, self.patch_size)))
        return self.projection(x.mean(-2))


def patches(images: Tensor, size: int) -> Tensor:
    """(B, channels, H, W) as rows of patches, (B, H/size · W/size, channels · size²)."""
    grid = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # (B, channels, h, size, w, size)
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def _list(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))
