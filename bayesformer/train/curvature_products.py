"""The door to products with curvature matrices, from a model or a posterior."""

from __future__ import annotations

from typing import Any

from torch import nn

from bayesformer.data import as_batches
from bayesformer.jacobians.products import BATCH_SIZE, CurvatureProducts
from bayesformer.laws import buffers_of
from bayesformer.likelihoods import Likelihood, as_likelihood
from bayesformer.model.shell import Shell
from bayesformer.model.space import Choice
from bayesformer.posterior import Posterior
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype


def curvature_products(
    model: nn.Module | Posterior,
    data: Any,
    *,
    likelihood: Likelihood | str | None = None,
    infer: Choice = None,
    batch_size: int = BATCH_SIZE,
) -> CurvatureProducts:
    """Products with the GGN, Fisher and Hessian matrices of the log-likelihood, and the linearised forward pass.

        products = bayesformer.curvature_products(model, (x, y), likelihood="categorical")
        products.ggn(v), products.fisher(v), products.hessian(v)    # (P,), sums over the data, v (P,)
        products.linearised(x_new, v)                               # f + J v
        bayesformer.power_iteration(products.ggn, products.theta).value

    Matrices are at the model's weights, or the posterior's mean, in evaluation mode; the model is left as it is.

    Args:
        model: a module, or a posterior.
        data: training data, as for `fit`; read anew for every product.
        likelihood: as for `fit`; a posterior has its own.
        infer: the weights that are differentiated in, as for `fit`; a posterior has its own.
        batch_size: examples per pass.
    """
    if isinstance(model, Posterior):
        if infer is not None or likelihood is not None:
            raise ValueError("infer and likelihood must be left out for a posterior, which has its own.")
        problem = Problem(model.model, model.likelihood, as_batches(data, "data"), infer=model.infer)
        prototype = Prototype(problem, model.preparation)
        shell = model.skeleton.shell()
        shell.load(model.law.mean)
        shell.load_buffers(buffers_of(model.law, 0))
    else:
        if likelihood is None:
            raise ValueError("likelihood must be given for a model: 'categorical', 'gaussian' or another one.")
        problem = Problem(model, as_likelihood(likelihood), as_batches(data, "data"), infer=infer)
        prototype = Prototype(problem)
        shell = prototype.skeleton.shell()
    return products_of(prototype, shell, batch_size)


def products_of(prototype: Prototype, shell: Shell, batch_size: int = BATCH_SIZE) -> CurvatureProducts:
    """Products at the weights that a shell holds, which is put into evaluation mode, over a prototype's data."""
    shell.module.eval()
    return CurvatureProducts(
        shell,
        prototype.likelihood,
        prototype.data,
        batch_size,
        prototype.evaluation_randomness,
        prototype.problem.seed,
    )
