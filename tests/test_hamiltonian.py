"""HMC and NUTS against exact laws: reversible, volume-preserving, invariant, and adapted as they say."""

import itertools
import math

import pytest
import torch
from scipy import stats

from bayesformer.core.draws import drawing_from
from bayesformer.core.vectors import THETA
from bayesformer.inference import dual_averaging, hmc, mass_matrix, nuts
from bayesformer.inference.diagnostics import effective_sample_size
from bayesformer.inference.hamiltonian import leapfrog, phase
from tests.laws import assert_law

KINDS = {"nuts": nuts, "hmc": hmc}
every_kind = pytest.mark.parametrize("kind", list(KINDS))


class Target:
    """log p(θ) / N as a log joint, by autograd, with N = 10: a temperature that is forgotten somewhere shows."""

    N = 10

    def __init__(self, log_density):
        self.log_density = log_density

    def value_and_grad(self, params, batch):
        assert batch == "all"
        theta = params[THETA].detach().requires_grad_()
        value = self.log_density(theta) / self.N
        return value.detach(), None, {THETA: torch.autograd.grad(value, theta)[0]}

    def __call__(self, params, batch):
        raise AssertionError("the fast way is there")


def banana(theta):
    """x ~ N(0, 1), y | x ~ N(x², ½²): E y = 1, E y² = 3.25."""
    return -0.5 * theta[0] ** 2 - 0.5 * ((theta[1] - theta[0] ** 2) / 0.5) ** 2


def gaussian(mean, covariance):
    precision = torch.linalg.inv(covariance)
    return lambda theta: -0.5 * (theta - mean) @ precision @ (theta - mean)


def run(transform, theta, draws, seed=0, skip=0):
    """(S, P) states and (S, 6) statistics after `skip` transitions."""
    state, states, found = transform.init({THETA: theta.clone()}), [], []
    with drawing_from(torch.Generator("cpu").manual_seed(seed)):
        for step in range(skip + draws):
            state, statistics = transform.update(state, "all", inplace=True)
            if step >= skip:
                states.append(state.params[THETA].clone())
                found.append(torch.stack(statistics))
    return torch.stack(states), torch.stack(found), state


def assert_chain_mean(draws, expected, failure_rate=1e-6):
    """z-test of the mean of one chain (S, Q), whose standard error follows from its effective sample size."""
    size = effective_sample_size(draws.unsqueeze(0), rank_normalised=False)
    z = (draws.mean(0) - expected) * size.sqrt() / draws.std(0)
    bound = -stats.norm.ppf(failure_rate / (2 * z.numel()))
    assert z.abs().max() < bound, f"|z| = {z.abs().max():.1f} exceeds {bound:.1f} at ESS {size.min():.0f}"


def density_of(log_density):
    def density(theta):
        leaf = theta.detach().requires_grad_()
        value = log_density(leaf)
        return value.item(), torch.autograd.grad(value, leaf)[0]

    return density


# --- dynamics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", mass_matrix.METRICS)
def test_leapfrogs_are_reversible_and_preserve_volume(metric):
    inverse = torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=torch.float64)
    mass = mass_matrix.MassMatrix(inverse, torch.linalg.cholesky(inverse))
    if metric == "diagonal":
        mass = mass_matrix.MassMatrix(inverse.diagonal(), inverse.new_empty(0))
    density = density_of(banana)

    def steps(point, step, count):
        theta, momentum = point[:2], point[2:]
        log_density, gradient = density(theta)
        found = phase(theta, momentum, gradient, log_density, mass)
        for _ in range(count):
            found = leapfrog(found, step, mass, density)
        return torch.cat([found.theta, found.momentum])

    start = torch.tensor([0.4, -0.2, 0.7, 1.1], dtype=torch.float64)
    there = steps(start, 0.1, 25)
    assert (there - start).norm() > 1
    torch.testing.assert_close(steps(there, -0.1, 25), start, rtol=0, atol=1e-10)
    eye, h = torch.eye(4, dtype=torch.float64), 1e-5
    columns = [(steps(start + h * e, 0.1, 3) - steps(start - h * e, 0.1, 3)) / (2 * h) for e in eye]
    assert torch.linalg.det(torch.stack(columns)).item() == pytest.approx(1, abs=1e-7)


