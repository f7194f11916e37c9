"""The task `pos`: parts of speech of English words, and whether uncertainty finds ambiguous sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesformer import evaluate
from bayesformer.bench.tasks.judging import entropies, first_of, rounded
from bayesformer.bench.tasks.protocol import Ask, Evaluation, Task, TaskData
from bayesformer.core.settings import LATER
from bayesformer.core.types import Inputs
from bayesformer.data import Data
from bayesformer.datasets import treebank
from bayesformer.likelihoods import Categorical, Likelihood
from bayesformer.likelihoods.predictive import CategoricalPredictive
from bayesformer.models.transformer import Encoder, Tagger
from bayesformer.train.training import Training

IMPOSSIBLE = -30.0  # log probability of a wrong tag of padding
PADDED = ("accuracy", "f1_macro", "f1_weighted", "ece", "brier")
SHOWN = 8  # sentences of highest and of lowest entropy


@dataclass(frozen=True)
class PosTagging(Task):
    """Parts of speech of English words by a small transformer; 30 sentences tell whether it knows what is ambiguous."""

    dim: int = 32
    """width of the transformer"""
    depth: int = 1
    """blocks"""
    heads: int = 1
    """attention heads"""
    length: int = treebank.LENGTH
    """words per sequence; longer sentences are split"""
    train: int | None = field(default=None, metadata=LATER)
    """training sequences, the first of them; none takes all"""
    test: int | None = field(default=None, metadata=LATER)
    """test sequences, the first of them; none takes all"""

    likelihood: ClassVar[Likelihood] = Categorical()

    def __post_init__(self) -> None:
        longest = max(map(len, treebank.ambiguity_corpus().lemmas))
        if self.length < longest:
            raise ValueError(
                f"length must be at least {longest}, as the sentences of the corpus are; got {self.length}."
            )

    @property
    def training(self) -> Training:
        """6 epochs, the rate falling to 0, of which the best by validation is kept: after three or four, words that
        never occur in training are tagged with ever more confidence."""
        return Training(epochs=6, batch_size=64, lr=1e-2, schedule="cosine", warmup=100, patience=0)

    def load(self) -> TaskData:
        """The three parts of the treebank, and the sentences of the ambiguity corpus."""
        tagged = sentences(self.length)
        corpus = treebank.encode_words(treebank.ambiguity_corpus().lemmas, tagged.numbers, self.length)
        train, test = first_of(tagged.train, self.train), first_of(tagged.test, self.test)
        return TaskData(train, tagged.validation, test, {"ambiguity": corpus})

    def model(self) -> nn.Module:
        """A transformer that sees the whole sentence; every word is classified."""
        encoder = Encoder(dim=self.dim, depth=self.depth, heads=self.heads, max_length=self.length)
        return Tagger(encoder, len(sentences(self.length).vocabulary), len(treebank.TAGS))

    def evaluate(self, ask: Ask, data: TaskData) -> Evaluation:
        """Scores over words and over padded sequences, and how well entropy tells ambiguous sentences."""
        test, mask = data.test, data.test.mask
        assert mask is not None
        predictive = ask(test.inputs)
        assert isinstance(predictive, CategoricalPredictive)
        metrics = evaluate.classification(predictive, test.targets, mask)
        padded = evaluate.classification(with_padding(predictive, mask), test.targets)
        metrics |= {f"{name}/padded": padded[name] for name in PADDED}
        corpus = data.probes["ambiguity"]
        asked = ask(treebank.inputs_of(corpus))
        assert isinstance(asked, CategoricalPredictive)
        metrics |= ambiguity(asked, corpus != treebank.PADDING, treebank.ambiguity_corpus().ambiguous)
        words = predictive.select(mask)
        figures: dict[str, Any] = {
            "reliability": evaluate.reliability(words, test.targets[mask]),
            "entropy": entropies({"test": words, "ambiguity corpus": asked.select(corpus != treebank.PADDING)}),
            "sentences": extremes(predictive, test, sentences(self.length).vocabulary),
        }
        return Evaluation(metrics, None, None, figures)

    def inputs(self, rows: Tensor) -> Inputs:
        """(N, T) numbers of words, 0 where a sentence has ended."""
        if rows.dim() != 2 or rows.shape[1] > self.length:
            raise ValueError(f"sentences must be rows of at most {self.length} numbers; got {tuple(rows.shape)}.")
        return treebank.inputs_of(rows.long())


@lru_cache(maxsize=1)
def sentences(length: int) -> treebank.Tagged:
    """The treebank in sequences of this length; kept, since the model needs the size of its vocabulary."""
    return treebank.load(length=length)


def with_padding(predictive: CategoricalPredictive, mask: Tensor) -> CategoricalPredictive:
    """The predictive with padding tagged X, surely and rightly, as a model that learns padding does after a few steps.

    Published scores that count padding are compared with these: they say little of words.
    """
    certain = torch.full_like(predictive.log_probs[:, :1, :1], IMPOSSIBLE)  # (L, 1, 1, C)
    certain[..., treebank.OTHER] = 0.0
    return replace(predictive, log_probs=torch.where(mask[..., None], predictive.log_probs, certain))


def sentence_scores(uncertainty: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) each: the mean and the maximum over the words of a sentence, of an uncertainty (N, T)."""
    counted = uncertainty.masked_fill(~mask, 0.0)
    return counted.sum(-1) / mask.sum(-1).clamp_min(1), counted.amax(-1)


def ambiguity(predictive: CategoricalPredictive, mask: Tensor, ambiguous: Tensor) -> dict[str, float]:
    """How well the entropy of a sentence, mean or maximum over its words, tells ambiguous sentences from others."""
    metrics = {}
    for name, score in zip(("ambiguity", "ambiguity_max"), sentence_scores(predictive.total.cpu(), mask), strict=True):
        plain, hard = score[~ambiguous], score[ambiguous]
        metrics[f"auroc/{name}"] = evaluate.auroc(plain, hard)
        metrics[f"tree_accuracy/{name}"] = evaluate.tree_accuracy(plain, hard)
        metrics[f"stump_accuracy/{name}"] = evaluate.stump_accuracy(plain, hard)
    if len(predictive.log_probs) > 1:
        mean, _ = sentence_scores(predictive.epistemic.cpu(), mask)
        metrics["auroc_epistemic/ambiguity"] = evaluate.auroc(mean[~ambiguous], mean[ambiguous])
    return metrics


def extremes(predictive: CategoricalPredictive, test: Data, vocabulary: Sequence[str]) -> dict[str, Any]:
    """The sentences of highest and lowest mean entropy over their words, with their tags."""
    assert isinstance(test.inputs, dict)
    assert test.mask is not None
    mean, _ = sentence_scores(predictive.total.cpu(), test.mask)
    order = mean.argsort()

    def show(index: Tensor) -> list[dict[str, Any]]:
        shown = []
        for i in index.tolist():
            kept = test.mask[i]  # type: ignore[index]
            shown.append(
                {
                    "words": [vocabulary[number] for number in test.inputs["input_ids"][i][kept].tolist()],  # type: ignore[index,call-overload]
                    "tags": [treebank.TAGS[tag] for tag in test.targets[i][kept].tolist()],
                    "predicted": [treebank.TAGS[tag] for tag in predictive.labels[i].cpu()[kept].tolist()],
                    "entropy": rounded(predictive.total[i].cpu()[kept]),
                }
            )
        return shown

    return {"highest": show(order.flip(0)[:SHOWN]), "lowest": show(order[:SHOWN])}
