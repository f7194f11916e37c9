"""Priors: densities and draws against SciPy, patterns that must match."""

import math

import pytest
import torch
from scipy import stats

from bayesformer.priors.distributions import Cauchy, LaplaceDistribution, Logistic, Normal, StudentT, write_score
from bayesformer.priors.prior import Prior, as_prior, parse_law
from tests.laws import assert_law

LAWS = [
    (Normal(0.3, 0.7), stats.norm(0.3, 0.7)),
    (StudentT(3.5, 0.3, 0.7), stats.t(3.5, 0.3, 0.7)),
    (LaplaceDistribution(0.3, 0.7), stats.laplace(0.3, 0.7)),
    (Cauchy(0.3, 0.7), stats.cauchy(0.3, 0.7)),
    (Logistic(0.3, 0.7), stats.logistic(0.3, 0.7)),
]


@pytest.mark.parametrize(("law", "reference"), LAWS, ids=lambda x: type(x).__name__)
def test_density_equals_scipy(law, reference):
    x = torch.linspace(-30, 30, 301, dtype=torch.float64)
    torch.testing.assert_close(law.log_prob(x), torch.from_numpy(reference.logpdf(x.numpy())))


@pytest.mark.parametrize(("law", "reference"), LAWS, ids=lambda x: type(x).__name__)
def test_score_is_the_derivative_of_the_log_density(law, reference):
    x = torch.linspace(-5, 5, 101, dtype=torch.float64, requires_grad=True)
    (exact,) = torch.autograd.grad(law.log_prob(x).sum(), x)
    torch.testing.assert_close(law.score(x.detach()), exact)


@pytest.mark.parametrize("rows", [(), (3,)], ids=["vector", "members"])
@pytest.mark.parametrize("law", [law for law, _ in LAWS] + [Normal(0.0, 2.0)], ids=repr)
def test_writing_the_score(law, rows):
    x, out = torch.randn(2, *rows, 7, dtype=torch.float64)
    value = write_score(law, x, out, 0.3)
    torch.testing.assert_close(out, 0.3 * law.score(x))
    torch.testing.assert_close(value, law.log_prob(x).sum(-1))


@pytest.mark.parametrize(("law", "reference"), LAWS, ids=lambda x: type(x).__name__)
def test_draws_follow_the_law(law, reference):
    assert_law(law.sample(torch.empty(50_000, dtype=torch.float64)), reference.cdf)


@pytest.mark.parametrize(("law", "reference"), LAWS, ids=lambda x: type(x).__name__)
def test_float32_draws_are_finite(law, reference):
    assert torch.isfinite(law.sample(torch.empty(1_000_000))).all()


def test_the_first_matching_pattern_decides():
    params = {
        "embed.weight": torch.randn(3),
        "attention.q.weight": torch.randn(2),
        "head.bias": torch.randn(4),
    }
    prior = Prior({"*attention*": LaplaceDistribution(0, 0.1), "*bias": None, "*": Normal(0, 2)})
    expected = (
        Normal(0, 2).log_prob(params["embed.weight"]).sum()
        + LaplaceDistribution(0, 0.1).log_prob(params["attention.q.weight"]).sum()
    )
    torch.testing.assert_close(prior.log_prob(params), expected)


def test_silent_mismatches_are_errors():
    params = {"a.weight": torch.zeros(2), "b.weight": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"none of \['a\*'\] matches 'b.weight'"):
        Prior({"a*": Normal()}).log_prob(params)
    with pytest.raises(ValueError, match=r"pattern 'atention\*' must match a parameter; names are"):
        Prior({"atention*": Normal(), "*": Normal()}).log_prob(params)
    with pytest.raises(ValueError, match="flat prior cannot be sampled; 'a.weight' has one"):
        Prior({"*": None}).sample(params)


def test_prior_sample_has_the_shapes_of_the_parameters():
    params = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    draw = as_prior(Normal(5.0, 1e-6)).sample(params)
    assert {k: v.shape for k, v in draw.items()} == {k: v.shape for k, v in params.items()}
    torch.testing.assert_close(draw["a"], torch.full((2, 3), 5.0), atol=1e-4, rtol=0)


def test_laws_as_text():
    assert parse_law("normal(0, 0.5)") == Normal(0.0, 0.5)
    assert parse_law(" student_t( 5, 0, 1e-4 )") == StudentT(5.0, 0.0, 1e-4)
    assert parse_law("flat") is None
    assert as_prior({"*attention*": "laplace(0, .1)", "*": "flat"}).groups["*attention*"] == LaplaceDistribution(0, 0.1)
    with pytest.raises(ValueError, match="unknown prior family 'norml'. Did you mean 'normal'"):
        parse_law("norml(0, 1)")
    with pytest.raises(ValueError, match="must read like 'normal"):
        parse_law("normal 0 1")
    with pytest.raises(ValueError, match="wrong arguments: Normal.scale must be positive and finite; got -1"):
        parse_law("normal(0, -1)")
    with pytest.raises(ValueError, match="wrong arguments"):
        parse_law("cauchy(0, 1, 2)")
    with pytest.raises(ValueError, match="StudentT.df must be positive; got 0"):
        StudentT(0)
    with pytest.raises(ValueError, match="at least one pattern"):
        as_prior({})


def test_flat_prior_is_zero():
    assert as_prior("flat").log_prob({"a": torch.ones(3)}).item() == 0
    assert math.isfinite(as_prior("normal(0, 1)").log_prob({"a": torch.ones(3)}).item())
