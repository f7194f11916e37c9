"""The tasks `glue/*`: few labelled sentences, and a pretrained encoder that learns them by adapters or as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from bayesformer import evaluate
from bayesformer.bench.tasks.judging import classification_evaluation, regression_evaluation
from bayesformer.bench.tasks.pretrained_encoder import encoder_inputs, encoder_model, token_numbers
from bayesformer.bench.tasks.protocol import Ask, Evaluation, Task, TaskData
from bayesformer.core.seeds import generator
from bayesformer.core.types import Inputs
from bayesformer.data import Data
from bayesformer.datasets import imdb
from bayesformer.datasets.glue import GLUE, GlueRow, glue_rows, load_glue
from bayesformer.likelihoods import Categorical, Gaussian, Likelihood
from bayesformer.likelihoods.predictive import CategoricalPredictive, GaussianPredictive, Predictive
from bayesformer.train.training import Training

CLASSES = ("rte", "mrpc", "cola", "sst2")
CENTRE, SCALE = 2.5, 1.5  # of similarity scores, which go from 0 to 5


@dataclass(frozen=True)
class GlueSentences(Task):
    """Sentences in two classes by all-MiniLM-L6-v2; the other tasks and IMDB reviews are out of distribution."""

    problem: str
    """which task of GLUE: rte, mrpc, cola or sst2"""
    learned: Literal["lora", "full"] = "lora"
    """adapters of rank 8 on query and value, and the head; or all weights"""
    train: int = 640
    """training rows"""
    validation: int = 200
    """validation rows, from the training file"""
    test: int = 0
    """test rows, the first of the development file; 0 takes all"""
    length: int = 96
    """tokens of a row, at most"""
    others: int = 100
    """rows of every other data set, to be told from test rows"""
    data_seed: int = 0
    """which rows"""

    likelihood: ClassVar[Likelihood] = Categorical()

    @property
    def description(self) -> str:
        """One line with the task's name and its number of rows."""
        return f"{GLUE[self.problem].folder} of GLUE, {self.train} rows, by a pretrained encoder ({self.learned})."

    @property
    def training(self) -> Training:
        """Six epochs of 40 steps, the best by validation kept."""
        lr = 1e-3 if self.learned == "lora" else 1e-4
        return Training(epochs=6, batch_size=16, lr=lr, schedule="cosine", warmup=20, patience=0)

    def load(self) -> TaskData:
        """Rows to learn, to choose by and to judge by, and rows of other data sets."""
        parts = load_glue(self.problem, self.train, self.validation, self.data_seed)
        test = parts.test[: self.test or None]
        train, validation, tested = (self._encoded(rows) for rows in (parts.train, parts.validation, test))
        return TaskData(train, validation, tested, self._foreign())

    def _encoded(self, rows: Sequence[GlueRow]) -> Data:
        ids = token_numbers([row.texts for row in rows], self.length)
        return Data(encoder_inputs(ids), torch.tensor([int(row.label) for row in rows]))

    def _foreign(self) -> dict[str, Tensor]:
        if not self.others:
            return {}
        texts: dict[str, list[tuple[str, ...]]] = {
            name: [row.texts for row in glue_rows(name, "dev")] for name in CLASSES if name != self.problem
        }
        texts["imdb"] = [(text,) for text, _ in imdb.review_texts("test")]
        found = {}
        for name, rows in texts.items():
            order = torch.randperm(len(rows), generator=generator(self.data_seed, "foreign", name)).tolist()
            found[name] = token_numbers([rows[i] for i in order[: self.others]], self.length)
        return found

    def model(self) -> nn.Module:
        """The pretrained encoder with a new head of two classes."""
        return encoder_model("classes", 2, self.learned)

    def evaluate(self, ask: Ask, data: TaskData) -> Evaluation:
        """Classification scores, Matthews' correlation, and whether uncertainty finds errors and foreign rows."""
        found = ask(data.test.inputs)
        assert isinstance(found, CategoricalPredictive)
        outsiders = {name: ask(encoder_inputs(ids)) for name, ids in data.probes.items()}
        evaluation = classification_evaluation(found, data.test, outsiders)
        evaluation.metrics["matthews"] = evaluate.matthews(found, data.test.targets)
        evaluation.metrics.update(errors_found(found, data.test.targets))
        return evaluation

    def inputs(self, rows: Tensor) -> Inputs:
        """(N, T) token numbers of the encoder's vocabulary, 0 where a row has ended."""
        return encoder_inputs(rows.long())


def errors_found(predictive: CategoricalPredictive, targets: Tensor) -> dict[str, float]:
    """How well total and epistemic uncertainty tell wrong answers from right ones; nothing where all are alike."""
    wrong = predictive.labels != targets
    if not bool(wrong.any()) or bool(wrong.all()):
        return {}
    metrics = {"auroc/errors": evaluate.auroc(predictive.total[~wrong], predictive.total[wrong])}
    if len(predictive.log_probs) > 1:
        spread = predictive.epistemic
        metrics["auroc_epistemic/errors"] = evaluate.auroc(spread[~wrong], spread[wrong])
    return metrics


@dataclass(frozen=True)
class GlueScores(Task):
    """Similarity of two sentences (STS-B) by all-MiniLM-L6-v2: a Gaussian over a score, its width predicted too."""

    learned: Literal["lora", "full"] = "lora"
    """adapters of rank 8 on query and value, and the head; or all weights"""
    train: int = 640
    """training rows"""
    validation: int = 200
    """validation rows, from the training file"""
    test: int = 0
    """test rows, the first of the development file; 0 takes all"""
    length: int = 64
    """tokens of a row, at most"""
    data_seed: int = 0
    """which rows"""

    likelihood: ClassVar[Likelihood] = Gaussian()

    @property
    def training(self) -> Training:
        """Ten epochs, the best by validation kept."""
        lr = 1e-3 if self.learned == "lora" else 1e-4
        return Training(epochs=10, batch_size=32, lr=lr, schedule="cosine", warmup=20, patience=0)

    def load(self) -> TaskData:
        """Rows to learn, to choose by and to judge by; scores have mean 0 and standard deviation 1, about."""
        parts = load_glue("stsb", self.train, self.validation, self.data_seed)
        chosen = (parts.train, parts.validation, parts.test[: self.test or None])
        train, validation, test = (self._encoded(rows) for rows in chosen)
        return TaskData(train, validation, test, {})

    def _encoded(self, rows: Sequence[GlueRow]) -> Data:
        ids = token_numbers([row.texts for row in rows], self.length)
        scores = torch.tensor([(row.label - CENTRE) / SCALE for row in rows])
        return Data(encoder_inputs(ids), scores.unsqueeze(1))

    def model(self) -> nn.Module:
        """The pretrained encoder with a new head: mean and scale of the score."""
        return encoder_model("classes", 2, self.learned)

    def evaluate(self, ask: Ask, data: TaskData) -> Evaluation:
        """Regression scores, and correlations with the true scores."""
        found = ask(data.test.inputs)
        assert isinstance(found, GaussianPredictive)
        evaluation = regression_evaluation(found, data.test, None, {})
        evaluation.metrics["pearson"] = evaluate.pearson(found, data.test.targets)
        evaluation.metrics["spearman"] = evaluate.spearman(found, data.test.targets)
        return evaluation

    def inputs(self, rows: Tensor) -> Inputs:
        """(N, T) token numbers of the encoder's vocabulary, 0 where a row has ended."""
        return encoder_inputs(rows.long())

    def answer(self, predictive: Predictive) -> Predictive:
        """The predictive in units of the standardised score."""
        return predictive
