"""The families as laws: exact marginals, KLs against Monte Carlo, unbiased gradients, limits."""

import math

import numpy
import pytest
import torch
from scipy import special as scipy_special
from scipy import stats
from torch import distributions as dist

from bayesformer.attention import (
    Contextual,
    DataDependent,
    Dirichlet,
    GaussianLogits,
    Learned,
    Lognormal,
    RowNetwork,
    Weibull,
    masked_softmax,
    special,
)
from bayesformer.attention.build import build_family
from bayesformer.attention.rows import finite_exp, visible_sum
from bayesformer.attention.special import with_derivatives
from bayesformer.attention.spread import inverse_softplus, row_features
from bayesformer.core.draws import uniform_like
from tests.attention_zoo import STOCHASTIC, B, H, S, T, d
from tests.laws import assert_law, assert_mean

PAIR = torch.ones(1, 1, 1, 2, dtype=torch.bool)
CAUSAL = torch.ones(1, 1, T, S, dtype=torch.bool).tril()


def pair(family, gap=0.7, draws=40_000):
    """log(w₁/w₂) of rows of two keys whose logits differ by `gap`."""
    logits = torch.tensor([gap, 0.0], dtype=torch.float64).expand(draws, 1, 1, 2)
    weights = family.double()(logits, PAIR).weights.detach()
    return (weights[..., 0].log() - weights[..., 1].log()).flatten()


@pytest.mark.parametrize("k", [1.0, 5.0, 2000.0])
def test_weibull_log_ratios_are_logistic(k):  # log E is Gumbel; the difference of two is logistic
    assert_law(pair(Weibull(k)), stats.logistic(0.7, 1 / k).cdf)


def test_lognormal_log_ratios_are_normal():
    assert_law(pair(Lognormal(0.4)), stats.norm(0.7, 0.4 * math.sqrt(2)).cdf)


def test_gaussian_log_ratios_are_normal_with_the_spread_of_both_keys():
    family = GaussianLogits(Learned(1.0, length=2))
    with torch.no_grad():
        family.spread.rho[0, 0] = torch.tensor([inverse_softplus(0.3), inverse_softplus(0.8)])
    assert_law(pair(family), stats.norm(0.7, math.hypot(0.3, 0.8)).cdf)


@pytest.mark.parametrize("a", [0.3, 2.0, 50.0])
def test_dirichlet_weights_are_beta(a):
    m = 1 / (1 + math.exp(-0.7))

    def cdf(y):  # of log(w₁/w₂), from the side where w is not rounded to 1
        low = scipy_special.betainc(a * m, a * (1 - m), scipy_special.expit(y))
        high = scipy_special.betainc(a * (1 - m), a * m, scipy_special.expit(-y))
        return numpy.where(y < 0, low, 1 - high)

    assert_law(pair(Dirichlet(Learned(a, per_row=True))), cdf)


def test_dirichlet_moments():  # E w = m, Cov(w_i, w_j) = (δ_ij m_i - m_i m_j) / (a + 1)
    logits, a = torch.tensor([0.5, -1.0, 0.2, 1.0]), 3.0
    m = logits.softmax(-1).double()
    family = Dirichlet(Learned(a, per_row=True))
    weights = family(logits.expand(60_000, 1, 1, 4), torch.ones(1, 1, 1, 4, dtype=torch.bool)).weights.double()
    weights = weights[:, 0, 0].detach()
    assert_mean(weights, m)
    centred = weights - m
    assert_mean(centred[:, :, None] * centred[:, None, :], (torch.diag(m) - m[:, None] * m) / (a + 1))


@pytest.mark.parametrize("family", [Weibull(1.0), Weibull(7.0), Lognormal(0.3), Lognormal(1.0)], ids=str)
def test_scores_have_the_mean_exp_phi(family):
    phi = torch.tensor([-2.0, 0.0, 1.5], dtype=torch.float64)
    assert_mean(family.log_s(phi.expand(100_000, 3)).exp(), phi.exp())


# The KL of an entry or row against its Monte Carlo estimate: E_q[log q(S) - log p(S)].


def estimate(q, p, draws=100_000):
    s = q.sample((draws,))
    return (q.log_prob(s) - p.log_prob(s)).flatten(1).sum(1)


