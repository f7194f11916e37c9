"""Random weights for any model: mean-field posteriors and concrete dropout.

bayesian = convert(model, "gaussian", prior="normal(0, 1)")
loss = -log_likelihood(bayesian(x), y).mean() + kl_divergence(bayesian) / num_data
plain = revert(bayesian)
"""

from bayesformer.layers.concrete import ConcreteSite, convert_concrete
from bayesformer.layers.convert import convert, revert
from bayesformer.layers.divergence import has_random_parts, kl_divergence
from bayesformer.layers.families import FAMILIES
from bayesformer.layers.variational import Variational
from bayesformer.priors.improved import IMPROVED

__all__ = [
    "FAMILIES",
    "IMPROVED",
    "ConcreteSite",
    "Variational",
    "convert",
    "convert_concrete",
    "has_random_parts",
    "kl_divergence",
    "revert",
]