@pytest.mark.parametrize("metric", mass_matrix.METRICS)
def test_momenta_have_the_mass_as_covariance(metric):
    inverse = torch.tensor([[1.0, 0.6], [0.6, 0.5]], dtype=torch.float64)
    mass = mass_matrix.MassMatrix(inverse, torch.linalg.cholesky(inverse))
    if metric == "diagonal":
        mass = mass_matrix.MassMatrix(inverse.diagonal(), inverse.new_empty(0))
    with drawing_from(torch.Generator("cpu").manual_seed(0)):
        momenta = torch.stack([mass.draw() for _ in range(4000)])
    scaled = torch.stack([p @ mass.velocity(p) for p in momenta])  # pᵀ M⁻¹ p is chi-square of 2
    assert_law(scaled, stats.chi2(2).cdf)
    if metric == "dense":
        assert_chain_mean((momenta[:, :1] * momenta[:, 1:]), torch.linalg.inv(inverse)[0, 1])


# --- invariance -------------------------------------------------------------------------------------------------------


@every_kind
def test_one_transition_leaves_the_target_as_it_is(kind):
    """Exact draws of the banana stay exact draws, with steps so long that many proposals are refused."""
    source = torch.Generator("cpu").manual_seed(1)
    x = torch.randn(1500, dtype=torch.float64, generator=source)
    y = x**2 + 0.5 * torch.randn(1500, dtype=torch.float64, generator=source)
    options = {"max_depth": 3} if kind == "nuts" else {"length": 1.2}
    transform = KINDS[kind].build(Target(banana), 1 / Target.N, warm_up=0, step_size=0.4, **options)
    found, acceptance = [], []
    with drawing_from(source):
        for start in torch.stack([x, y], 1):
            state, statistics = transform.update(transform.init({THETA: start}), "all")
            found.append(state.params[THETA])
            acceptance.append(statistics.acceptance)
    after = torch.stack(found)
    assert 0.3 < torch.stack(acceptance).mean() < 0.9  # otherwise nothing is tested
    assert (after[:, 0] != x).double().mean() > 0.5
    assert_law(after[:, 0], stats.norm.cdf)
    assert_law((after[:, 1] - after[:, 0] ** 2) / 0.5, stats.norm.cdf)
    assert stats.spearmanr(after[:, 0].numpy(), (after[:, 1] - after[:, 0] ** 2).numpy()).pvalue > 1e-6


@every_kind
@pytest.mark.parametrize("metric", mass_matrix.METRICS)
def test_a_gaussian_has_its_mean_and_covariance(kind, metric):
    scale = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)
    correlation = torch.tensor([[1, 0.9, 0], [0.9, 1, -0.3], [0, -0.3, 1]], dtype=torch.float64)
    covariance, mean = scale * correlation * scale[:, None], torch.tensor([1.0, -2, 5], dtype=torch.float64)
    transform = KINDS[kind].build(Target(gaussian(mean, covariance)), 1 / Target.N, warm_up=300, metric=metric)
    draws, statistics, state = run(transform, torch.zeros(3, dtype=torch.float64), 700, skip=300)
    assert_chain_mean(draws, mean)
    deviations = draws - mean
    assert_chain_mean((deviations[:, :, None] * deviations[:, None]).flatten(1), covariance.flatten())
    assert not statistics[:, 3].any()
    estimated = state.mass.inverse if metric == "diagonal" else state.mass.inverse.diagonal()
    ratio = (estimated / covariance.diagonal()).log().abs().max()
    assert ratio < math.log(3), "the mass matrix is not that of the target"


@every_kind
def test_a_curved_target_has_its_moments(kind):
    """x ~ N(0, 1), y | x ~ N(x²/2, 1): E y = 1/2, E y² = 7/4, and fewer tails than the banana's to miss."""

    def bent(theta):
        return -0.5 * theta[0] ** 2 - 0.5 * (theta[1] - theta[0] ** 2 / 2) ** 2

    transform = KINDS[kind].build(Target(bent), 1 / Target.N, warm_up=200)
    draws, _, _ = run(transform, torch.zeros(2, dtype=torch.float64), 1500, skip=200)
    assert_chain_mean(torch.cat([draws, draws**2], 1), torch.tensor([0, 0.5, 1, 1.75], dtype=torch.float64))


