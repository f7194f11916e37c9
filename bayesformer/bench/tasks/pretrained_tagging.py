"""The task `pos/minilm`: parts of speech of English words as they were written, by a pretrained encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from bayesformer import evaluate
from bayesformer.bench.tasks.pretrained_encoder import PADDING, encoder_inputs, encoder_model, encoder_tokenizer
from bayesformer.bench.tasks.protocol import Ask, Evaluation, Task, TaskData
from bayesformer.core.seeds import generator
from bayesformer.core.types import Inputs
from bayesformer.data import Data
from bayesformer.datasets import treebank
from bayesformer.likelihoods import Categorical, Likelihood
from bayesformer.likelihoods.predictive import CategoricalPredictive
from bayesformer.train.training import Training


@dataclass(frozen=True)
class PretrainedTagging(Task):
    """Parts of speech by all-MiniLM-L6-v2 from few sentences; a word's first token is classified."""

    learned: Literal["lora", "full"] = "lora"
    """adapters of rank 8 on query and value, and the head; or all weights"""
    train: int = 320
    """training sentences"""
    validation: int = 100
    """validation sentences"""
    test: int = 300
    """test sentences"""
    length: int = 48
    """tokens of a sentence; longer ones are cut"""
    data_seed: int = 0
    """which sentences"""

    likelihood: ClassVar[Likelihood] = Categorical()

    @property
    def training(self) -> Training:
        """Ten epochs, the best by validation kept."""
        lr = 3e-3 if self.learned == "lora" else 3e-4
        return Training(epochs=10, batch_size=32, lr=lr, schedule="cosine", warmup=20, patience=0)

    def load(self) -> TaskData:
        """Sentences of the three parts of the treebank."""
        counts = {"train": self.train, "dev": self.validation, "test": self.test}
        train, validation, test = (self._part(part, count) for part, count in counts.items())
        return TaskData(train, validation, test, {})

    def _part(self, part: str, count: int) -> Data:
        sentences = treebank.read_forms(part)
        order = torch.randperm(len(sentences), generator=generator(self.data_seed, "tagging", part)).tolist()
        return encode_tagged([sentences[i] for i in order[:count]], self.length)

    def model(self) -> nn.Module:
        """The pretrained encoder with a new head of 17 tags."""
        return encoder_model("tokens", len(treebank.TAGS), self.learned)

    def evaluate(self, ask: Ask, data: TaskData) -> Evaluation:
        """Classification scores over words."""
        predictive = ask(data.test.inputs)
        assert isinstance(predictive, CategoricalPredictive)
        metrics = evaluate.classification(predictive, data.test.targets, data.test.mask)
        assert data.test.mask is not None
        words, answers = predictive.select(data.test.mask), data.test.targets[data.test.mask]
        return Evaluation(metrics, None, None, {"reliability": evaluate.reliability(words, answers)})

    def inputs(self, rows: Tensor) -> Inputs:
        """(N, T) token numbers of the encoder's vocabulary, 0 where a sentence has ended."""
        return encoder_inputs(rows.long())


def encode_tagged(sentences: Sequence[treebank.Sentence], length: int) -> Data:
    """Token numbers, and the tag of every word at its first token; other tokens do not count."""
    tokenizer = encoder_tokenizer()
    ids = torch.full((len(sentences), length), PADDING)
    tags, counted = torch.full((len(sentences), length), treebank.OTHER), torch.zeros(len(sentences), length).bool()
    for row, sentence in enumerate(sentences):
        words = [word for word, _ in sentence]
        found = tokenizer(words, is_split_into_words=True, truncation=True, max_length=length)
        ids[row, : len(found["input_ids"])] = torch.tensor(found["input_ids"])
        seen: set[int] = set()
        for place, word in enumerate(found.word_ids()):
            if word is not None and word not in seen:
                seen.add(word)
                tags[row, place] = treebank.TAGS.index(sentence[word][1])
                counted[row, place] = True
    return Data(encoder_inputs(ids), tags, counted)
