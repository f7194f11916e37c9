"""Models of rows of numbers: a transformer whose tokens are features, and the small MLP of the UCI comparisons."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesformer.attention.multi_head import Linear
from bayesformer.attention.ranges import check_positive
from bayesformer.models.transformer import Encoder


class FeatureTransformer(nn.Module):
    """Rows of F numbers in, a mean and a raw scale per value out: for `likelihoods.Gaussian(scale=None)`.

    With `scales=False` means alone, for a known scale.

    Gorishniy et al. (2021), "Revisiting deep learning models for tabular data": feature j is the token x_j w_j + b_j,
    and the answer is read off a class token before them. All w, b and the class token are columns of one linear map,
    applied to rows [1, 0, 0] and [0, x_j e_j, e_j], so that whatever knows a linear layer knows the tokens.
    """

    def __init__(self, encoder: Encoder, features: int, outputs: int = 1, scales: bool = True) -> None:
        super().__init__()
        check_positive(features=features, outputs=outputs)
        self.features = features
        self.embedding, self.encoder = Linear(1 + 2 * features, encoder.dim, bias=False), encoder
        self.projection = Linear(encoder.dim, 2 * outputs if scales else outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """From (B, F) to (B, 2 outputs): the means, then the scales before softplus, if any."""
        # √D as in `Regressor`: without it a value is drowned by its position.
        tokens = math.sqrt(self.encoder.dim) * self.embedding(self.rows(inputs))  # (B, 1 + F, D)
        return self.projection(self.encoder(tokens)[:, 0])

    def rows(self, inputs: Tensor) -> Tensor:
        """(B, 1 + F, 1 + 2F): what the linear map makes tokens of."""
        if inputs.dim() != 2 or inputs.shape[1] != self.features:
            raise ValueError(f"inputs must have shape (B, {self.features}); got {tuple(inputs.shape)}.")
        names = torch.eye(self.features, dtype=inputs.dtype, device=inputs.device).expand(len(inputs), -1, -1)
        tokens = torch.cat([torch.diag_embed(inputs), names], -1)  # (B, F, 2F)
        first = F.pad(inputs.new_ones(len(inputs), 1, 1), (0, 2 * self.features))  # (B, 1, 1 + 2F)
        return torch.cat([first, F.pad(tokens, (1, 0))], 1)


class MlpRegressor(nn.Module):
    """Rows of F numbers in, a mean and a raw scale per value out, by one hidden layer of rectifiers.

    Hernández-Lobato & Adams (2015), section 5.1: 50 hidden units, the network of the UCI comparisons since.
    """

    def __init__(self, features: int, hidden: int = 50, outputs: int = 1) -> None:
        super().__init__()
        check_positive(features=features, hidden=hidden, outputs=outputs)
        self.hidden, self.projection = Linear(features, hidden), Linear(hidden, 2 * outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """From (B, F) to (B, 2 outputs): the means, then the scales before softplus."""
        return self.projection(F.relu(self.hidden(inputs)))
