"""Gaussians around a mode say how far the mean of a skewed posterior is from it."""

import pytest
import torch
from torch import nn

import bayesformer as bf

X = torch.linspace(0.2, 1.0, 12)[:, None]
ALL_RIGHT = torch.ones(12, 1)  # every answer is yes: the larger the weight the better, until the prior stops it
MIXED = torch.tensor([[0.0], [1.0]]).repeat(6, 1)
PRECISION = 0.04


def moments(y):
    """Mean and standard deviation of the weight of a logistic regression without bias, by quadrature."""
    grid = torch.linspace(-30, 60, 200_001, dtype=torch.float64)
    logits = grid[:, None] * X.double().T
    log_joint = -nn.functional.softplus(-(2 * y.double().T - 1) * logits).sum(1) - PRECISION * grid.square() / 2
    weight = torch.softmax(log_joint, 0)
    mean = float(weight @ grid)
    return mean, float(weight @ (grid - mean).square()) ** 0.5


def fitted(y, method):
    return bf.fit(nn.Linear(1, 1, bias=False), (X, y), likelihood="bernoulli", method=method)


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_laplace_says_how_far_the_mean_is(structure):
    mean, sd = moments(ALL_RIGHT)
    posterior = fitted(ALL_RIGHT, bf.Laplace(structure=structure, prior_precision=PRECISION))
    off = (mean - float(posterior.law.mean)) / sd
    assert off > 0.3  # the problem is skewed
    assert posterior.facts["mean_shift"] == pytest.approx(off, rel=0.5)  # a first step towards the mean, in sds of q
    assert "mean" in [doubt.check for doubt in posterior.doubts]
    mean, sd = moments(MIXED)
    posterior = fitted(MIXED, bf.Laplace(structure=structure, prior_precision=PRECISION))
    assert abs(mean - float(posterior.law.mean)) / sd < 0.1
    assert posterior.facts["mean_shift"] < 0.1
    assert posterior.doubts == ()


@pytest.mark.parametrize("kind", ["diag", "dense"])
def test_the_filter_says_it_too(kind):
    prior = f"normal(0, {PRECISION**-0.5})"
    doubts = fitted(ALL_RIGHT, bf.Ekf(kind=kind, prior=prior)).doubts
    assert [doubt.check for doubt in doubts] == ["mean"]
    assert "skewed" in doubts[0].sentence
    assert fitted(MIXED, bf.Ekf(kind=kind, prior=prior)).doubts == ()


def test_a_gaussian_posterior_is_not_skewed():
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    y = x.sum(1, keepdim=True) + 0.3 * torch.randn(60, 1)
    posterior = bf.fit(nn.Linear(4, 1), (x, y), likelihood=bf.Gaussian(0.3), method=bf.Laplace("diag"))
    assert posterior.facts["mean_shift"] < 0.05  # its mode is as exact as float32 gradients are
