"""DataLoaders whose sampler draws: the posterior is that of many readings, which is said."""

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import bayesformer as bf

COUNT = 230


def rows():
    x = torch.randn(COUNT, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(
        x, x.sum(1, keepdim=True) + 0.5 * torch.randn(COUNT, 1, generator=torch.Generator().manual_seed(1))
    )


def samplers(data):
    yield RandomSampler(data, replacement=True)
    yield RandomSampler(data, num_samples=100)
    yield WeightedRandomSampler([1.0] * COUNT, COUNT)
    yield WeightedRandomSampler([1.0] * COUNT, 60)


def fitted(loader, method):
    return bf.fit(lambda: nn.Linear(4, 1), loader, likelihood=bf.Gaussian(0.5), method=method, progress=False)


@pytest.mark.parametrize("number", range(4))
def test_a_sampler_that_draws_is_averaged_over_and_doubted(number):
    data = rows()
    exact = fitted(data, bf.Laplace(prior_precision=1.0))
    assert exact.doubts == ()
    loader = DataLoader(data, batch_size=23, sampler=list(samplers(data))[number])
    with pytest.warns(bf.FidelityWarning, match="a sampler that draws them"):
        found = fitted(loader, bf.Laplace(prior_precision=1.0))
    error = ((found.law.mean - exact.law.mean) / exact.law.sd).square().mean().sqrt()
    assert float(error) < 0.45  # one reading alone is off by .7 to 1.8
    torch.testing.assert_close(found.law.sd, exact.law.sd, rtol=0.1, atol=0)
    assert "random data" in {doubt.check for doubt in found.check(data)}
    with pytest.raises(ValueError, match="nuts needs a log joint that stays the same"):
        fitted(loader, bf.Nuts())


def test_a_sampler_that_does_not_draw_is_not_doubted():
    data = rows()
    some = torch.utils.data.Subset(data, range(100))
    fixed = fitted(
        DataLoader(data, batch_size=23, sampler=SubsetRandomSampler(range(100))), bf.Laplace(prior_precision=1.0)
    )
    alone = fitted(some, bf.Laplace(prior_precision=1.0))
    assert fixed.doubts == ()
    torch.testing.assert_close(fixed.law.sd, alone.law.sd, rtol=1e-4, atol=0)
    left_over = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 100, drop_last=True))
    assert fitted(left_over, bf.Laplace(prior_precision=1.0)).doubts == ()
