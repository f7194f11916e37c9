"""What a data file holds, whatever it is packed in, and a hash of it: two packings of one text are one version."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import zipfile
import zlib
from pathlib import Path

import numpy as np

from bayesformer.core.errors import DamagedFileError

UNREAD = ("edge_index_raw", "test_index")  # arrays that a graph may come with and that nothing here reads
NOT_READABLE = (OSError, EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, ValueError)


def unpacked(packed: bytes, name: str) -> bytes:
    """The content of a file by the end of its name: .gz, .xz, arrays of .npz in order of name, or as it is."""
    if name.endswith(".gz"):
        return gzip.decompress(packed)
    if name.endswith(".xz"):
        return lzma.decompress(packed)
    if name.endswith(".npz"):
        with np.load(io.BytesIO(packed), allow_pickle=False) as stored:
            return b"".join(_array_bytes(key, stored[key]) for key in sorted(stored.files) if key not in UNREAD)
    return packed


def _array_bytes(name: str, array: np.ndarray) -> bytes:
    return f"{name} {array.dtype.str} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes()


def packed_as(content: bytes, name: str) -> bytes:
    """A content packed as the end of a file's name says; the opposite of `unpacked` for .gz and .xz."""
    if name.endswith(".gz"):
        return gzip.compress(content, mtime=0)
    return lzma.compress(content) if name.endswith(".xz") else content


def read_content(path: Path, what: str, sha256: str | None = None) -> bytes:
    """What a file holds, unpacked; an error if it cannot be unpacked, or is of another version than the hash says."""
    try:
        content = unpacked(path.read_bytes(), path.name)
    except NOT_READABLE as error:
        raise DamagedFileError(
            f"{what} {path} cannot be read: {type(error).__name__}: {error}. It is truncated or altered."
        ) from error
    if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise DamagedFileError(
            f"{what} {path} must have the content of sha256 {sha256[:12]}…; got {found[:12]}…: it is altered, or of "
            "another version."
        )
    return content
