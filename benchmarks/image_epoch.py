"""One epoch of the task mnist, against a vision transformer and a loop that a person would write in plain PyTorch.

Images are noise: the time does not depend on what they show. A tenth of the 48,000 is timed, in whole batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesformer.bench.tasks import MnistVit
from bayesformer.data import Data, as_batches
from bayesformer.methods import Mle, Problem
from bayesformer.train.training import Training
from benchmarks.harness import Comparison

IMAGES = 4800


def comparisons() -> Iterator[Comparison]:
    """All comparisons of this file."""
    task = MnistVit()
    generator = torch.Generator("cpu").manual_seed(0)
    images = torch.randn(IMAGES, 1, 28, 28, generator=generator)
    data = Data(images, torch.randint(10, (IMAGES,), generator=generator))
    training = Training(epochs=1, batch_size=task.training.batch_size, lr=task.training.lr)
    problem = Problem(task.model, task.likelihood, as_batches(data, "train"), training=training)
    yield Comparison(
        "mnist: epoch of the MLE against a minimal PyTorch loop",
        partial(Mle().fit, problem),
        partial(minimal_loop, data, training),
        1.3,
        rounds=5,
    )


def minimal_loop(data: Data, training: Training) -> None:
    """Shuffled batches, cross-entropy, Adam; nothing else."""
    assert isinstance(data.inputs, Tensor)
    model = PlainVit()
    optimizer = torch.optim.Adam(model.parameters(), lr=training.lr)
    for index in torch.randperm(len(data)).split(training.batch_size):
        loss = F.cross_entropy(model(data.inputs[index]), data.targets[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class PlainVit(nn.Module):
    """The vision transformer of the task in modules and functions of torch: patches of 4, 2 blocks, width 32."""

    def __init__(self, dim: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(1, dim, 4, 4)
        self.positions = nn.Parameter(torch.zeros(49, dim))
        self.blocks = nn.ModuleList(PlainBlock(dim) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, 10) of images (B, 1, 28, 28)."""
        x = self.embedding(images).flatten(2).mT + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class PlainBlock(nn.Module):
    """A block of one attention head, with torch's fused attention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, (B, T, D)."""
        q, k, v = self.qkv(self.first(x)).unsqueeze(1).chunk(3, -1)  # (B, 1, T, D)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return x + self.mlp(self.second(x))
