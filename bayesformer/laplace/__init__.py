"""Laplace's method: curvature in its structures, the evidence, the choice of the prior, and the method itself."""

from bayesformer.laplace.absorb import absorb
from bayesformer.laplace.estimate import Curvature, estimate
from bayesformer.laplace.evidence import Groups, Noise, Quadratic, log_evidence
from bayesformer.laplace.maximise import Choice, best_of, maximise

__all__ = [
    "Choice",
    "Curvature",
    "Groups",
    "Noise",
    "Quadratic",
    "absorb",
    "best_of",
    "estimate",
    "log_evidence",
    "maximise",
]
