"""A small vision transformer: patches, the encoder, the mean over patches."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from bayesformer.attention.multi_head import Linear, Softmax
from bayesformer.attention.ranges import check_positive
from bayesformer.core.draws import uniform_like
from bayesformer.models.transformer import Encoder


class VisionTransformer(nn.Module):
    """Square images (B, channels, H, W) in, the logits of C classes out, (B, C).

    Dosovitskiy et al. (2021), with the mean over patches in place of a class token. With `token_keep` below 1 every
    image is seen through a random share of its patches in training, others are not computed, and whole in evaluation:
    a regulariser that makes a step cheaper.
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
        token_keep: float = 1.0,
        family: Callable[[], nn.Module] = Softmax,
    ) -> None:
        super().__init__()
        if not 0 < token_keep <= 1:
            raise ValueError(f"token_keep must be above 0 and at most 1; got {token_keep}.")
        check_positive(image_size=image_size, patch_size=patch_size, channels=channels, classes=classes)
        if image_size % patch_size:
            raise ValueError(
                f"image_size must be a multiple of patch_size; got image_size={image_size}, patch_size={patch_size}."
            )
        self.token_keep = token_keep
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
        x = self.encoder.positions(self.embedding(patches(images, self.patch_size)))
        if self.training and self.token_keep < 1:
            x = some_tokens(x, self.token_keep)
        return self.projection(self.encoder.encode(x).mean(-2))


def some_tokens(x: Tensor, keep: float) -> Tensor:
    """(B, k, D): of the T tokens of every example k = keep · T, rounded and at least one, at random."""
    count = max(1, round(keep * x.shape[-2]))
    chosen = uniform_like(x[..., 0].detach()).topk(count, -1).indices  # (B, k)
    return x.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, x.shape[-1]))


def patches(images: Tensor, size: int) -> Tensor:
    """(B, channels, H, W) as rows of patches, (B, H/size · W/size, channels · size²)."""
    grid = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # (B, channels, h, size, w, size)
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def _list(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))
