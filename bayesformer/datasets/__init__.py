"""Data sets as tensors, each module one of them."""

from bayesformer.datasets import digits, graphs, imdb, planetoid, regression, toy

__all__ = ["digits", "graphs", "imdb", "planetoid", "regression", "toy"]
