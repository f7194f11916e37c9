"""The same eleven examples in every form that data can have."""

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from bayesformer.data import Data, Stream

N = 11
X = torch.arange(N * 2.0).view(N, 2)  # row n is (2n, 2n + 1)
Y = torch.arange(N) % 3


class Pairs(Dataset):
    """Map-style, examples (x, y); counts how often each is read."""

    def __init__(self, x=X, y=Y):
        self.x, self.y, self.reads = x, y, torch.zeros(len(x), dtype=torch.int64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.reads[i] += 1
        return self.x[i], self.y[i]


class Dicts(Pairs):
    """Map-style, examples that are dicts."""

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": int(self.y[i])}


class Table:
    """What a Hugging Face dataset offers: column names, a length, and `[list of indices]` as a dict of lists."""

    def __init__(self, **columns):
        self.columns, self.column_names = columns, list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        if isinstance(index, int):
            return {key: column[index] for key, column in self.columns.items()}
        return {key: [column[i] for i in index] for key, column in self.columns.items()}


class Iterated(IterableDataset):
    """A stream that starts again with every epoch."""

    def __init__(self, x=X, y=Y):
        self.x, self.y = x, y

    def __iter__(self):
        yield from zip(self.x, self.y, strict=True)


def items(x=X, y=Y):
    return [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]


def stacked(examples):
    return torch.stack([x for x, _ in examples]), torch.stack([y for _, y in examples])


INDEXED = {
    "Data": lambda x=X, y=Y: Data(x, y),
    "pair": lambda x=X, y=Y: (x, y),
    "numpy": lambda x=X, y=Y: (x.numpy(), y.numpy()),
    "dict": lambda x=X, y=Y: {"x": x, "labels": y},
    "numpy dict": lambda x=X, y=Y: {"x": x.numpy(), "targets": y.numpy()},
    "TensorDataset": lambda x=X, y=Y: TensorDataset(x, y),
    "Dataset": Pairs,
    "Dataset of dicts": Dicts,
    "list of dicts": items,
    "list of pairs": lambda x=X, y=Y: list(zip(x, y, strict=True)),
    "dict of lists": lambda x=X, y=Y: {"x": x.tolist(), "labels": y.tolist()},
    "table": lambda x=X, y=Y: Table(x=x.tolist(), label=y.tolist(), text=["words"] * len(x)),
}
LOADERS = {  # with a plain order, which is replaced; batches of four
    "DataLoader": lambda x=X, y=Y: DataLoader(Pairs(x, y), batch_size=4),
    "shuffled": lambda x=X, y=Y: DataLoader(Pairs(x, y), batch_size=4, shuffle=True, collate_fn=stacked),
    "batch sampler": lambda x=X, y=Y: DataLoader(
        Dicts(x, y), batch_sampler=BatchSampler(SequentialSampler(x), 4, drop_last=False)
    ),
}
STREAMS = {
    "Stream": lambda x=X, y=Y: Stream(Iterated(x, y), num_data=len(x)),
    "Stream of a generator": lambda x=X, y=Y: Stream(((a, b) for a, b in zip(x, y, strict=True)), num_data=len(x)),
    "Stream of dicts": lambda x=X, y=Y: Stream(iter(items(x, y)), num_data=len(x)),
}


def rows(batch):
    """Numbers of the examples in a batch, (B,) or (L, B)."""
    inputs = batch.inputs["x"] if isinstance(batch.inputs, dict) else batch.inputs
    inputs = torch.as_tensor(inputs)
    assert torch.equal(inputs[..., 1], inputs[..., 0] + 1)
    numbers = (inputs[..., 0] / 2).long()
    assert torch.equal(batch.targets, numbers % 3)
    return numbers
