"""Curvature of outputs at every position is the exact one where that is affordable."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.jacobians import columns
from bayesformer.likelihoods import Categorical

SD = 0.5


def regression():
    """Sequences of 20 positions with a target at each, and the posterior's standard deviation of three outputs."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(10, 20, 3, generator=source)
    y = x[..., :1] + SD * torch.randn(10, 20, 1, generator=source)
    rows = torch.cat([x, torch.ones(10, 20, 1)], -1).reshape(-1, 4).double()
    covariance = torch.linalg.inv(rows.T @ rows / SD**2 + torch.eye(4).double())
    return x, y, (rows[:3] @ covariance * rows[:3]).sum(1).sqrt()


@pytest.mark.parametrize(
    "method",
    [
        bf.Laplace(structure="full", prior_precision=1.0),
        bf.Laplace(structure="last_layer", prior_precision=1.0),
        bf.Ekf(kind="dense"),
    ],
    ids=["full", "last layer", "ekf"],
)
def test_positions_of_a_linear_model_have_the_exact_posterior(method):
    x, y, exact = regression()
    posterior = bf.fit(nn.Linear(3, 1), (x, y), likelihood=bf.Gaussian(scale=SD), method=method, progress=False)
    found = posterior.outputs(x[:1, :3], predictive="linearised").variance.flatten().double().sqrt()
    assert torch.allclose(found, exact, rtol=0.03)


def test_exact_columns_end_where_they_take_long():
    outputs = torch.zeros(2, 128, 9)
    assert columns.default_kind(Categorical(), outputs, 1000, 100) == "ggn"
    assert columns.default_kind(Categorical(), outputs, 22_000_000, 640) == "mc"
    assert columns.default_kind(Categorical(), outputs[:, 0], 22_000_000, 640) == "ggn"
    assert columns.default_kind(Categorical(), torch.zeros(2, 1000), 100_000, 10_000) == "mc"


def test_a_last_layer_takes_no_other_subset():
    with pytest.raises(ValueError, match=r"laplace\.subset must be '\*' for structure='last_layer'.*got 'head\.\*'"):
        bf.Laplace(structure="last_layer", subset="head.*")
