"""Evidence, tuning and online posteriors against closed forms, dense matrices and finite differences, in float64."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from bayesformer.laplace import (
    Groups,
    ObservationNoise,
    Quadratic,
    absorb,
    best_of,
    maximise,
)
from bayesformer.laplace.evidence import check_curvature
from bayesformer.laplace.structures import (
    DenseCurvature,
    DiagonalCurvature,
    KroneckerCurvature,
    LowRankCurvature,
)
from bayesformer.laws import Dense

F64 = torch.float64


def positive(size):
    root = torch.randn(size, size, dtype=F64)
    return root @ root.mT


def linear(count=30, size=4, sigma=0.6):
    """Bayesian linear regression: x, y, the mode under N(0, 1/d) and its quadratic."""
    x = torch.randn(count, size, dtype=F64)
    y = x @ torch.randn(size, dtype=F64) + sigma * torch.randn(count, dtype=F64)
    return x, y


def mode(x, y, d, sigma):
    precision = x.mT @ x / sigma**2 + d * torch.eye(x.shape[1], dtype=F64)
    return torch.linalg.solve(precision, x.mT @ y / sigma**2)


def quadratic(x, y, theta, sigma, groups=None):
    fit = torch.distributions.Normal(x @ theta, sigma).log_prob(y).sum().item()
    return Quadratic(
        (DenseCurvature(x.mT @ x / sigma**2),),
        (theta,),
        fit,
        groups or Groups(1, (0,)),
        noise=ObservationNoise(sigma, len(y)),
    )


def true_evidence(x, y, d, sigma):
    cov = x @ x.mT / d + sigma**2 * torch.eye(len(x), dtype=F64)
    return MultivariateNormal(torch.zeros(len(x), dtype=F64), cov).log_prob(y)


def test_the_evidence_of_a_linear_model_is_exact():
    x, y = linear()
    d, sigma = 0.7, 0.6
    found = quadratic(x, y, mode(x, y, d, sigma), sigma).log_evidence(torch.tensor([d], dtype=F64))
    torch.testing.assert_close(found, true_evidence(x, y, d, sigma))


def test_the_evidence_at_another_noise_is_exact_where_the_mode_is():
    """Curvature and fit were taken at σ = 0.6; the mode belongs to σ = 0.9."""
    x, y = linear()
    theta = mode(x, y, 0.7, 0.9)
    at = quadratic(x, y, theta, 0.6)
    found = at.log_evidence(torch.tensor([0.7], dtype=F64), torch.tensor(0.9, dtype=F64))
    torch.testing.assert_close(found, true_evidence(x, y, 0.7, 0.9))
    block = at.blocks(torch.tensor([0.7], dtype=F64), 0.9)[0]
    precision = x.mT @ x / 0.81 + 0.7 * torch.eye(4, dtype=F64)
    torch.testing.assert_close(block.times(torch.eye(4, dtype=F64)), precision.inverse())


def test_a_temperature_is_a_power_of_the_likelihood():
    """At τ the data count 1/τ times: the posterior of a likelihood with σ √τ, and the fit scaled."""
    x, y = linear()
    tau, d = 0.25, torch.tensor([0.7], dtype=F64)
    theta = mode(x, y, 0.7, 0.6 * math.sqrt(tau))
    cold = Quadratic((DenseCurvature(x.mT @ x / 0.36),), (theta,), -12.5, Groups(1, (0,)), temperature=tau)
    precision = x.mT @ x / (0.36 * tau) + 0.7 * torch.eye(4, dtype=F64)
    torch.testing.assert_close(cold.blocks(d)[0].times(torch.eye(4, dtype=F64)), precision.inverse())
    expected = -12.5 / tau - 0.5 * (precision.logdet() - 4 * math.log(0.7) + 0.7 * theta.square().sum())
    torch.testing.assert_close(cold.log_evidence(d), expected)


def several():
    """Three structures with two precisions, the first shared by a Kronecker block and half a dense one."""
    structures = (
        KroneckerCurvature.of(positive(2), positive(3)),
        DenseCurvature(positive(4)),
        DiagonalCurvature(torch.rand(3, dtype=F64)),
    )
    groups = Groups(2, (0, torch.tensor([0, 0, 1, 1]), 1))
    deviations = tuple(torch.randn(s.size, dtype=F64) for s in structures)
    return Quadratic(structures, deviations, -31.0, groups, noise=ObservationNoise(0.8, 20))


def test_groups_and_noise_give_the_dense_evidence_and_its_gradient():
    at = several()
    d, sigma = torch.tensor([0.4, 1.7], dtype=F64), torch.tensor(0.5, dtype=F64)
    h = torch.block_diag(*(s.dense() for s in at.structures)) * (0.8 / 0.5) ** 2
    prior = torch.cat([d[0].expand(6), d[[0, 0, 1, 1]], d[1].expand(3)])
    theta = torch.cat(at.deviations)
    squares = -2 * 0.64 * (-31.0 + 20 * math.log(0.8 * math.sqrt(2 * math.pi)))
    fit = -squares / (2 * 0.25) - 20 * math.log(0.5 * math.sqrt(2 * math.pi))
    expected = fit - 0.5 * ((h + prior.diag()).logdet() - prior.log().sum() + (prior * theta**2).sum())
    torch.testing.assert_close(at.log_evidence(d, sigma), expected)
    logs = torch.cat([d, sigma[None]]).log().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: at.log_evidence(t[:2].exp(), t[2].exp()), logs)


def test_limits_of_the_prior():
    """d -> ∞: no spread, and the evidence is the fit minus half the scatter. No data: the prior itself."""
    at = several()
    far = torch.full((2,), 1e12, dtype=F64)
    scatter = sum(1e12 * t.square().sum() for t in at.deviations)
    torch.testing.assert_close(at.log_evidence(far), -31.0 - 0.5 * scatter)
    nothing = Quadratic(
        (DiagonalCurvature(torch.zeros(3, dtype=F64)),), (torch.zeros(3, dtype=F64),), 0.0, Groups(1, (0,))
    )
    two = torch.tensor([2.0], dtype=F64)
    torch.testing.assert_close(nothing.log_evidence(two), torch.tensor(0.0, dtype=F64))
    torch.testing.assert_close(nothing.blocks(two)[0].diagonal(), torch.full((3,), 0.5, dtype=F64))


def test_maximise_finds_a_stationary_point_above_the_start():
    at = several()

    def objective(values):
        return at.log_evidence(values[:2], values[2])

    start = torch.ones(3, dtype=F64)
    found, value = maximise(objective, start)
    assert value > objective(start)
    logs = found.log().requires_grad_()
    (slope,) = torch.autograd.grad(objective(logs.exp()), logs)
    assert slope.abs().max() < 1e-3
    for _ in range(20):
        assert objective((logs.detach() + 0.1 * torch.randn(3, dtype=F64)).exp()) < value


def test_maximise_finds_the_known_optimum_per_weight():
    """One weight: h / (d (h + d)) = θ²."""
    h, theta = torch.tensor([3.0, 0.5, 40.0], dtype=F64), torch.tensor([0.3, 1.5, 0.02], dtype=F64)
    at = Quadratic((DiagonalCurvature(h),), (theta,), 0.0, Groups(3, (torch.arange(3),)))
    found, _ = maximise(at.log_evidence, torch.ones(3, dtype=F64))
    exact = (-h + (h * h + 4 * h / theta**2).sqrt()) / 2
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=0)


def test_maximise_stays_within_its_bounds_and_names_a_wrong_start():
    found, _ = maximise(lambda d: d.log().sum(), torch.ones(2, dtype=F64), bounds=(0.1, 50.0))
    torch.testing.assert_close(found, torch.full((2,), 50.0, dtype=F64))
    with pytest.raises(ValueError, match="start must be positive and finite; got \\[0.0\\]"):
        maximise(lambda d: d.sum(), torch.zeros(1, dtype=F64))
    with pytest.raises(ValueError, match="objective must be finite"):
        maximise(lambda d: (d * math.nan).sum(), torch.ones(1, dtype=F64))


def test_best_of_skips_what_is_not_positive_definite():
    def score(d):
        torch.linalg.cholesky(torch.tensor([[d - 1.0]]))
        return -abs(d - 3)

    found = best_of([0.5, 2.0, 4.5, 3.5], score)
    assert found.value == 3.5
    assert found.scores == [-math.inf, -1, -1.5, -0.5]
    with pytest.raises(ValueError, match="at least one of the 2 candidates must have a finite score"):
        best_of([0.5, 0.1], score)
    with pytest.raises(RuntimeError, match="another"):  # only such failures are expected
        best_of([1], lambda d: (_ for _ in ()).throw(RuntimeError("another")))


def blocks():
    kron = KroneckerCurvature.of(positive(3), positive(4))
    values, vectors = torch.linalg.eigh(positive(12))
    few = KroneckerCurvature(kron.out_values[1:], kron.in_values[2:], kron.out_vectors[:, 1:], kron.in_vectors[:, 2:])
    d = torch.tensor(0.7, dtype=F64)
    return {
        "diagonal": DiagonalCurvature(torch.rand(12, dtype=F64)).posterior(d),
        "dense": DenseCurvature(positive(12)).posterior(d),
        "low rank": LowRankCurvature(vectors[:, 8:], values[8:]).posterior(torch.rand(12, dtype=F64) + 0.1),
        "kronecker": kron.posterior(d),
        "kronecker, low rank": few.posterior(d),
        "kronecker, diagonal": KroneckerCurvature.of(torch.rand(3, dtype=F64), positive(4)).posterior(d),
    }


@pytest.mark.parametrize("name", blocks())
def test_a_blocks_precision_is_the_inverse_of_its_covariance(name):
    block, eye = blocks()[name], torch.eye(12, dtype=F64)
    precision = block.times(eye).inverse()
    torch.testing.assert_close(block.precision_times(eye), precision)
    torch.testing.assert_close(block.log_det_precision(), precision.logdet())


def test_absorbing_adds_curvature_in_every_exact_form():
    eye = torch.eye(12, dtype=F64)
    values, vectors = torch.linalg.eigh(positive(12))
    new = {
        "diagonal": DiagonalCurvature(torch.rand(12, dtype=F64)),
        "dense": DenseCurvature(positive(12)),
        "low rank": LowRankCurvature(vectors[:, 9:], values[9:]),
    }
    for name, structure in new.items():
        old = blocks()[name]
        expected = (old.times(eye).inverse() + 1.5 * structure.dense()).inverse()
        found = absorb(old, structure, 1.5, num_old=3, num_new=5)
        torch.testing.assert_close(found.times(eye), expected)


@pytest.mark.parametrize("rank", [4, 2])
def test_kronecker_factors_add_and_average(rank):
    out, into = [positive(3), positive(3)], [positive(4), positive(4)]
    if rank < 4:
        into = [torch.linalg.qr(torch.randn(4, rank, dtype=F64))[0] for _ in range(2)]
        into = [q @ positive(rank) @ q.mT for q in into]
    d = torch.tensor(0.3, dtype=F64)
    old, new = (KroneckerCurvature.of(b, a) for b, a in zip(out, into, strict=True))
    found = absorb(old.posterior(d), new, num_old=30, num_new=10)
    precision = torch.kron(sum(out), 0.75 * into[0] + 0.25 * into[1]) + d * torch.eye(12, dtype=F64)
    torch.testing.assert_close(found.times(torch.eye(12, dtype=F64)), precision.inverse())


def test_two_halves_of_linear_data_give_the_posterior_of_the_whole():
    """Mean, covariance and evidence: log p(D₁) + log p(D₂ | D₁) = log p(D)."""
    x, y = linear(40)
    d, sigma, eye = 0.7, 0.6, torch.eye(4, dtype=F64)
    first = quadratic(x[:20], y[:20], mode(x[:20], y[:20], d, sigma), sigma)
    prior = first.blocks(torch.tensor([d], dtype=F64))[0]
    mean = first.deviations[0]
    second = DenseCurvature(x[20:].mT @ x[20:] / sigma**2)
    posterior = absorb(prior, second, num_old=20, num_new=20)
    whole = x.mT @ x / sigma**2 + d * eye
    torch.testing.assert_close(posterior.times(eye), whole.inverse())
    score = x[20:].mT @ (y[20:] - x[20:] @ mean) / sigma**2  # of the new data at the old mean
    theta = mean + posterior.times(score)
    torch.testing.assert_close(theta, mode(x, y, d, sigma))
    fit = torch.distributions.Normal(x[20:] @ theta, sigma).log_prob(y[20:]).sum()
    scatter = (theta - mean) @ prior.precision_times(theta - mean)
    step = fit - 0.5 * (posterior.log_det_precision() - prior.log_det_precision() + scatter)
    total = first.log_evidence(torch.tensor([d], dtype=F64)) + step
    torch.testing.assert_close(total, true_evidence(x, y, d, sigma))


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match="curvature must be finite; net.weight has 1 NaN or infinite values of 2"):
        check_curvature([DiagonalCurvature(torch.tensor([math.nan, 1.0]))], ["net.weight"])
    with pytest.raises(ValueError, match="curvature must not be negative; b has -2 on its diagonal"):
        check_curvature([DiagonalCurvature(torch.tensor([-2.0, 1.0]))], ["b"])
    with pytest.raises(ValueError, match="log_likelihood must be finite; got nan"):
        Quadratic((), (), math.nan, Groups(1, ()))
    with pytest.raises(ValueError, match="a form that can be added to the old block, Kronecker; got Dense"):
        absorb(blocks()["kronecker"], DenseCurvature(positive(12)), num_old=1, num_new=1)
    with pytest.raises(ValueError, match="structure must have the 12 weights of the old block; got 3"):
        absorb(blocks()["dense"], DenseCurvature(positive(3)), num_old=1, num_new=1)
    assert isinstance(blocks()["dense"], Dense)


def test_a_dense_curvature_that_rounding_made_indefinite_still_has_a_posterior():
    """At a low temperature an eigenvalue of -1e-7 weighs more than the prior."""
    basis = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    values = torch.tensor([2.0, 1.0, 0.5, -1e-7], dtype=torch.float64)
    curvature, prior, scale = DenseCurvature((basis * values) @ basis.mT), torch.tensor(1.0, dtype=torch.float64), 1e8
    exact = (basis / (scale * values.clamp_min(0) + 1)) @ basis.mT
    tril = curvature.posterior(prior, scale).tril
    torch.testing.assert_close(tril @ tril.mT, exact)
    torch.testing.assert_close(curvature.log_det(prior, scale), (scale * values.clamp_min(0) + 1).log().sum())
