"""Torch Datasets and DataLoaders, and anything else with a length whose examples are read one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from bayesformer.core.global_random import seed_states
from bayesformer.data.collating import collate
from bayesformer.data.indexed import Loading
from bayesformer.data.ragged import Padding

WORKER_OPTIONS = ("worker_init_fn", "multiprocessing_context", "timeout", "prefetch_factor", "pin_memory")
"""Arguments of a DataLoader that are kept when its batches are read in another order."""
OF_ALL = (RandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers that may come to any example of the dataset in some epoch, however many one epoch has."""


class Items:
    """A `ItemSource` of examples read one by one, `dataset[i]`, and put together by a collate function."""

    def __init__(
        self,
        dataset: Any,
        name: str,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        padding: Padding | None = None,
    ) -> None:
        self.dataset, self.name, self.collate_fn = dataset, name, collate_fn
        self.padding = padding or Padding()

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: list[int], seeds: Sequence[int] | None) -> Any:
        """The examples at `indices` as one batch, each read under its own seed if there are any.

        A random collate function continues the stream of the last example.
        """
        items = []
        for place, index in enumerate(indices):
            if seeds is not None:
                seed_states(seeds[place])
            items.append(self.dataset[index])
        return collate(items, self.padding, self.name) if self.collate_fn is None else self.collate_fn(items)

    def padded_with(self, token: int) -> Items:
        """The same examples, padded with `token`."""
        return Items(self.dataset, self.name, self.collate_fn, replace(self.padding, token=token))

    def describe(self) -> str:
        """The type of the dataset with its module, for error messages."""
        return f"{type(self.dataset).__module__}.{type(self.dataset).__qualname__}"


def is_indexable(data: Any) -> bool:
    """Whether examples can be read by index: a length and `[i]`, as a map-style Dataset or a list has."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)


def is_loader(data: Any) -> bool:
    """Whether iterating gives whole batches: a DataLoader, or another class with its attributes."""
    return isinstance(data, DataLoader) or all(hasattr(data, name) for name in ("dataset", "batch_sampler", "__iter__"))


def loading_of(loader: Any) -> Loading | None:
    """How a DataLoader reads if its order is a plain one, each example once, which ours can replace; else None."""
    sampler = getattr(loader, "batch_sampler", None)
    if type(loader).__iter__ is not DataLoader.__iter__ or type(sampler) is not BatchSampler:
        return None
    inner, count = sampler.sampler, len(loader.dataset) if is_indexable(loader.dataset) else None
    shuffled = type(inner) is RandomSampler and not inner.replacement and inner.num_samples == count
    if count is None or not (shuffled or type(inner) is SequentialSampler):
        return None
    options = tuple((name, getattr(loader, name)) for name in WORKER_OPTIONS if loader.num_workers)
    return Loading(sampler.batch_size, sampler.drop_last, loader.num_workers, options)


def examples_of(loader: Any) -> int | None:
    """The number of different examples behind a DataLoader; None for a stream or a dataset of whole batches."""
    if loader.batch_sampler is None or not is_indexable(loader.dataset):
        return None
    whole = len(loader.dataset)
    drawn = isinstance(loader.sampler, OF_ALL) or not isinstance(loader.sampler, Sized)
    return whole if drawn else min(whole, len(loader.sampler))  # a list of indices, SubsetRandomSampler


def merges_graphs(loader: Any) -> bool:
    """Whether a DataLoader is PyTorch Geometric's, whose collate function merges graphs into one."""
    return hasattr(getattr(loader, "collate_fn", None), "follow_batch")


def rows_of(loader: Any) -> int | None:
    """How many examples an epoch of a DataLoader has, as its sampler says; None where only reading can tell."""
    sampler = getattr(loader, "batch_sampler", None)
    if type(loader).__iter__ is not DataLoader.__iter__ or type(sampler) is not BatchSampler:
        return None
    if not is_indexable(loader.dataset) or not isinstance(sampler.sampler, Sized):
        return None
    count = len(sampler.sampler)
    return count // sampler.batch_size * sampler.batch_size if sampler.drop_last else count
