"""Laplace's method: curvature in its structures, the evidence, the choice of the prior, and the method itself."""

from bayesformer.laplace.absorb import absorb
from bayesformer.laplace.estimate import Curvature, estimate
from bayesformer.laplace.evidence import Groups, ObservationNoise, Quadratic, log_evidence
from bayesformer.laplace.maximise import BestCandidate, best_of, maximise

__all__ = [
    "BestCandidate",
    "Curvature",
    "Groups",
    "ObservationNoise",
    "Quadratic",
    "absorb",
    "best_of",
    "estimate",
    "log_evidence",
    "maximise",
]
