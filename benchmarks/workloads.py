"""The models that steps are timed on, each with one batch: the toy transformer, the small ViT, MiniLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from bayesformer.bench.tasks import TASKS
from bayesformer.core.types import Batch
from bayesformer.data import Data
from bayesformer.likelihoods import Categorical, Likelihood
from bayesformer.models import VisionTransformer


@dataclass(frozen=True)
class Workload:
    """A model, a batch and how many training examples there would be."""

    label: str
    build: Callable[[], nn.Module]
    likelihood: Likelihood
    batch: Batch
    num_data: int = 800
    rounds: int = 25
    steps: int = 12
    """steps per round: a round is a fraction of a second"""

    def model(self) -> nn.Module:
        """The same weights every time."""
        torch.manual_seed(0)
        return self.build().train()


def of_task(label: str, name: str) -> Workload:
    """A task's model on its first batch."""
    task = TASKS[name]()
    data = task.load().train.subset(slice(0, task.training.batch_size))
    return Workload(label, task.model, task.likelihood, Batch(data.inputs, data.targets, data.mask))


def large_vit() -> nn.Module:
    """The ViT that budgets are stated for: images of 28 x 28, 49 tokens of width 32. That of the digits has 16."""
    torch.manual_seed(0)
    return VisionTransformer(28, 4, 1, 10)


def large_images(count: int) -> Data:
    """Noise in the shape of its images, with classes."""
    torch.manual_seed(0)
    return Data(torch.randn(count, 1, 28, 28), torch.randint(0, 10, (count,)))


def minilm() -> Workload:
    """A BERT of the sizes of MiniLM-L6 (22.7 million random weights), two classes, 8 texts of 64 tokens."""

    def build() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, num_labels=2
        )
        return BertForSequenceClassification(config)

    torch.manual_seed(0)
    ids = torch.randint(1000, 20000, (8, 64))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch = Batch(inputs, torch.randint(0, 2, (8,)))
    return Workload("MiniLM", build, Categorical(), batch, num_data=4000, rounds=15, steps=1)
