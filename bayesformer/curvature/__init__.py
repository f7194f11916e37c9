"""Curvature of the log-likelihood in a model's weights: what its layers do in a forward pass, and the forms of H."""

from bayesformer.curvature.capture import Capture, backpropagate
from bayesformer.curvature.estimate import Curvature, estimate

__all__ = ["Capture", "Curvature", "backpropagate", "estimate"]
