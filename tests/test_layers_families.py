"""Draws, gradients and KLs of the variational families, against scipy and quadrature."""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch.nn.functional import softplus

from bayesformer.layers.families import (
    CLOSED,
    FAMILIES,
    INFINITE,
    CauchyWeights,
    GaussianWeights,
    LaplaceWeights,
    LogisticWeights,
    StudentTWeights,
    closed_kl,
    sampled_kl,
)
from bayesformer.priors import distributions as laws
from tests.laws import assert_law, assert_mean

SCIPY = {
    GaussianWeights: stats.norm,
    CauchyWeights: stats.cauchy,
    LaplaceWeights: stats.laplace,
    LogisticWeights: stats.logistic,
}
CASES = [(family, None) for family in SCIPY] + [(StudentTWeights, df) for df in (2.1, 3.0, 7.5, 40.0)]
PRIORS = [
    laws.Normal(0.1, 0.6),
    laws.LaplaceDistribution(-0.2, 0.5),
    laws.Cauchy(0.1, 0.7),
    laws.Logistic(0, 0.4),
    laws.StudentT(3, 0, 0.5),
]


def law(family, df=None, loc=0.7, scale=0.3, n=1, grad=False):
    """The family at n copies of its parameters."""
    values = [loc, scale] if df is None else [loc, scale, df]
    return family(*(torch.full((n,), v, dtype=torch.float64, requires_grad=grad) for v in values))


def frozen(family, df=None, loc=0.7, scale=0.3):
    """The same in scipy."""
    return stats.t(df, loc, scale) if family is StudentTWeights else SCIPY[family](loc, scale)


def expectation(f, distribution, loc, scale):
    """E[f] by the trapezoidal rule in y, x = loc + scale sinh y: fast and exact to 1e-6, heavy tails and kinks too."""
    y = np.linspace(-40, 40, 40_001)
    x = loc + scale * np.sinh(y)
    weight = distribution.pdf(x) * scale * np.cosh(y) * (y[1] - y[0])
    seen = weight > 0
    return float((f(x[seen]) * weight[seen]).sum())


def log_ratio(distribution, prior):
    """log q - log p on an array."""
    return lambda x: distribution.logpdf(x) - prior.log_prob(torch.from_numpy(x)).numpy()


@pytest.mark.parametrize(("family", "df"), CASES)
def test_draws_follow_the_law_of_scipy(family, df):
    draws = law(family, df, n=50_000).rsample()
    reference = frozen(family, df)
    assert_law(draws, reference.cdf)
    if family is not CauchyWeights and (df is None or df > 5):
        assert_mean(draws, reference.mean())
        assert_mean((draws - 0.7).square(), reference.var())
    single = family(*(getattr(law(family, df, n=50_000), name).float() for name in law(family, df).__dict__))
    assert_law(single.rsample(), reference.cdf)


@pytest.mark.parametrize(("family", "df"), CASES)
def test_log_density_is_that_of_scipy(family, df):
    x = torch.linspace(-8, 9, 61, dtype=torch.float64)
    expected = torch.from_numpy(frozen(family, df).logpdf(x.numpy()))
    torch.testing.assert_close(law(family, df, n=61).log_prob(x), expected)


def test_scale_and_degrees_of_freedom_are_softplus():
    loc, rho, raw = torch.randn(3, 5)
    assert torch.equal(LaplaceWeights.of(loc, rho).scale, softplus(rho))
    student = StudentTWeights.of(loc, rho, raw)
    assert torch.equal(student.df, 2 + softplus(raw))
    assert torch.equal(student[1:3].df, student.df[1:3])
    assert torch.equal(student[1:3].scale, student.scale[1:3])


@pytest.mark.parametrize(("family", "df"), CASES)
def test_pathwise_gradients_are_unbiased(family, df):
    """The derivative of E[log(1 + w²)] in every parameter, ν included, by differences of quadratures."""
    q = law(family, df, n=60_000, grad=True)
    leaves = [q.loc, q.scale, *([q.df] if df else [])]
    grads = torch.autograd.grad(torch.log1p(q.rsample().square()).sum(), leaves)
    start, h = [0.7, 0.3, *([df] if df else [])], 1e-3
    for i, grad in enumerate(grads):
        ends = []
        for sign in (1, -1):
            at = list(start)
            at[i] += sign * h
            moved = frozen(family, at[2] if df else None, *at[:2])
            ends.append(expectation(lambda x: np.log1p(x * x), moved, *at[:2]))
        assert_mean(grad, (ends[0] - ends[1]) / (2 * h))