def ladder():
    """A target, and a start and a step with which trajectories go straight on along its wide axis (no stretch of 15
    points turns), while the energy swings by 3 nats along the narrow one, where the step is near its limit of 2."""
    scale = torch.tensor([100.0, 1.0], dtype=torch.float64)
    density = density_of(lambda theta: -0.5 * (theta / scale).square().sum())
    mass = mass_matrix.unit(scale, "diagonal")
    theta, momentum = torch.tensor([[0.0, 0.5], [6.0, 1.4]], dtype=torch.float64)
    log_density, gradient = density(theta)
    return phase(theta, momentum, gradient, log_density, mass), 1.7, mass, density


def shares_of_points(weights, start, depth):
    """(points,): the chance of each point to be the next state, every order of doublings written out.

    Slow twin of the choice: a doubled half is preferred to all before with probability min(1, w_new / w_old), and
    within it points are drawn in proportion to their weights, however it is put together of smaller stretches.
    """
    total = torch.zeros_like(weights)
    for order in itertools.product((False, True), repeat=depth):
        low = high = start
        chosen = torch.zeros_like(weights)
        chosen[start] = 1
        for level, forwards in enumerate(order):
            new = slice(high + 1, high + 1 + 2**level) if forwards else slice(low - 2**level, low)
            taken = min(1.0, (weights[new].sum() / weights[low : high + 1].sum()).item())
            chosen *= 1 - taken
            chosen[new] = taken * weights[new] / weights[new].sum()
            low, high = min(low, new.start), max(high, new.stop - 1)
        total += chosen / 2**depth
    return total


def test_points_of_a_trajectory_of_nuts_are_chosen_by_their_weights():
    start, step, mass, density = ladder()
    depth, count = 3, 4000
    longest = 2**depth - 1
    after, before = [start], [start]
    for _ in range(longest):
        after.append(leapfrog(after[-1], step, mass, density))
        before.append(leapfrog(before[-1], -step, mass, density))
    points = [*before[:0:-1], *after]
    weights = torch.tensor([math.exp(start.energy - point.energy) for point in points], dtype=torch.float64)
    assert weights.max() / weights.min() > 10  # otherwise nothing is tested
    expected = shares_of_points(weights, longest, depth)
    assert expected.sum().item() == pytest.approx(1)
    assert expected.min() > 1e-3
    places = torch.stack([point.theta[0] for point in points])
    seen = torch.zeros(count, len(points), dtype=torch.float64)
    with drawing_from(torch.Generator("cpu").manual_seed(0)):
        for row in seen:
            end, statistics = nuts.transition(start, step, mass, density, max_depth=depth)
            assert statistics.leapfrogs == longest  # no stretch turned
            row[(places - end.theta[0]).abs().argmin()] = 1
    z = (seen.mean(0) - expected) / (expected * (1 - expected) / count).sqrt()
    assert z.abs().max() < 5, z


def test_trajectories_of_nuts_end_where_they_turn():
    """On a Gaussian with unit scale half a period is π: with steps of .1, 31 of them, so that 4 to 6 doublings are."""
    transform = nuts.build(Target(lambda theta: -0.5 * theta @ theta), 1 / Target.N, warm_up=0, step_size=0.1)
    _, statistics, _ = run(transform, torch.ones(10, dtype=torch.float64), 50)
    assert statistics[:, 1].min() >= 4
    assert statistics[:, 1].max() <= 6
    short = nuts.build(Target(lambda theta: -0.5 * theta @ theta), 1 / Target.N, warm_up=0, step_size=0.1, max_depth=3)
    _, statistics, _ = run(short, torch.ones(10, dtype=torch.float64), 5)
    assert statistics[:, 2].tolist() == [7] * 5


# --- adaptation -------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("target", [0.65, 0.9])
def test_the_step_size_gives_the_acceptance_that_is_asked_for(kind, target):
    log_density = gaussian(torch.zeros(8, dtype=torch.float64), torch.eye(8, dtype=torch.float64))
    transform = KINDS[kind].build(Target(log_density), 1 / Target.N, warm_up=300, target=target)
    _, statistics, _ = run(transform, torch.ones(8, dtype=torch.float64), 200, skip=300)
    found = statistics[:, 0].mean().item()
    assert target - 0.08 < found < target + 0.25  # the averaged step is shorter than the average of steps
    assert (found < 0.89) == (target < 0.89)
    if kind == "nuts":
        assert statistics[:, 5].unique().numel() == 1  # the step stays once the warm-up is over