@pytest.mark.parametrize(("k", "alpha", "beta"), [(1.0, 0.3, 0.5), (4.0, 2.0, 1.5), (10.0, 1e-4, 1e-3)])
def test_weibull_kl(k, alpha, beta):
    phi = torch.tensor([[0.5, -1.0, 0.2]], dtype=torch.float64)
    scale = phi.exp() / math.gamma(1 + 1 / k)
    q = dist.Weibull(scale, torch.tensor(k).double())
    p = dist.Gamma(torch.tensor(alpha).double(), torch.tensor(beta).double())
    kl = Weibull(k, alpha, beta)(phi[None, None], torch.ones(1, 1, 1, 3, dtype=torch.bool)).kl
    assert_mean(estimate(q, p), kl.detach())


@pytest.mark.parametrize(("sigma", "mu", "prior_sigma"), [(0.5, 0.2, 0.8), (2.0, -1.0, 0.5)])
def test_lognormal_kl(sigma, mu, prior_sigma):
    phi = torch.tensor([[0.5, -1.0, 0.2]], dtype=torch.float64)
    q, p = dist.LogNormal(phi - sigma**2 / 2, sigma), dist.LogNormal(mu, prior_sigma)
    exact = dist.kl_divergence(dist.Normal(phi - sigma**2 / 2, sigma), dist.Normal(mu, prior_sigma)).sum()
    kl = Lognormal(sigma, mu, prior_sigma)(phi[None, None], torch.ones(1, 1, 1, 3, dtype=torch.bool)).kl
    torch.testing.assert_close(kl[0], exact)
    assert_mean(estimate(q, p), kl.detach())


def test_gaussian_kl_and_zero_at_the_prior():
    family = GaussianLogits(Learned(0.3, H), prior_sigma=0.8)
    kl = family(torch.randn(B, H, T, S), CAUSAL).kl
    entry = dist.kl_divergence(dist.Normal(0.0, 0.3), dist.Normal(0.0, 0.8))
    torch.testing.assert_close(kl, (entry * H * CAUSAL.sum()).expand(B))
    assert GaussianLogits(Learned(0.8, H), prior_sigma=0.8)(torch.randn(B, H, T, S), CAUSAL).kl.abs().max() < 1e-5


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("a", "a0"), [(0.3, 2.0), (5.0, 1.0), (5.0, 0.01), (200.0, 50.0), (3.0, 3.0)])
def test_dirichlet_kl(a, a0, symmetric):
    """Equals that of torch.distributions, of the weights and of the Gammas before them; float32 too."""
    logits = torch.randn(B, H, T, S, dtype=torch.float64)
    mask = torch.ones(1, 1, 1, S, dtype=torch.bool)
    m = logits.softmax(-1)
    q = a * m
    p = torch.full_like(q, a0) if symmetric else a0 * m
    weights = dist.kl_divergence(dist.Dirichlet(q), dist.Dirichlet(p)).sum((1, 2))
    gammas = dist.kl_divergence(dist.Gamma(q, 1.0), dist.Gamma(p, 1.0)).sum((1, 2, 3))
    for divergence, exact in {"dirichlet": weights, "gamma": gammas}.items():
        family = Dirichlet(Learned(a, H, per_row=True), a0, symmetric, divergence=divergence)
        torch.testing.assert_close(family.double()(logits, mask).kl, exact, rtol=1e-7, atol=1e-7)
        single = family.float()(logits.float(), mask).kl
        torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=1e-4 * a)


def test_dirichlet_kl_is_zero_for_a_row_of_one_key():  # one key has weight 1, whatever the sharpness
    family = Dirichlet(Learned(3.0, per_row=True), 0.5)
    mask = torch.zeros(1, 1, 1, S, dtype=torch.bool)
    mask[..., 2] = True
    assert family(torch.randn(B, 1, T, S), mask).kl.abs().max() < 1e-4


def naive_contextual_kl(family, logits, mask, keys):
    psi = masked_softmax(family.contextual.outer(torch.relu(family.contextual.inner(keys))).mT, mask)
    psi = psi.expand_as(logits)
    if isinstance(family, Weibull):
        k, beta, euler, scale = family.k, family.beta, 0.5772156649015329, logits.exp() / math.gamma(1 + 1 / family.k)
        each = euler * psi / k - psi * scale.log() + math.log(k) + beta * scale * math.gamma(1 + 1 / k) - euler - 1
        each = each - psi * math.log(beta) + torch.lgamma(torch.where(mask, psi, 1.0))
    else:
        q = dist.Normal(logits - family.sigma**2 / 2, family.sigma)
        each = dist.kl_divergence(q, dist.Normal(psi, family.prior_sigma))
    return torch.where(mask, each, 0.0).sum((1, 2, 3))


