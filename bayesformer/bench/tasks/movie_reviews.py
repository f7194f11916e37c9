"""The tasks `imdb` and `imdb/cnn_lstm`: the sentiment of movie reviews, by a transformer and by a CNN-LSTM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from torch import Tensor, nn

from bayesformer.bench.tasks.judging import classification_evaluation
from bayesformer.bench.tasks.protocol import Ask, Evaluation, Task, TaskData
from bayesformer.core.types import Inputs
from bayesformer.data import Data
from bayesformer.datasets import imdb
from bayesformer.likelihoods import Categorical, Likelihood
from bayesformer.models.cnn_lstm import CnnLstm
from bayesformer.models.transformer import Encoder, SequenceClassifier
from bayesformer.train.training import Training


@dataclass(frozen=True)
class ImdbReviews(Task):
    """Movie reviews, positive or negative, by a transformer trained from scratch; needs BAYESFORMER_DATA."""

    train: int = 4000
    """training reviews"""
    validation: int = 1000
    """validation reviews"""
    test: int = 4000
    """test reviews"""
    words: int = 10000
    """size of the vocabulary"""
    length: int = 128
    """words kept of a review, from its end"""
    data_seed: int = 0
    """which reviews"""
    dim: int = 64
    """width of the transformer"""
    depth: int = 1
    """blocks"""
    heads: int = 2
    """attention heads"""

    likelihood: ClassVar[Likelihood] = Categorical()

    @property
    def training(self) -> Training:
        """10 epochs: without pretraining the network soon memorises the training reviews."""
        return Training(epochs=10, batch_size=50, lr=1e-3, schedule="cosine", warmup=100, patience=0)

    def load(self) -> TaskData:
        """Three disjoint sets of reviews."""
        reviews = imdb.load(self.train, self.validation, self.test, self.words, self.length, self.data_seed)
        return TaskData(reviews.train, reviews.validation, reviews.test, probes={})

    def model(self) -> nn.Module:
        """A transformer encoder; the mean of its outputs over the words is classified."""
        encoder = Encoder(dim=self.dim, depth=self.depth, heads=self.heads, max_length=self.length, mlp_ratio=4)
        return SequenceClassifier(encoder, self.words, 2)

    def evaluate(self, ask: Ask, data: TaskData) -> Evaluation:
        """Classification scores on the test reviews."""
        return classification_evaluation(ask(data.test.inputs), data.test, {})

    def inputs(self, rows: Tensor) -> Inputs:
        """(N, T) token numbers, 0 where a review has ended."""
        if rows.dim() != 2 or rows.shape[1] > self.length:
            raise ValueError(f"reviews must be rows of at most {self.length} token numbers; got {tuple(rows.shape)}.")
        ids = rows.long()
        return {"input_ids": ids, "attention_mask": imdb.mask_of(ids)}


@dataclass(frozen=True)
class CnnLstmReviews(Task):
    """Movie reviews by the CNN-LSTM of Wenzel et al. (2020), 2.6 million weights; needs BAYESFORMER_DATA."""

    train: int = 22_500
    """training reviews; with the validation reviews all 25,000 of the training part"""
    validation: int = 2500
    """validation reviews"""
    test: int = 25_000
    """test reviews"""
    words: int = 20_000
    """size of the vocabulary"""
    length: int = 100
    """words kept of a review, from its end"""
    data_seed: int = 0
    """which reviews"""

    likelihood: ClassVar[Likelihood] = Categorical()

    @property
    def training(self) -> Training:
        """10 epochs of Adam with its usual rate, constant; the best epoch by validation data is kept."""
        return Training(epochs=10, batch_size=32, lr=1e-3, schedule="constant", patience=0)

    def load(self) -> TaskData:
        """Three disjoint sets of reviews, padded in front."""
        sizes = (self.train, self.validation, self.test)
        reviews = front_padded(*sizes, self.words, self.length, self.data_seed)
        train, validation, test = (
            Data(part.inputs["input_ids"], part.targets)  # type: ignore[index,call-overload]
            for part in (reviews.train, reviews.validation, reviews.test)
        )
        return TaskData(train, validation, test, probes={})

    def model(self) -> nn.Module:
        """The CNN-LSTM with two classes."""
        return CnnLstm(self.words)

    def evaluate(self, ask: Ask, data: TaskData) -> Evaluation:
        """Classification scores on the test reviews."""
        assert isinstance(data.test.inputs, Tensor)
        test = Data({"review": data.test.inputs}, data.test.targets)  # no pictures
        return classification_evaluation(ask(data.test.inputs), test, {})

    def inputs(self, rows: Tensor) -> Tensor:
        """(N, 100) token numbers, 0 before a review begins."""
        if rows.dim() != 2 or rows.shape[1] != self.length:
            raise ValueError(f"reviews must be rows of {self.length} token numbers; got {tuple(rows.shape)}.")
        return rows.long()


@lru_cache(maxsize=1)
def front_padded(train: int, validation: int, test: int, words: int, length: int, seed: int) -> imdb.Reviews:
    """Reviews of these sizes for recurrent networks; kept, since reading all of them takes several seconds."""
    return imdb.load(train, validation, test, words, length, seed, padding="start")
