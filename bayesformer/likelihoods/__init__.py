"""What a network's outputs say about data: log p(y | outputs), its curvature, and the predictive; one file each.

A likelihood of one's own derives from `Likelihood` and is made known in one line, `likelihoods.register(MyLikelihood)`.
"""

from bayesformer.likelihoods.aligned_token import AlignedToken
from bayesformer.likelihoods.base import Likelihood
from bayesformer.likelihoods.bernoulli import Bernoulli
from bayesformer.likelihoods.categorical import Categorical
from bayesformer.likelihoods.next_token import NextToken
from bayesformer.likelihoods.output_draws import LINK_DRAWS, as_draws, promote
from bayesformer.likelihoods.poisson import Poisson
from bayesformer.likelihoods.real import Gaussian
from bayesformer.likelihoods.registry import LIKELIHOODS, as_likelihood, from_json, register, to_json

for _kind in (Categorical, Gaussian, Bernoulli, NextToken, AlignedToken, Poisson):
    register(_kind)

__all__ = [
    "LIKELIHOODS",
    "LINK_DRAWS",
    "AlignedToken",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Likelihood",
    "NextToken",
    "Poisson",
    "as_draws",
    "as_likelihood",
    "from_json",
    "promote",
    "register",
    "to_json",
]
