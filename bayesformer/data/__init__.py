"""Data sets as tensors, each module one of them."""

from bayesformer.data import digits, imdb, regression, toy

__all__ = ["digits", "imdb", "regression", "toy"]
