"""Tasks: data, a model and a likelihood, and how a posterior is judged on them; one file each.

`TASKS` lists them by name. The runner knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bayesformer.bench.tasks.citation_graph import CitationGraph
from bayesformer.bench.tasks.digits_vit import DigitsVit
from bayesformer.bench.tasks.glue_sentences import GlueScores, GlueSentences
from bayesformer.bench.tasks.known_posterior import KnownPosterior
from bayesformer.bench.tasks.mnist_vit import MnistVit
from bayesformer.bench.tasks.movie_reviews import CnnLstmReviews, ImdbReviews
from bayesformer.bench.tasks.pos_tagging import PosTagging
from bayesformer.bench.tasks.pretrained_tagging import PretrainedTagging
from bayesformer.bench.tasks.protocol import Evaluation, Task, TaskData
from bayesformer.bench.tasks.squad_answers import SquadAnswers
from bayesformer.bench.tasks.tabular_regression import TabularRegression
from bayesformer.bench.tasks.toy_series import ToySeries
from bayesformer.core.settings import identity
from bayesformer.datasets import toy
from bayesformer.reference import PROBLEMS

__all__ = [
    "TASKS",
    "CitationGraph",
    "CnnLstmReviews",
    "DigitsVit",
    "Evaluation",
    "GlueScores",
    "GlueSentences",
    "ImdbReviews",
    "KnownPosterior",
    "MnistVit",
    "PosTagging",
    "PretrainedTagging",
    "SquadAnswers",
    "TabularRegression",
    "Task",
    "TaskData",
    "ToySeries",
    "describe",
    "task_identity",
]

GLUE_LENGTHS = {"rte": 96, "mrpc": 80, "cola": 24, "sst2": 40}

TASKS: dict[str, Callable[[], Task]] = {
    **{f"toy/{name}": partial(ToySeries, name) for name in toy.SERIES},
    "digits": DigitsVit,
    "pos": PosTagging,
    "mnist": MnistVit,
    "imdb": ImdbReviews,
    "imdb/cnn_lstm": CnnLstmReviews,
    # Pubmed, which has 60 labels, gets 8 heads in the last layer and another rate in the paper.
    "graph/cora": partial(CitationGraph, "cora"),
    "graph/citeseer": partial(CitationGraph, "citeseer"),
    "graph/pubmed": partial(CitationGraph, "pubmed", out_heads=8, lr=0.01),
    # rows of RTE and MRPC are pairs of long sentences; three quarters of CoLA's have fewer than 15 tokens
    **{f"glue/{name}": partial(GlueSentences, name, length=length) for name, length in GLUE_LENGTHS.items()},
    "glue/stsb": GlueScores,
    "pos/minilm": PretrainedTagging,
    "squad": SquadAnswers,
    "regression/diabetes": partial(TabularRegression, "diabetes"),
    **{f"regression/friedman{i}": partial(TabularRegression, f"friedman{i}", test=1000) for i in (1, 2, 3)},
    **{f"fidelity/{name}": partial(KnownPosterior, name, build().version) for name, build in PROBLEMS.items()},
}


def task_identity(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a task that tell two results apart; all of them where the task is not known any more."""
    known = TASKS.get(name)
    return dict(settings) if known is None else identity(type(known()), settings)


def describe(name: str) -> str:
    """The one-line description of the task of this name."""
    return TASKS[name]().description
