"""The numbers that the thesis reports, from `published.csv` beside this file, and which of our scores they are.

Source: the tables 3.1, 3.2, 3.5 to 3.12 and 3.15 of the master's thesis whose paper is Cinquin, Immer, Horn and Fortuin
(2021), "Pathologies in priors and inference for Bayesian transformers". Its "±" is over repeated prediction with one
network, not over training runs.
"""

from __future__ import annotations

import csv
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

TASKS = {
    **{f"M{i}": f"toy/m{i}" for i in range(1, 6)},
    "POS": "pos",
    "MNIST": "mnist",
    "POS ambiguity corpus": "pos",
    "MNIST vs Ambiguous-MNIST": "mnist",
    "MNIST vs Fashion-MNIST": "mnist",
}
"""From the names of data sets to those of tasks."""
METRICS = {
    "log_likelihood": "log_likelihood",
    "variance_mse": "variance_mse",
    "mse": "process_mse",
    "accuracy": "accuracy",
    "f1": "f1_weighted",
    "ece": "ece",
}
PADDED = ("accuracy", "f1", "ece")
"""Scores of words that the thesis most likely computes with padding."""


class Published(NamedTuple):
    """One number of a table of the thesis: its place there, its value, and the standard deviation after its ±."""

    table: str  # "3.1"
    dataset: str
    metric: str
    method: str
    value: float
    std: float | None


@lru_cache(maxsize=1)
def published() -> tuple[Published, ...]:
    """Every number, in the order of the file."""
    text = (resources.files("bayesformer.study.reproduction") / "published.csv").read_text(encoding="utf8")
    return tuple(
        Published(
            row["table"].split()[0],
            row["dataset"],
            row["metric"],
            row["method"],
            float(row["value"]),
            float(row["std"]) if row["std"] else None,
        )
        for row in csv.DictReader(text.splitlines())
    )


def score_of(dataset: str, metric: str) -> str:
    """The name of our score that a number of a table is compared with."""
    if dataset == "POS ambiguity corpus":
        return {"auroc": "auroc/ambiguity", "accuracy": "tree_accuracy/ambiguity"}[metric]
    if dataset.startswith("MNIST vs"):
        return f"auroc/{'ambiguous' if 'Ambiguous' in dataset else 'fashion'}"
    ours = METRICS[metric]
    return f"{ours}/padded" if dataset == "POS" and metric in PADDED else ours