@pytest.mark.parametrize("mask", [CAUSAL, torch.ones(1, 1, 1, S, dtype=torch.bool)], ids=["causal", "all"])
@pytest.mark.parametrize("build", [lambda c: Weibull(3.0, beta=0.7, contextual=c), lambda c: Lognormal(contextual=c)])
@pytest.mark.parametrize("heads", [None, H], ids=["shared", "per head"])
def test_contextual_kl_and_its_gradients_equal_a_naive_twin(build, mask, heads):
    family = build(Contextual(d, 3, heads)).double()
    logits = torch.randn(B, H, T, S, dtype=torch.float64, requires_grad=True)
    keys = torch.randn(B, H, S, d, dtype=torch.float64, requires_grad=True)
    inputs = [logits, keys, *family.parameters()]
    kl, naive = family(logits, mask, keys).kl, naive_contextual_kl(family, logits, mask, keys)
    torch.testing.assert_close(kl, naive)
    ours, theirs = torch.autograd.grad(kl.sum(), inputs), torch.autograd.grad(naive.sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-7)


def test_a_prior_network_per_head_is_the_shared_one_where_heads_agree():
    shared, own = Contextual(d, 3), Contextual(d, 3, H)
    assert not torch.equal(own.inner.weight[0], own.inner.weight[1])  # heads start apart
    with torch.no_grad():
        for one, all_heads in ((shared.inner, own.inner), (shared.outer, own.outer)):
            all_heads.weight.copy_(one.weight.expand_as(all_heads.weight))
            all_heads.bias.copy_(one.bias.expand_as(all_heads.bias))
    keys = torch.randn(B, H, S, d)
    torch.testing.assert_close(own(keys, CAUSAL), shared(keys, CAUSAL))
    with torch.no_grad():
        own.outer.weight[1].neg_()
    differs = ~torch.isclose(own(keys, CAUSAL), shared(keys, CAUSAL)).flatten(2).all(-1)
    assert not differs[:, 0].any()
    assert differs[:, 1].all()
    with pytest.raises(ValueError, match="per_head must be left out without a contextual prior"):
        build_family("weibull", per_head=True)


# Limits: every law is softmax attention when its noise goes.


@pytest.mark.parametrize(
    "build",
    [
        lambda e: Weibull(1 / e),
        Lognormal,
        lambda e: GaussianLogits(Learned(e)),
        lambda e: Dirichlet(Learned(1 / e**2, per_row=True)),
    ],
    ids=["weibull", "lognormal", "gaussian", "dirichlet"],
)
def test_softmax_is_the_limit(build):
    logits = torch.randn(B, H, T, S)
    exact = masked_softmax(logits, CAUSAL)
    far, near = ((build(e)(logits, CAUSAL).weights - exact).abs().max().item() for e in (1e-1, 1e-3))
    assert near < 6e-3
    assert near < far / 20


# Derivatives.


@pytest.mark.parametrize("name", STOCHASTIC)
def test_gradients_equal_finite_differences(name):
    """At fixed noise, weights and KL in logits, keys and the family's own parameters, hidden keys included."""
    family = STOCHASTIC[name]().double()
    with torch.no_grad():
        for parameter in family.parameters():  # away from kinks and from networks that start constant
            parameter.add_(0.1 * torch.randn_like(parameter))
    logits = torch.randn(1, H, 3, 4, dtype=torch.float64, requires_grad=True)
    keys = torch.randn(1, H, 4, d, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 1, 3, 4, dtype=torch.bool).tril()
    names = [n for n, _ in family.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in family.parameters()]

    def f(logits, keys, *values):
        torch.manual_seed(0)
        given = (keys,) if family.wants_keys else ()
        draw = torch.func.functional_call(family, dict(zip(names, values, strict=True)), (logits, mask, *given))
        return draw.weights, draw.kl + 0 * (logits.sum() + keys.sum())

    assert torch.autograd.gradcheck(f, (logits, keys, *values), eps=1e-6, atol=1e-6, rtol=1e-4)


def test_weibull_draw_equals_its_slow_twin():
    logits, k = torch.randn(B, H, T, S), 3.0
    torch.manual_seed(5)
    weights = Weibull(k)(logits, CAUSAL).weights
    torch.manual_seed(5)
    half = torch.finfo(torch.float32).eps / 4
    e = -torch.empty(B, H, T, S).uniform_(half, 1 - 2 * half).log()
    s = torch.where(CAUSAL, logits.exp() * e ** (1 / k) / math.gamma(1 + 1 / k), 0.0)
    torch.testing.assert_close(weights, s / s.sum(-1, keepdim=True))


