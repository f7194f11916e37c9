"""Attention and the laws its weights may follow."""

from bayesformer.attention.core import Attention, Linear, Softmax, masked_softmax

__all__ = ["Attention", "Linear", "Softmax", "masked_softmax"]
