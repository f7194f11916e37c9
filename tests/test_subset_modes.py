"""Where a subset has the spread, the other weights are at the mode, and the law is the conditional given them."""

import pytest
import torch
from torch import nn

import bayesformer as bf

METHODS = {
    "laplace": bf.Laplace(structure="full", prior_precision=1.0, subset="weight"),
    "vi": bf.Vi(kind="dense", subset="weight"),
    "ekf": bf.Ekf(kind="dense", subset="weight"),
    "sghmc": bf.Sghmc(subset="weight"),
    "nuts": bf.Nuts(chains=2, draws=50, warm_up=100, subset="weight"),
}
N, D, NOISE = 63, 6, 0.5


@pytest.mark.parametrize("name", METHODS)
def test_weights_outside_the_subset_are_at_the_joint_mode(name):
    """Linear regression: U is a quadratic, so mode and conditional are known."""
    source = torch.Generator().manual_seed(3)
    x = torch.randn(N, D, generator=source, dtype=torch.float64)
    y = x @ torch.randn(D, 1, generator=source, dtype=torch.float64) + 0.7
    y = y + NOISE * torch.randn(N, 1, generator=source, dtype=torch.float64)
    wide = torch.cat([x, torch.ones(N, 1, dtype=torch.float64)], 1)
    precision = wide.T @ wide / NOISE**2 + torch.eye(D + 1, dtype=torch.float64)
    mode = torch.linalg.solve(precision, wide.T @ y / NOISE**2)[:, 0]
    sd = torch.linalg.inv(precision[:D, :D]).diagonal().sqrt()  # of the weights given the bias
    torch.manual_seed(1)
    posterior = bf.fit(
        nn.Linear(D, 1),
        (x.float(), y.float()),
        likelihood=bf.Gaussian(NOISE),
        method=METHODS[name],
        training=bf.Training(epochs=3),  # Adam alone is far from the mode
        progress=False,
    )
    draws = posterior.sample(400 if name in {"laplace", "vi", "ekf"} else None)
    bias, weights = draws["bias"].double(), draws["weight"].double()[:, 0]
    assert (bias - mode[D]).abs().max() < 0.05 * torch.linalg.inv(precision)[D, D].sqrt()
    error = ((weights.mean(0) - mode[:D]) / sd).square().mean().sqrt()
    assert error < 0.4, float(error)
    ratio = (weights.std(0) / sd).median()
    assert 0.75 < ratio < 1.3, float(ratio)