def test_exponential_goes_on_as_its_tangent():
    x = torch.tensor([-100.0, 0.0, 20.0, 30.0, 1e4], requires_grad=True)
    value = finite_exp(x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(value[:3], x[:3].exp())
    torch.testing.assert_close(value[3:], math.exp(20) * (1 + x[3:] - 20))
    torch.testing.assert_close(slope, x.detach().clamp_max(20).exp())


def test_given_derivatives_reach_each_input_in_its_shape():
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    r = torch.tensor([[[2.0]]], dtype=torch.float64, requires_grad=True)

    def total(x, r):
        fixed, ratio = x.detach(), r.detach()
        value = (ratio * fixed.square()).sum((1, 2, 3))
        return with_derivatives(value, (x, 2 * ratio * fixed), (r, fixed.square()))

    torch.testing.assert_close(total(x, r), (r * x.square()).sum((1, 2, 3)))
    assert torch.autograd.gradcheck(total, (x, r))
    with torch.no_grad():
        assert not total(x, r).requires_grad


def test_a_second_derivative_of_dirichlet_attention_is_an_error():
    logits = torch.randn(B, H, T, S, requires_grad=True)
    draw = STOCHASTIC["dirichlet"]()(logits, CAUSAL)
    for value in (draw.weights.square().sum(), draw.kl.sum()):
        torch.autograd.grad(value, logits, retain_graph=True)
        with pytest.raises(RuntimeError, match="first derivatives only"):
            torch.autograd.grad(value, logits, create_graph=True, retain_graph=True)


@pytest.mark.parametrize("shape", [(H, 1, 1), (B, H, T, S), (H, T, S), (B, H, 1, S)])
@pytest.mark.parametrize("hides", [(1, 1, 1, S), (1, 1, T, S), (B, 1, 1, S), (1, 1, 1, 1)])
def test_visible_sum_equals_a_sum_over_everything(shape, hides):
    values, mask = torch.randn(shape, dtype=torch.float64), torch.rand(hides) < 0.6
    full = values.expand(B, H, T, S) * mask.expand(B, H, T, S)
    torch.testing.assert_close(visible_sum(values, mask, torch.Size((B, H, T, S))), full.sum((1, 2, 3)))


def test_uniform_numbers_are_of_the_open_interval():
    first = uniform_like(torch.empty(20_001))
    assert_law(first, "uniform")
    assert first.min() > 0
    assert first.max() < 1
    assert (-first.log()).log().isfinite().all()


# Gamma functions and draws.


@pytest.mark.parametrize("r", [1e-4, 0.3, 1.0, 1.01, 40.0])
def test_what_the_kl_of_gammas_is_made_of(r):
    """In single precision, against scipy; the value may err by what x is rounded by."""
    x = torch.cat([torch.zeros(1), torch.logspace(-30, 3, 2000)])
    exact = x.double().numpy()
    value, digamma, trigamma = special.gamma_ratio(x, torch.tensor(r))
    slope = scipy_special.digamma(1 + r * exact) - scipy_special.digamma(1 + exact)
    sums = scipy_special.gammaln(1 + r * exact) - scipy_special.gammaln(1 + exact)
    sums += (1 - r) * exact * scipy_special.digamma(1 + exact)
    theirs = [torch.as_tensor(each) for each in (sums, slope, scipy_special.polygamma(1, 1 + exact))]
    for ours, other, of_x in zip((value, digamma, trigamma), theirs, (1e-7, 0, 0), strict=True):
        assert ((ours - other).abs() <= 4e-6 + 1e-5 * other.abs() + of_x * x).all()
    for twin, other in zip(special.gamma_ratio(x.double(), torch.tensor(r, dtype=torch.float64)), theirs, strict=True):
        torch.testing.assert_close(twin, other, rtol=1e-7, atol=1e-9)


def draws_of(alpha, count=60_000, dtype=torch.float64):
    return special.log_gamma_draw(torch.full((count,), math.log(alpha), dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [1e-3, 0.1, 1.0, 4.0, 300.0])
def test_gamma_draws_follow_their_law(alpha, dtype):
    log_x = draws_of(alpha, dtype=dtype)[0].double()
    if alpha < 0.01:  # X underflows, but F(x) = x^α / Γ(1 + α) but for x near 1, where X hardly ever is
        assert_law((alpha * log_x - math.lgamma(1 + alpha)).exp().clamp_max(1), "uniform")
    else:
        assert_law(log_x.exp(), stats.gamma(alpha).cdf)


def test_the_quantile_map_errs_by_what_its_docstring_says():
    """Exactly, without draws: F(G(x)) against the normal CDF of x."""
    x = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    p = stats.norm.cdf(x)
    for alpha, bound in {0.0: 1e-4, 0.2: 1e-4, 1.0: 1e-4, 7.0: 5e-5, 1e3: 1e-5}.items():
        log_g, _ = special.log_quantile(torch.full_like(x, alpha), x)
        assert abs(scipy_special.gammainc(alpha + 2, log_g.exp().numpy()) - p).max() < bound


@pytest.mark.parametrize("alpha", [0.05, 0.7, 3.0, 40.0])
def test_gamma_gradients_are_the_implicit_ones(alpha):
    """E[d log X / d log α] = α ψ′(α), and E[dX²/dα] by a difference of the exact α(α + 1)."""
    log_x, slope = draws_of(alpha)
    assert_mean(slope, alpha * scipy_special.polygamma(1, alpha))
    assert_mean(2 * (2 * log_x).exp() * slope / alpha, 2 * alpha + 1)


def test_the_quantile_slope_is_the_derivative_of_the_exact_quantile():  # which is -(∂F/∂α)/f
    x = torch.linspace(-2.5, 2.5, 51, dtype=torch.float64)
    p, h = stats.norm.cdf(x), 1e-4
    for alpha, tolerance in {0.0: 4e-3, 0.3: 4e-3, 1.0: 4e-3, 10.0: 1e-3}.items():
        _, slope = special.log_quantile(torch.full_like(x, alpha), x)
        up, down = (scipy_special.gammaincinv(alpha + 2 + e, p) for e in (h, -h))
        exact = torch.as_tensor((numpy.log(up) - numpy.log(down)) / (2 * h))
        torch.testing.assert_close(slope, exact, rtol=tolerance, atol=0)


def test_dirichlet_gradient_in_the_sharpness_is_unbiased():  # E[w₁²] = α₁(α₁+1) / a(a+1), α = a m
    family = Dirichlet(Learned(2.0, per_row=True))
    logits = torch.tensor([0.2, 0.5, 0.3]).log().expand(60_000, 1, 1, 3)
    family.spread.rho = torch.nn.Parameter(family.spread.rho.detach().expand(60_000, 1, 1, 1).clone())
    weights = family(logits, torch.ones(1, 1, 1, 3, dtype=torch.bool)).weights
    (grad,) = torch.autograd.grad(weights[..., 0].square().sum(), family.spread.rho)

    def exact(a):
        return 0.2 * a * (0.2 * a + 1) / (a * (a + 1))

    h, da = 1e-4, -math.expm1(-2.0)  # d softplus(ρ) / dρ at softplus(ρ) = 2
    assert_mean(grad.flatten(), da * (exact(2 + h) - exact(2 - h)) / (2 * h))


def test_the_surrogate_is_good_below_one_and_bad_above():
    for alpha, close in {0.01: True, 3.0: False}.items():
        log_x = special.log_surrogate_draw(torch.full((20_000,), math.log(alpha), dtype=torch.float64))
        distance = stats.kstest(scipy_special.gammainc(alpha, log_x.exp().numpy()), "uniform").statistic
        assert (distance < 0.02) == close


# Spreads.


@pytest.mark.parametrize("start", [1e-15, 1e-3, 1.0, 1e4])
def test_a_spread_starts_where_it_is_told(start):
    logits = torch.randn(B, H, T, S)
    for spread in (Learned(start, H), DataDependent(start, 4), RowNetwork(start, S, 4)):
        value = spread(logits, CAUSAL).expand(B, H, T, S)
        torch.testing.assert_close(value, torch.full_like(value, start), rtol=1e-4, atol=0)


def test_row_features_are_entropy_largest_log_weight_and_log_count():
    logits = torch.randn(B, H, T, S)
    mask = CAUSAL.clone()
    mask[..., 2, :] = False
    log_m = torch.log_softmax(logits.masked_fill(~mask, -1e30), -1)
    found = row_features(log_m, mask)
    m = masked_softmax(logits, mask)
    torch.testing.assert_close(found[..., 0], torch.special.entr(m).sum(-1))
    torch.testing.assert_close(found[..., 1].exp() * mask.any(-1), m.amax(-1))
    torch.testing.assert_close(found[0, 0, :, 2].exp(), mask.sum(-1).clamp_min(1)[0, 0].float())


def test_a_data_dependent_spread_depends_on_the_data_once_trained():
    spread = DataDependent(0.3, 4)
    torch.nn.init.normal_(spread.out.weight)
    value = spread(torch.randn(B, H, T, S), CAUSAL)
    assert value.shape == (B, H, T, S)
    assert value[CAUSAL.expand_as(value)].unique().numel() > 10
