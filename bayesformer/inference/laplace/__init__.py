"""Laplace's method on given curvature: evidence, tuning of the prior and the noise, and posteriors as priors.

Pure algebra. A curvature is anything with `size`, `posterior(prior, scale)` and `log_det(prior, scale)`.
"""

from bayesformer.inference.laplace.evidence import Groups, Noise, Quadratic, log_evidence
from bayesformer.inference.laplace.online import absorb, precision_log_det, precision_times
from bayesformer.inference.laplace.tuning import Choice, best_of, maximise

__all__ = [
    "Choice",
    "Groups",
    "Noise",
    "Quadratic",
    "absorb",
    "best_of",
    "log_evidence",
    "maximise",
    "precision_log_det",
    "precision_times",
]
