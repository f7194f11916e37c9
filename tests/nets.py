"""Small networks for tests, at module level so that worker processes can import them."""

import torch
from torch import nn

from bayesformer.data import Data, as_batches
from bayesformer.likelihoods import Categorical
from bayesformer.model.shell import Shell
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Space
from bayesformer.train.loop import Job


class Mlp(nn.Module):
    """A plain network of one tensor."""

    def __init__(self, inputs=3, hidden=8, outputs=2, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, outputs))

    def forward(self, x):
        return self.net(x)


class Keyword(nn.Module):
    """Wants keyword inputs and returns a dict with logits, as Hugging Face models do."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, *, input_ids, attention_mask):
        states = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        return {"logits": self.head(states.sum(1)), "states": states}


class Positional(nn.Module):
    """Two positional inputs."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(2, 3), nn.Linear(4, 3)

    def forward(self, a, b):
        return self.left(a) * self.right(b)


class Tied(nn.Module):
    """Input and output share one matrix; a buffer scales the logits."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.head(torch.tanh(self.embed(x))) * self.scale


class Normed(nn.Module):
    """Has running averages."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.inner(x))))


def blobs(count=60, classes=2, seed=0):
    """Separable points with labels."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (count,), generator=g)
    x = torch.randn(count, 3, generator=g) + 1.5 * torch.nn.functional.one_hot(y, 3)
    return Data(x, y)


def shell_of(model: nn.Module) -> Shell:
    """The model as a function of one vector."""
    return Skeleton(model, Space.of(model)).shell()


def job_of(shell, transform, theta, data, training, members=(0,), likelihood=None, **options) -> Job:
    """A job of the training loop on data in memory, without validation."""
    batches = as_batches(data)
    steps = training.steps(batches.steps(training.batch_size))
    options = {"validation": None, "seed": 0, "steps": steps, **options}
    likelihood = likelihood or Categorical()
    return Job(
        shell, transform, theta, batches, likelihood=likelihood, training=training, members=tuple(members), **options
    )
