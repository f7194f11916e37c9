"""From the files that data sets are published in to those that are read here: plain text and plain arrays."""

from __future__ import annotations

import io
import json
import pickle
import re
import tarfile
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from scipy import sparse

DEMONSTRATIVES = ("THIS", "THAT", "THESE", "THOSE")
PLANETOID_PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
REVIEW = re.compile(r"aclImdb/(train|test)/(neg|pos)/(\d+)_(\d+)\.txt")


def four_columns(files: Sequence[bytes]) -> bytes:
    """CoNLL-U to lines of form, lemma, universal tag and tag of the treebank; an empty line ends a sentence."""
    return _columns(files[0], undo=False)


def version_1_2(files: Sequence[bytes]) -> bytes:
    """Version 1.3 of the English treebank as lines of form, lemma and both tags, with tags as they were in 1.2.

    One systematic change is undone: WDT was a determiner, as was DT in capitals.
    """
    return _columns(files[0], undo=True)


def _columns(conllu: bytes, undo: bool) -> bytes:
    lines = []
    for line in conllu.decode("utf8").rstrip("\n").split("\n"):
        if not line:
            lines.append("")
            continue
        number, form, lemma, upos, xpos = line.split("\t")[:5] if line[0] != "#" else ("#", "", "", "", "")
        if not number.isdigit():  # a comment, or a word of several tokens
            continue
        if undo and (xpos == "WDT" or (xpos == "DT" and form in DEMONSTRATIVES)):
            upos = "DET"
        lines.append(f"{form}\t{lemma}\t{upos}\t{xpos}")
    return ("\n".join(lines) + "\n\n").encode("utf8")


def train_reviews(files: Sequence[bytes]) -> bytes:
    """The training reviews of the archive as JSON lines, by label and number."""
    return _reviews(files[0], "train")


def test_reviews(files: Sequence[bytes]) -> bytes:
    """The test reviews of the archive as JSON lines, by label and number."""
    return _reviews(files[0], "test")


def _reviews(archive: bytes, part: str) -> bytes:
    rows = []
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as members:
        for member in members:
            found = REVIEW.fullmatch(member.name)
            if found is None or found[1] != part:
                continue
            file = members.extractfile(member)
            assert file is not None
            label, number, rating = int(found[2] == "pos"), int(found[3]), int(found[4])
            rows.append({"label": label, "rating": rating, "id": number, "text": file.read().decode("utf8")})
    rows.sort(key=lambda row: (row["label"], row["id"]))
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf8")


class _PlainArrays(pickle.Unpickler):
    """Reads pickles of arrays, sparse matrices and dictionaries of lists, and nothing that could run code."""

    ALLOWED: ClassVar = {
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("collections", "defaultdict"),
        ("_codecs", "encode"),
        *((module, "_reconstruct") for module in ("numpy.core.multiarray", "numpy._core.multiarray")),
        *((module, "csr_matrix") for module in ("scipy.sparse.csr", "scipy.sparse._csr")),
        *((module, name) for module in ("builtins", "__builtin__") for name in ("list", "int")),
    }

    def find_class(self, module: str, name: str) -> Any:
        """One of the classes that such a pickle needs; any other is refused."""
        if (module, name) not in self.ALLOWED:
            raise ValueError(f"a data pickle must hold arrays only; it asks for {module}.{name}")
        modern = {"scipy.sparse.csr": "scipy.sparse", "scipy.sparse._csr": "scipy.sparse", "__builtin__": "builtins"}
        modern["numpy.core.multiarray"] = "numpy._core.multiarray"
        return super().find_class(modern.get(module, module), name)


def citation_graph(files: Sequence[bytes]) -> bytes:
    """The parts of a Planetoid graph as arrays in the order of nodes that all papers use.

    Test nodes come last, in the order of their numbers; Citeseer has 15 that nothing is known of, which get no features
    and class -1. The graph in both directions, without loops and repetitions, sorted; 500 nodes after the training ones
    validate.
    """
    *pickles, index = files
    parts = [_PlainArrays(io.BytesIO(content), encoding="latin1").load() for content in pickles]
    x, _, tx, ty, allx, ally, graph = parts
    test = np.array(index.split(), dtype=np.int64)
    nodes, width = max(int(test.max()) + 1, len(graph)), allx.shape[1]
    features = sparse.lil_matrix((nodes, width), dtype=np.float32)
    features[: allx.shape[0]] = allx
    features[test] = tx
    classes = np.full(nodes, -1, dtype=np.int8)
    classes[: len(ally)] = np.asarray(ally).argmax(1)
    classes[test] = np.asarray(ty).argmax(1)
    masks = {name: np.zeros(nodes, dtype=bool) for name in ("train_mask", "val_mask", "test_mask")}
    masks["train_mask"][: x.shape[0]] = True
    masks["val_mask"][x.shape[0] : x.shape[0] + 500] = True
    masks["test_mask"][test] = True
    return _written(features.tocsr(), classes, _edges(graph), masks)


def _edges(graph: dict[int, list[int]]) -> np.ndarray:
    """(2, E): every pair of different nodes that either lists, in both directions, sorted."""
    neighbours: dict[int, set[int]] = defaultdict(set)
    for source, targets in graph.items():
        for target in targets:
            if source != target:
                neighbours[source].add(target)
                neighbours[target].add(source)
    pairs = sorted((source, target) for source, targets in neighbours.items() for target in targets)
    return np.array(pairs, dtype=np.int32).T


def _written(features: Any, classes: np.ndarray, edges: np.ndarray, masks: dict[str, np.ndarray]) -> bytes:
    features.sort_indices()
    file = io.BytesIO()
    arrays: dict[str, Any] = dict(
        x_data=features.data.astype(np.float32),
        x_indices=features.indices.astype(np.int16),
        x_indptr=features.indptr.astype(np.int32),
        x_shape=np.array(features.shape, dtype=np.int64),
        y=classes,
        edge_index=edges,
        **masks,
    )
    np.savez_compressed(file, **arrays)
    return file.getvalue()
