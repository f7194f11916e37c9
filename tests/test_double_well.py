"""The study of two wells: its density, and what an ensemble and chains are known to do there."""

import math

import pytest
import torch

from bayesformer.study import double_well
from bayesformer.study.double_well import DoubleWell, compared, truth, wells


def test_the_gradient_is_that_of_the_density():
    theta = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None].requires_grad_()
    value, _, found = DoubleWell().value_and_grad({"theta": theta}, None)
    (expected,) = torch.autograd.grad(value.sum(), theta)
    torch.testing.assert_close(found["theta"].detach(), expected)


def test_wells_of_known_values():
    found = wells(torch.tensor([-1.5, -0.5, 1.0, 1.0]))
    assert found == pytest.approx((0.5, math.sqrt(0.125)))
    weighted = wells(torch.tensor([-1.0, 1.0]), torch.tensor([1.0, 3.0], dtype=torch.float64))
    assert weighted == pytest.approx((0.75, 0.0))


def test_an_ensemble_has_no_width_one_chain_one_well_and_parallel_chains_the_shares_of_their_starts(tmp_path):
    draws, exact = compared(), truth()
    ensemble, one, parallel = map(wells, draws.values())
    assert exact.right > 0.65
    assert ensemble.within < 1e-3 * exact.within
    assert one.right == 0  # where it began
    assert one.within / exact.within == pytest.approx(1, abs=0.1)
    assert parallel.within / exact.within == pytest.approx(1, abs=0.05)
    error = 0.5 / math.sqrt(double_well.MEMBERS)  # of the share of starts that are positive
    assert abs(parallel.right - 0.5) < 4 * error
    text = double_well.figure(draws, tmp_path / "wells.svg").read_text()
    assert all(name in text for name in draws)
