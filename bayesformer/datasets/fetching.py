"""Fetching data sets from their official places: checked before they are used, and written whole or not at all."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from bayesformer.core.errors import DamagedFileError
from bayesformer.core.storage import write_atomically
from bayesformer.datasets.contents import packed_as, read_content, unpacked
from bayesformer.datasets.sources import DataFile, DataSource, Download


def fetch(source: DataSource, folder: Path, say: Callable[[str], None] = lambda _: None) -> list[Path]:
    """Every file of a data set, in `folder`: those that are there and right stay, the others are downloaded.

    Raises DamagedFileError if what arrives is not what was published; nothing of it is kept.
    """
    paths = []
    with tempfile.TemporaryDirectory(prefix="bayesformer-") as scratch:
        for file in source.files:
            path = folder / file.path
            if is_right(path, file):
                say(f"{path} is there")
            else:
                say(f"fetching {', '.join(download.url for download in file.downloads)}")
                write_atomically(path, content_of(file, Path(scratch)))
            paths.append(path)
    return paths


def is_right(path: Path, file: DataFile) -> bool:
    """Whether a file is there with the content that it should have."""
    try:
        read_content(path, "data file", file.sha256)
    except DamagedFileError:
        return False
    return True


def content_of(file: DataFile, scratch: Path) -> bytes:
    """A data file as it is to be written, made of its downloads and checked."""
    arrived = [downloaded(download, scratch).read_bytes() for download in file.downloads]
    where = ", ".join(download.url for download in file.downloads)
    try:
        packed = arrived[0] if file.make is None else packed_as(file.make(arrived), file.path)
        found = hashlib.sha256(unpacked(packed, file.path)).hexdigest()
    except Exception as error:  # of a format that is not the one expected: any reader may stumble anywhere
        raise DamagedFileError(
            f"download of {file.path} cannot be read: {type(error).__name__}: {error}. It came from {where}; nothing "
            "of it was kept."
        ) from error
    if found != file.sha256:
        raise DamagedFileError(
            f"download of {file.path} must have the content of sha256 {file.sha256[:12]}…; got {found[:12]}…, from "
            f"{where}. It is broken or of another version; nothing of it was kept."
        )
    return packed


def downloaded(download: Download, scratch: Path) -> Path:
    """The downloaded file in the scratch folder, once for all files that are made of it."""
    import pooch

    name = hashlib.sha256(download.url.encode()).hexdigest()[:16]
    # A hash that is not published is not checked here; what is made of the download is, always.
    try:
        return Path(pooch.retrieve(download.url, known_hash=download.known_hash, fname=name, path=scratch))
    except ValueError as error:  # pooch's word for a hash that differs
        raise DamagedFileError(f"download {download.url} is broken, nothing of it was kept: {error}") from error