@pytest.mark.parametrize("df", [2.2, 4.0, 15.0])
def test_implicit_gradient_in_the_degrees_of_freedom_is_that_of_the_exact_absolute_moment(df):
    q = law(StudentTWeights, df, loc=0.0, scale=1.0, n=100_000, grad=True)
    (grad,) = torch.autograd.grad(q.rsample().abs().sum(), q.df)

    def exact(v):  # E|t|
        logs = special.gammaln((v + 1) / 2) - special.gammaln(v / 2)
        return 2 * math.sqrt(v / math.pi) * math.exp(logs) / (v - 1)

    h = 1e-4
    assert_mean(grad, (exact(df + h) - exact(df - h)) / (2 * h))


@pytest.mark.parametrize(("family", "prior"), CLOSED, ids=lambda kind: kind.__name__)
def test_closed_kl_equals_quadrature_and_monte_carlo(family, prior):
    p = next(p for p in PRIORS if type(p) is prior)
    for nu, loc, scale in [(2.5, 0.7, 0.3), (9.0, -0.4, 1.3), (6.0, 0.0, 0.05)]:
        df = nu if family is StudentTWeights else None
        reference = frozen(family, df, loc, scale)
        value = closed_kl(law(family, df, loc, scale), p)
        exact = expectation(log_ratio(reference, p), reference, loc, scale)
        assert value.item() == pytest.approx(exact, rel=1e-5)
        if df != 2.5:  # the square of a t needs its fourth moment for a z-test
            many = law(family, df, loc, scale, n=40_000)
            assert_mean(sampled_kl(many, p, many.noise()), value)


@pytest.mark.parametrize("family", [GaussianWeights, LaplaceWeights, CauchyWeights])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_closed_kl_is_exactly_zero_at_equality(family, dtype):
    prior = {GaussianWeights: laws.Normal, LaplaceWeights: laws.LaplaceDistribution, CauchyWeights: laws.Cauchy}[family]
    for loc, scale in [(0.0, 1.0), (0.25, 0.5), (0.375, 2.0)]:  # numbers that both precisions hold
        q = family(torch.tensor([loc], dtype=dtype), torch.tensor([scale], dtype=dtype))
        assert closed_kl(q, prior(loc, scale)).item() == 0.0


@pytest.mark.parametrize(("family", "prior"), CLOSED, ids=lambda kind: kind.__name__)
def test_closed_kl_gradcheck(family, prior):
    p = next(p for p in PRIORS if type(p) is prior)
    parameters = [torch.randn(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64) + 0.2]
    parameters += [3 + 4 * torch.rand(6, dtype=torch.float64)] if family is StudentTWeights else []
    leaves = tuple(value.requires_grad_() for value in parameters)
    assert torch.autograd.gradcheck(lambda *given: closed_kl(family(*given), p), leaves)
    assert (closed_kl(family(*leaves), p) > 0).all()


OPEN = [
    (family, df, prior)
    for family, df in [*CASES[:4], (StudentTWeights, 5.0)]
    for prior in PRIORS
    if (family, type(prior)) not in {*INFINITE, *CLOSED}
]


@pytest.mark.parametrize(("family", "df", "prior"), OPEN)
def test_sampled_kl_is_unbiased_with_an_unbiased_gradient(family, df, prior):
    q = law(family, df, n=40_000, grad=True)
    value = sampled_kl(q, prior, q.noise())
    leaves = [q.loc, q.scale, *([q.df] if df else [])]
    grads = torch.autograd.grad(value.sum(), leaves)

    def exact(*at):
        reference = frozen(family, at[2] if df else None, *at[:2])
        return expectation(log_ratio(reference, prior), reference, *at[:2])

    start, h = [0.7, 0.3, *([df] if df else [])], 1e-3
    assert_mean(value, exact(*start))
    for i, grad in enumerate(grads):
        up, down = list(start), list(start)
        up[i], down[i] = start[i] + h, start[i] - h
        assert_mean(grad, (exact(*up) - exact(*down)) / (2 * h))


@pytest.mark.parametrize(
    ("q", "p"),
    [
        (law(LogisticWeights, n=50), laws.Logistic(0.7, 0.3)),
        (law(StudentTWeights, 4.0, n=50), laws.StudentT(4.0, 0.7, 0.3)),
        (law(GaussianWeights, n=50), laws.Normal(0.7, 0.3)),
    ],
)
def test_sampled_kl_is_zero_at_equality(q, p):
    torch.testing.assert_close(sampled_kl(q, p, q.noise()), torch.zeros(50, dtype=torch.float64))


def test_sampled_kl_does_not_cancel_at_small_scales():
    z, prior = torch.randn(100), laws.StudentT(5)
    small = GaussianWeights(torch.ones(100), torch.full((100,), 1e-9))
    exact = sampled_kl(GaussianWeights(small.loc.double(), small.scale.double()), prior, z.double())
    torch.testing.assert_close(sampled_kl(small, prior, z).double(), exact, rtol=1e-5, atol=0)


def test_every_family_is_listed_under_its_name():
    assert list(FAMILIES) == ["gaussian", "cauchy", "laplace", "logistic", "student_t"]
    assert set(FAMILIES.values()) == {*SCIPY, StudentTWeights}
