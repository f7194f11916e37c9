"""Data sets as tensors, each module one of them."""

from bayesformer.datasets import ambiguous_mnist, digits, graphs, imdb, mnist, planetoid, regression, toy, treebank

__all__ = ["ambiguous_mnist", "digits", "graphs", "imdb", "mnist", "planetoid", "regression", "toy", "treebank"]
