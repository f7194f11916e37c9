"""bayesformer makes any transformer Bayesian and shows whether that helped.

    posterior = bayesformer.fit(model, (x, y), likelihood="categorical", method=bayesformer.Ensemble(5))
    prediction = posterior.predict(x_new)
    prediction.probs, prediction.epistemic

A model, a likelihood and a method give a posterior; a posterior and an input give a predictive; a predictive
and a target give a score (`bayesformer.evaluate`).
"""

from bayesformer.dataset import Data
from bayesformer.distributions import Cauchy, Laplace, Logistic, Normal, StudentT
from bayesformer.errors import DamagedFileError, OracleBeatenError, TrainingDivergedError
from bayesformer.fitting import fit
from bayesformer.likelihoods import Bernoulli, Categorical, Gaussian
from bayesformer.methods import Ensemble, Map, MCDropout, Mle
from bayesformer.network import log_joint
from bayesformer.posterior import Posterior
from bayesformer.predictive import CategoricalPredictive, GaussianPredictive
from bayesformer.priors import Prior
from bayesformer.train import Training
from bayesformer.version import __version__

__all__ = [
    "Bernoulli",
    "Categorical",
    "CategoricalPredictive",
    "Cauchy",
    "DamagedFileError",
    "Data",
    "Ensemble",
    "Gaussian",
    "GaussianPredictive",
    "Laplace",
    "Logistic",
    "MCDropout",
    "Map",
    "Mle",
    "Normal",
    "OracleBeatenError",
    "Posterior",
    "Prior",
    "StudentT",
    "Training",
    "TrainingDivergedError",
    "__version__",
    "fit",
    "log_joint",
]
