"""Where data files are: in the folder that BAYESFORMER_DATA names, or in the user's cache, in the same layout.

    mnist/train-images-idx3-ubyte.gz, ud_english/v1.2-train.tsv.xz, imdb/train.jsonl.xz, planetoid/cora.npz, ...

`bayesformer data get NAME` fills the cache. A set is read from the first of the two that has a folder of its name: one
that is there but incomplete is an error, never replaced silently by the other.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = "BAYESFORMER_DATA"
CACHE = "BAYESFORMER_CACHE"


def cache_folder() -> Path:
    """What the library keeps outside of any repository: BAYESFORMER_CACHE, or the cache of the user's system."""
    chosen = os.environ.get(CACHE)
    if chosen:
        return Path(chosen).expanduser()
    import pooch

    return Path(pooch.os_cache("bayesformer"))


def fetched_folder() -> Path:
    """Where `bayesformer data` puts what it fetches or makes."""
    return cache_folder() / "data"


def data_folders() -> list[Path]:
    """Folders that data are looked for in, in this order."""
    chosen = os.environ.get(FOLDER)
    if not chosen:
        return [fetched_folder()]
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"{FOLDER} must name a folder; {folder} does not exist or is a file.")
    return [folder, fetched_folder()]


def locate(file: str, what: str, fetched: bool = True) -> Path:
    """The path of a data file such as "mnist/t10k-labels-idx1-ubyte.gz"; an error that says what to do if it is not
    there. `what` is the word for it in that error, `fetched` whether `bayesformer data` can get it."""
    name = file.split("/", maxsplit=1)[0]
    command = f"`bayesformer data {'make' if name.startswith('ambiguous') else 'get'} {name}`"
    for folder in data_folders():
        if not (folder / name).is_dir():
            continue
        path = folder / file
        if not path.is_file():
            raise FileNotFoundError(
                f"{what} {path} does not exist; {FOLDER} must name the folder that holds {name}/ with all its files"
                f"{f', or {command} be called' if fetched else ''}. The folder is there: it may be copied in part, or "
                "of another version."
            )
        return path
    is_set = "it does not have them" if os.environ.get(FOLDER) else "it is not set"
    if not fetched:
        raise FileNotFoundError(f"{FOLDER} must name the folder that holds {file}, which no command fetches; {is_set}.")
    raise FileNotFoundError(
        f"{FOLDER} must name the folder that holds {file}; {is_set}, and the cache {fetched_folder()} has no {name}/: "
        f"call {command}."
    )