def test_dual_averaging_finds_the_root_of_a_known_curve():
    state = dual_averaging.begin(5.0)
    for _ in range(2000):
        state = dual_averaging.learn(state, math.exp(-float(state.log_step.exp())), 0.8)
    assert math.exp(state.log_average) == pytest.approx(-math.log(0.8), rel=0.05)


def test_windows_are_those_of_stan():
    assert mass_matrix.window_ends(1000) == (100, 150, 250, 450, 950)
    assert mass_matrix.window_ends(150) == (100,)
    assert mass_matrix.window_ends(100) == (90,)
    assert mass_matrix.window_ends(19) == ()
    assert mass_matrix.first_of_windows(100) == 15


@pytest.mark.parametrize("count", [200, 6])
def test_the_mass_matrix_is_the_regularised_covariance_of_the_window(count):
    draws = torch.randn(count, 4, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 5.0, 1e3], dtype=torch.float64)
    for metric in mass_matrix.METRICS:
        moments = mass_matrix.no_moments(draws[0], metric)
        for draw in draws:
            moments = mass_matrix.add(moments, draw)
        mass = mass_matrix.estimate(moments)
        covariance = draws.mT.cov()
        floor = 1e-3 * 5 / (count + 5) * covariance.diagonal().log().mean().exp()
        kept = 1 if count == 200 else count / (count + 4)
        shrunk = kept * covariance + (1 - kept) * torch.diag(covariance.diagonal())
        expected = count / (count + 5) * shrunk + floor * torch.eye(4, dtype=torch.float64)
        if metric == "diagonal":
            torch.testing.assert_close(mass.inverse, expected.diagonal())
        else:
            torch.testing.assert_close(mass.inverse, expected)
            torch.testing.assert_close(mass.root @ mass.root.mT, expected)


# --- lost trajectories, states and errors -----------------------------------------------------------------------------


@every_kind
def test_divergences_are_counted_and_never_chosen(kind):
    """Beyond a wall the density is not a number; the steps are far too long for a wall that is near."""

    def walled(theta):
        return torch.where(theta[0] < 1, -0.5 * theta @ theta, torch.nan * theta.sum())

    transform = KINDS[kind].build(Target(walled), 1 / Target.N, warm_up=0, step_size=1.0)
    draws, statistics, _ = run(transform, torch.zeros(2, dtype=torch.float64), 100)
    assert statistics[:, 3].sum() > 5
    assert bool(torch.isfinite(draws).all())
    assert draws[:, 0].max() < 1


@every_kind
def test_pure_and_in_place_updates_agree(kind):
    build = KINDS[kind].build
    start = torch.tensor([0.3, -0.2], dtype=torch.float64)
    found, _, last = run(build(Target(banana), 1 / Target.N, warm_up=40), start, 60)
    pure = build(Target(banana), 1 / Target.N, warm_up=40)
    state = first = pure.init({THETA: start})
    with drawing_from(torch.Generator("cpu").manual_seed(0)):
        for _ in range(60):
            before = state.params[THETA].clone()
            after, _ = pure.update(state, "all")
            assert torch.equal(state.params[THETA], before)
            state = after
    assert torch.equal(state.params[THETA], found[-1])
    assert torch.equal(state.mass.inverse, last.mass.inverse)
    assert torch.equal(first.params[THETA], start)
    assert state.log_joint.item() == pytest.approx(banana(found[-1]).item() / Target.N)


def test_errors_name_the_argument():
    target = Target(banana)
    with pytest.raises(ValueError, match="temperature must be greater than 0; got 0"):
        nuts.build(target, 0.0)
    with pytest.raises(ValueError, match=r"target must be strictly between 0 and 1; got 1\.5"):
        hmc.build(target, 1.0, target=1.5)
    with pytest.raises(ValueError, match="unknown metric"):
        nuts.build(target, 1.0, metric="round")
    with pytest.raises(ValueError, match="max_depth must be at least 1; got 0"):
        nuts.build(target, 1.0, max_depth=0)
    with pytest.raises(ValueError, match="length must be above 0"):
        hmc.build(target, 1.0, length=0.0)
    with pytest.raises(ValueError, match="params must be one vector"):
        nuts.build(target, 1.0).init({THETA: torch.zeros(2, 3)})
    bad = nuts.build(Target(lambda theta: theta.sum() * torch.inf), 1.0)
    with pytest.raises(ValueError, match="must be finite where a chain starts"):
        bad.update(bad.init({THETA: torch.ones(2)}), "all")
