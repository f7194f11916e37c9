"""The tasks `graph/*`: classes of the nodes of a citation graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from torch import Tensor, nn

from bayesformer.bench.tasks.judging import classification_evaluation
from bayesformer.bench.tasks.protocol import Ask, Evaluation, Task, TaskData
from bayesformer.core.types import Inputs
from bayesformer.data import Data
from bayesformer.datasets import planetoid
from bayesformer.datasets.graphs import Graph
from bayesformer.likelihoods import Categorical, Likelihood
from bayesformer.models.gat import GraphAttentionNetwork
from bayesformer.train.training import Training

DEPTH = 2


@dataclass(frozen=True)
class CitationGraph(Task):
    """Classes of papers in a citation graph by a graph attention network; needs BAYESFORMER_DATA.

    The graph is one example and its nodes are positions, of which masks say what they are for; a step sees all of it.
    """

    name: str = "cora"
    """cora, citeseer or pubmed"""
    width: int = 8
    """of a hidden head"""
    heads: int = 8
    """attention heads of the hidden layer"""
    out_heads: int = 1
    """attention heads of the last layer"""
    dropout: float = 0.6
    """of inputs of both layers and of attention weights"""
    lr: float = 0.005
    """learning rate"""

    likelihood: ClassVar[Likelihood] = Categorical()

    @property
    def training(self) -> Training:
        """That of Veličković et al. (2018), section 3.3, but stopped by the validation log-likelihood alone."""
        return Training(epochs=1000, batch_size=1, lr=self.lr, schedule="constant", clip=1e9, patience=100)

    def load(self) -> TaskData:
        """The graph, and what validation and test nodes see of it; the masks are those of the standard split."""
        graph = load_graph(self.name)
        validation, test = (graph.part(mask, compressed=True, hops=DEPTH) for mask in (graph.validation, graph.test))
        return TaskData(graph.part(graph.train, compressed=True), validation, test, probes={})

    def model(self) -> nn.Module:
        """A graph attention network of two layers, with the sizes of the graph."""
        graph = load_graph(self.name)
        features, classes = graph.x.shape[1], int(graph.y.max()) + 1
        return GraphAttentionNetwork(features, classes, self.width, self.heads, self.out_heads, DEPTH, self.dropout)

    def evaluate(self, ask: Ask, data: TaskData) -> Evaluation:
        """Classification scores, with every test node as one example."""
        test = data.test
        assert test.mask is not None
        numbers = load_graph(self.name).test.nonzero()[:, 0]  # in the whole graph, in the same order
        nodes = Data({"node": numbers}, test.targets[test.mask])
        return classification_evaluation(ask(test.inputs).select(test.mask), nodes, {})

    def inputs(self, rows: Tensor) -> Inputs:
        """The features (N, F) of all nodes, in the order of the graph, together with its edges."""
        graph = load_graph(self.name)
        if rows.shape != graph.x.shape:
            raise ValueError(f"rows must be features of all nodes, {tuple(graph.x.shape)}; got {tuple(rows.shape)}.")
        return {"x": rows[None], "edge_index": graph.edge_index[None]}


@lru_cache(maxsize=1)
def load_graph(name: str) -> Graph:
    """The graph of this name; kept, since the model needs its sizes."""
    return planetoid.load(name)
