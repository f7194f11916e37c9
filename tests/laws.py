"""Statistical assertions whose tolerance follows from the sample size and a stated failure rate."""

import math

import torch
from scipy import stats
from torch import Tensor


def assert_mean(draws: Tensor, expected: Tensor | float, failure_rate: float = 1e-6) -> None:
    """z-test of E[draws] over dim 0, Bonferroni over the entries."""
    draws = draws.double()
    z = (draws.mean(0) - torch.as_tensor(expected, dtype=torch.float64)) * math.sqrt(len(draws)) / draws.std(0)
    bound = -stats.norm.ppf(failure_rate / (2 * z.numel()))
    assert z.abs().max() < bound, f"|z| = {z.abs().max():.1f} exceeds {bound:.1f} at n = {len(draws)}"


def assert_law(draws: Tensor, cdf, failure_rate: float = 1e-6) -> None:
    """Kolmogorov-Smirnov test of one-dimensional draws against an exact CDF."""
    result = stats.kstest(draws.double().flatten().numpy(), cdf)
    assert result.pvalue > failure_rate, f"KS distance {result.statistic:.4f}, p = {result.pvalue:.2e}"
