"""Outputs under draws of the weights against the linearised network's, at the end of a fit."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp

import bayesformer as bf
from bayesformer.data import as_batches
from bayesformer.laws import gaussian
from bayesformer.train.coordinates import full_batch
from bayesformer.train.linearity import DRAWS, linearised_spread
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from bayesformer.train.recipe import Modes, subset_stage


def batch_of(model, data):
    prototype = Prototype(Problem(model, bf.Gaussian(0.5), as_batches(data, "data")))
    start = prototype.start(0)
    part = subset_stage(prototype, Modes(start.theta[None], {}, None), "*")
    return full_batch(part, "normal(0, 1)"), start.theta


def data_of(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, generator=g, dtype=dtype)
    return x, x.sum(1, keepdim=True)


def network(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 5, dtype=dtype), nn.Tanh(), nn.Linear(5, 1, dtype=dtype))


def test_a_linear_model_spreads_as_its_linearisation():
    batch, theta = batch_of(nn.Linear(2, 1, dtype=torch.float64), data_of())
    assert linearised_spread(batch, gaussian(theta, sd=torch.full_like(theta, 3.0)), 0) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("sd", [1e-2, 1.0])
def test_it_is_what_jacobian_products_give(sd):
    model, (x, y) = network(), data_of()
    batch, theta = batch_of(model, (x, y))
    law = gaussian(theta, sd=torch.full_like(theta, sd))

    def outputs(flat):
        return functional_call(model, batch.space.views(flat), (x,))

    moved = straight = 0
    for draw in range(DRAWS):
        away = law.row(draw, 0) - theta
        moved = moved + (outputs(theta + away) - outputs(theta)).square()
        straight = straight + jvp(outputs, (theta,), (away,))[1].square()
    ratio = float((moved / straight).sqrt().median())
    assert linearised_spread(batch, law, 0) == pytest.approx(ratio, rel=0.02)  # ε³ of the difference


def test_a_posterior_that_is_too_wide_for_its_linearisation_says_so():
    x, y = data_of(torch.float32)
    wide = bf.laplace(
        network(torch.float32).eval(), (x[:4], y[:4]), likelihood=bf.Gaussian(0.5), prior_precision=1e-4, progress=False
    )
    assert wide.facts["linearised_spread"] > 2
    assert "linearisation" in [doubt.check for doubt in wide.doubts]
    narrow = bf.laplace(
        network(torch.float32).eval(), (x, y), likelihood=bf.Gaussian(0.01), prior_precision=1e4, progress=False
    )
    assert narrow.facts["linearised_spread"] == pytest.approx(1, abs=0.2)
    assert "linearisation" not in [doubt.check for doubt in narrow.doubts]


def test_a_spread_that_rounding_hides_is_not_judged():
    batch, theta = batch_of(network(torch.float32), data_of(torch.float32))
    assert linearised_spread(batch, gaussian(theta, sd=torch.full_like(theta, 1e-8)), 0) is None
