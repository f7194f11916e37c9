"""bayesformer makes any transformer Bayesian and shows whether that helped.

    posterior = bayesformer.fit(model, (x, y), likelihood="categorical", method=bayesformer.Ensemble(5))
    prediction = posterior.predict(x_new)
    prediction.probs, prediction.epistemic

A model, a likelihood and a method give a posterior; a posterior and an input give a predictive; a predictive
and a target give a score (`bayesformer.evaluate`).
"""

from bayesformer import attention, likelihoods
from bayesformer.core.doubts import Doubt, FidelityWarning
from bayesformer.core.errors import DamagedFileError, OracleBeatenError, TrainingDivergedError
from bayesformer.core.types import Batch
from bayesformer.data import Data, Stream
from bayesformer.fitting import fit
from bayesformer.inference.linear_algebra import conjugate_gradients, power_iteration
from bayesformer.laplace.method import laplace
from bayesformer.laplace.update import laplace_update
from bayesformer.layers import convert, convert_concrete, kl_divergence, revert
from bayesformer.likelihoods import Bernoulli, Categorical, Gaussian, NextToken, Poisson
from bayesformer.likelihoods.predictive import CategoricalPredictive, GaussianPredictive, PoissonPredictive
from bayesformer.likelihoods.token_predictive import TokenPredictive
from bayesformer.methods import (
    METHODS,
    Attention,
    Baoab,
    Blob,
    Combined,
    ConcreteDropout,
    Ekf,
    Ensemble,
    Hmc,
    Ivon,
    Laplace,
    Map,
    MCDropout,
    MeanField,
    Mle,
    Nuts,
    Psgld,
    Sghmc,
    Sgld,
    Sgnht,
    Swag,
    Tfb,
    Vi,
)
from bayesformer.methods.lora import tfb
from bayesformer.posterior import Posterior
from bayesformer.priors.prior import Prior
from bayesformer.train.curvature_products import curvature_products
from bayesformer.train.log_joint import log_joint
from bayesformer.train.loss import loss
from bayesformer.train.training import Training
from bayesformer.version import __version__

__all__ = [
    "METHODS",
    "Attention",
    "Baoab",
    "Batch",
    "Bernoulli",
    "Blob",
    "Categorical",
    "CategoricalPredictive",
    "Combined",
    "ConcreteDropout",
    "DamagedFileError",
    "Data",
    "Doubt",
    "Ekf",
    "Ensemble",
    "FidelityWarning",
    "Gaussian",
    "GaussianPredictive",
    "Hmc",
    "Ivon",
    "Laplace",
    "MCDropout",
    "Map",
    "MeanField",
    "Mle",
    "NextToken",
    "Nuts",
    "OracleBeatenError",
    "Poisson",
    "PoissonPredictive",
    "Posterior",
    "Prior",
    "Psgld",
    "Sghmc",
    "Sgld",
    "Sgnht",
    "Stream",
    "Swag",
    "Tfb",
    "TokenPredictive",
    "Training",
    "TrainingDivergedError",
    "Vi",
    "__version__",
    "attention",
    "conjugate_gradients",
    "convert",
    "convert_concrete",
    "curvature_products",
    "fit",
    "kl_divergence",
    "laplace",
    "laplace_update",
    "likelihoods",
    "log_joint",
    "loss",
    "power_iteration",
    "revert",
    "tfb",
]


def __getattr__(name: str) -> object:
    """`bayesformer.hf` is imported when it is asked for: it needs transformers, which others need not have."""
    if name == "hf":
        import importlib

        return importlib.import_module("bayesformer.hf")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
