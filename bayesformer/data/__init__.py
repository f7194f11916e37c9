"""Data sets as tensors, each module one of them."""

from bayesformer.data import digits, imdb, toy

__all__ = ["digits", "imdb", "toy"]
