"""Small tasks of GLUE (Wang et al. 2018): sentences or pairs of sentences with a label or a score.

The files are `glue/TASK/train.tsv.xz` and `dev.tsv.xz` in the folder that BAYESFORMER_DATA names, with a header. The
labels of GLUE's own test sets are not public: the development file is the test set, and validation rows are split off
the training file.
"""

from __future__ import annotations

import csv
import io
from typing import NamedTuple

import torch

from bayesformer.core.errors import DamagedFileError, unknown_name
from bayesformer.core.seeds import generator
from bayesformer.datasets.contents import read_content
from bayesformer.datasets.places import locate


class GlueTask(NamedTuple):
    """Where a task's rows are, and which columns they have."""

    folder: str
    texts: tuple[str, ...]
    label: str
    names: tuple[str, ...] = ("0", "1")
    """of the classes, in order; none for a score"""


GLUE: dict[str, GlueTask] = {
    "rte": GlueTask("RTE", ("sentence1", "sentence2"), "label", ("entailment", "not_entailment")),
    "mrpc": GlueTask("MRPC", ("sentence1", "sentence2"), "label"),
    "cola": GlueTask("CoLA", ("sentence",), "label"),
    "sst2": GlueTask("SST-2", ("sentence",), "label"),
    "stsb": GlueTask("STS-B", ("sentence1", "sentence2"), "score", ()),
}


class GlueRow(NamedTuple):
    """One or two sentences, and the number of their class, or their score."""

    texts: tuple[str, ...]
    label: float


class GlueParts(NamedTuple):
    """Three disjoint sets of rows of one task."""

    train: list[GlueRow]
    validation: list[GlueRow]
    test: list[GlueRow]


def glue_rows(name: str, part: str) -> list[GlueRow]:
    """All rows of "train" or "dev" in the order of the file."""
    if name not in GLUE:
        raise unknown_name("GLUE task", name, GLUE)
    task = GLUE[name]
    path = locate(f"glue/{task.folder}/{part}.tsv.xz", "GLUE rows", fetched=False)
    lines = io.StringIO(read_content(path, "GLUE rows").decode("utf8"), newline="")
    found = []
    for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
        texts, label = tuple(row.get(column) for column in task.texts), row.get(task.label)
        if label is None or any(text is None for text in texts) or (task.names and label not in task.names):
            raise DamagedFileError(f"GLUE rows {path} must have the columns {task.texts} and {task.label}; got {row}.")
        found.append(GlueRow(texts, float(task.names.index(label)) if task.names else float(label)))  # type: ignore[arg-type]
    return found


def load_glue(name: str, train: int, validation: int, seed: int = 0) -> GlueParts:
    """Random rows of the training file to learn and to choose by, and the whole development file to judge by."""
    rows = glue_rows(name, "train")
    if train < 1 or validation < 1 or train + validation > len(rows):
        raise ValueError(
            f"train and validation must be at least 1 and together at most {len(rows)}; got {train} + {validation}."
        )
    order = torch.randperm(len(rows), generator=generator(seed, "glue", name)).tolist()
    chosen = [rows[i] for i in order[: train + validation]]
    return GlueParts(chosen[:train], chosen[train:], glue_rows(name, "dev"))
