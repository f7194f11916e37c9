"""bayesformer makes any transformer Bayesian and shows whether that helped."""

from bayesformer.version import __version__

__all__ = ["__version__"]
