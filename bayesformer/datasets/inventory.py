"""Which data sets there are, which of them are at hand, and how to get the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bayesformer.datasets import ambiguous_mnist
from bayesformer.datasets.fetching import fetch, is_right
from bayesformer.datasets.places import FOLDER, data_folders, fetched_folder
from bayesformer.datasets.sources import SOURCES, DataSource, source_of


def lines() -> list[str]:
    """A line per data set: its name, where it is or how to get it, what it is and under which licence."""
    found = [f"folders: {', '.join(map(str, data_folders()))} ({FOLDER}, then the cache)"]
    for source in SOURCES.values():
        found.append(f"{source.name:16} {state(source):28} {source.title}; licence: {source.licence}")
    made = all(any((folder / ambiguous_mnist.file_of(part)).is_file() for folder in data_folders())
               for part in ambiguous_mnist.PARTS)  # fmt: skip
    there = "there" if made else "bayesformer data make"
    found.append(f"{ambiguous_mnist.NAME:16} {there:28} digits that are several digits at once, made of MNIST")
    return found


def state(source: DataSource) -> str:
    """Whether the files of a set are there and right, in the first folder that has any of them."""
    for folder in data_folders():
        if not (folder / source.name).is_dir():
            continue
        missing = [file for file in source.files if not (folder / file.path).is_file()]
        if missing:
            return f"incomplete, lacks {len(missing)} of {len(source.files)}"
        wrong = [file for file in source.files if not is_right(folder / file.path, file)]
        return f"{len(wrong)} of {len(source.files)} files altered" if wrong else "there"
    return "bayesformer data get"


def names_of(asked: Sequence[str]) -> list[str]:
    """The names of data sets, each checked before any is fetched; "all" is every one that has a source."""
    return list(SOURCES) if list(asked) == ["all"] else [source_of(name).name for name in asked]


def get(name: str, say: Callable[[str], None]) -> list[Path]:
    """Fetch a data set into the cache; its files that are there and right are not fetched again."""
    return fetch(source_of(name), fetched_folder(), say)
