"""The task `squad`: questions on paragraphs, answered by a piece of the paragraph, by a pretrained encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bayesformer import evaluate
from bayesformer.bench.tasks.pretrained_encoder import encoder_inputs, encoder_model, encoder_tokenizer
from bayesformer.bench.tasks.protocol import Ask, Evaluation, Task, TaskData
from bayesformer.core.seeds import generator
from bayesformer.core.types import Inputs
from bayesformer.data import Data
from bayesformer.datasets import squad
from bayesformer.likelihoods import Categorical, Likelihood
from bayesformer.likelihoods.predictive import CategoricalPredictive
from bayesformer.train.training import Training

LEARNED, CHOSEN = 34, 38
"""articles of the file, in order, whose questions are learned; those up to the second number are validation's"""


@dataclass(frozen=True)
class SquadAnswers(Task):
    """SQuAD by all-MiniLM-L6-v2, its development set split by article: the first and the last token of an answer."""

    learned: Literal["lora", "full"] = "full"
    """all weights; or adapters of rank 8 on query and value, and the head"""
    train: int = 640
    """training questions"""
    validation: int = 100
    """validation questions, of other articles"""
    test: int = 300
    """test questions, of yet other articles"""
    length: int = 192
    """tokens of question and paragraph; questions whose answer is cut off are left out"""
    data_seed: int = 0
    """which questions"""

    likelihood: ClassVar[Likelihood] = Categorical()

    @property
    def training(self) -> Training:
        """Six epochs, the best by validation kept."""
        lr = 1e-3 if self.learned == "lora" else 2e-4
        return Training(epochs=6, batch_size=32, lr=lr, schedule="cosine", warmup=20, patience=0)

    def load(self) -> TaskData:
        """Questions on three disjoint sets of articles."""
        parts = encoded_parts(self)
        train, validation, test = (Data(found.inputs, found.data["labels"]) for found in parts)
        return TaskData(train, validation, test, {})

    def model(self) -> nn.Module:
        """The pretrained encoder with a new head of two outputs per token."""
        return encoder_model("spans", 2, self.learned)

    def evaluate(self, ask: Ask, data: TaskData) -> Evaluation:
        """Exact match and token F1 of the likeliest pieces, and scores of the two ends."""
        found = ask(data.test.inputs)
        assert isinstance(found, CategoricalPredictive)
        asked = encoded_parts(self)[2]
        answers = asked.answers(found)
        metrics = evaluate.classification(found, data.test.targets)
        metrics["exact_match"] = evaluate.exact_match(answers, asked.truths)
        metrics["token_f1"] = evaluate.token_f1(answers, asked.truths)
        wrong = torch.tensor([not evaluate.exact_match([a], [t]) for a, t in zip(answers, asked.truths, strict=True)])
        if bool(wrong.any()) and not bool(wrong.all()):
            total = found.total.sum(-1)
            metrics["auroc/errors"] = evaluate.auroc(total[~wrong], total[wrong])
        return Evaluation(metrics, None, None, {})

    def inputs(self, rows: Tensor) -> Inputs:
        """(N, T) token numbers of the encoder's vocabulary, question then paragraph, 0 where a row has ended."""
        return encoder_inputs(rows.long())


@lru_cache(maxsize=2)
def encoded_parts(task: SquadAnswers) -> tuple[Any, Any, Any]:
    """Questions to learn, to choose by and to judge by, with their texts; kept, since answers are read off these."""
    known = squad.articles()
    parts = (known[:LEARNED], known[LEARNED:CHOSEN], known[CHOSEN:])
    counts = (task.train, task.validation, task.test)
    first, second, third = (_encoded(task, *part, number=i) for i, part in enumerate(zip(parts, counts, strict=True)))
    return first, second, third


def _encoded(task: SquadAnswers, articles: Sequence[squad.Article], count: int, number: int) -> Any:
    from bayesformer.hf.questions import encode_questions

    questions = [question for article in articles for question in article.questions]
    order = torch.randperm(len(questions), generator=generator(task.data_seed, "squad", number)).tolist()
    return encode_questions([questions[i] for i in order[:count]], encoder_tokenizer(), task.length)
