"""Data sets as tensors, each module one of them."""

from bayesformer.data import digits, toy

__all__ = ["digits", "toy"]
