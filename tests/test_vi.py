"""Variational inference against exact posteriors, exact gradients and plain optimisation."""

import math

import pytest
import torch
from scipy import stats

from bayesformer.core.draws import drawing_from
from bayesformer.core.vectors import THETA
from bayesformer.data import Data, as_batches
from bayesformer.inference import optimise, vi_dense, vi_diag
from bayesformer.inference.optimise import Adam
from bayesformer.likelihoods import Gaussian
from bayesformer.train.checkpoint import pack_state
from bayesformer.train.loop import score
from bayesformer.train.objective import Objective
from tests.laws import assert_mean
from tests.nets import Mlp, shell_of

KINDS = {"diag": vi_diag, "dense": vi_dense}
both = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())

PRECISION = torch.tensor([[2.0, 0.9, 0.0], [0.9, 1.0, -0.3], [0.0, -0.3, 0.5]], dtype=torch.float64)
CENTRE = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


class Quadratic:
    """log_joint = -½ (θ-a)ᵀ Λ (θ-a), on one vector or on rows."""

    def __init__(self, precision=PRECISION, centre=CENTRE):
        self.precision, self.centre = precision, centre

    def __call__(self, params, batch):
        gap = params[THETA] - self.centre
        return -0.5 * gap @ self.precision @ gap, gap

    def value_and_grad(self, params, batch):
        gap = params[THETA] - self.centre
        force = gap @ self.precision
        return -0.5 * (gap * force).sum(-1), gap, {THETA: -force}


class Quartic:
    """log_joint = -θ⁴/4 + θ, weight by weight: nothing about it is Gaussian."""

    def value_and_grad(self, params, batch):
        theta = params[THETA]
        return (-(theta**4) / 4 + theta).sum(-1), theta, {THETA: 1 - theta**3}


class Uphill:
    """Gradient ascent with rate 1: what it adds is the gradient."""

    def init(self, params):
        return {}

    def step(self, params, grads, state, inplace=False):
        return {k: p + grads[k] for k, p in params.items()}, state


def decay(lr, steps):
    """A constant rate, then down with 1/t²: Adam's own jitter is of the size of its rate."""
    return lambda step: lr * (steps / step).clamp_max(1.0) ** 2


def run(transform, state, steps, batch=None, inplace=True):
    for _ in range(steps):
        state, _ = transform.update(state, batch, inplace=inplace)
    return state


def regression(noise=0.7, prior_sd=1.5, num=30):
    """Data, the log joint over {"slope": (2,), "intercept": ()}, and the exact posterior."""
    x = torch.randn(num, 2, dtype=torch.float64) @ torch.tensor([[1.0, 0.8], [0.0, 0.6]], dtype=torch.float64)
    y = x @ torch.tensor([1.0, -0.5], dtype=torch.float64) + 0.3 + noise * torch.randn(num, dtype=torch.float64)

    def log_joint(params, batch):
        inputs, targets = batch
        outputs = inputs @ params["slope"] + params["intercept"]
        likelihood = -0.5 * ((targets - outputs) / noise).square().mean()
        prior = -0.5 * sum(p.square().sum() for p in params.values()) / prior_sd**2
        return likelihood + prior / num, outputs

    design = torch.cat([x, torch.ones(num, 1, dtype=torch.float64)], 1)
    precision = design.T @ design / noise**2 + torch.eye(3, dtype=torch.float64) / prior_sd**2
    mean = torch.linalg.solve(precision, design.T @ y / noise**2)
    start = {"slope": torch.zeros(2, dtype=torch.float64), "intercept": torch.zeros((), dtype=torch.float64)}
    return (x, y), log_joint, start, mean, precision


@pytest.fixture
def cubature(monkeypatch):
    """Noise from the 2P points ±√P eᵢ. Their averages are exact for polynomials up to degree 3, and the gradient
    of the ELBO of a Gaussian target is of degree 2 in ε: with draws = 2P it has no noise at all."""

    def install(size):
        points = math.sqrt(size) * torch.cat([torch.eye(size), -torch.eye(size)]).double()
        turn = iter(range(10**9))

        def noise(tensor):
            return points[next(turn) % len(points)].expand(tensor.shape).clone()

        monkeypatch.setattr(vi_diag, "normal_like", noise)
        monkeypatch.setattr(vi_dense, "normal_like", noise)

    return install


def test_dense_optimum_is_the_posterior_of_linear_regression():
    # With stl the noise dies out at the optimum, so only the number of steps limits the accuracy. Over 2000 data sets
    # of this kind the worst error was 5e-5 in units of the posterior's sd.
    batch, log_joint, start, mean, precision = regression()
    transform = vi_dense.build(log_joint, 1 / 30, Adam(decay(0.03, 300)), log_sd=math.log(0.1), draws=2)
    state = run(transform, transform.init(start), 800, batch)
    exact = torch.linalg.inv(precision)
    sd = exact.diag().sqrt()
    assert ((vi_dense.ravel(state.params) - mean) / sd).abs().max() < 1e-3
    assert ((vi_dense.covariance(state) - exact) / torch.outer(sd, sd)).abs().max() < 1e-3


@pytest.mark.parametrize(("stl", "temperature"), [(False, 0.05), (True, 0.2)])
def test_optima_on_a_correlated_gaussian_are_exact(cubature, stl, temperature):
    cubature(3)
    rule = Adam(decay(0.05, 200))
    for kind in (vi_diag, vi_dense):
        transform = kind.build(Quadratic(), temperature, rule, log_sd=math.log(0.2), draws=6, stl=stl)
        state = run(transform, transform.init({THETA: torch.zeros(3, dtype=torch.float64)}), 800)
        torch.testing.assert_close(state.params[THETA], CENTRE, rtol=0, atol=1e-5)
        if kind is vi_diag:  # σ² = T / Λᵢᵢ: proportional to the temperature
            torch.testing.assert_close(
                state.log_sd[THETA].exp() ** 2, temperature / PRECISION.diag(), rtol=1e-4, atol=0
            )
        else:
            exact = temperature * torch.linalg.inv(PRECISION)
            torch.testing.assert_close(vi_dense.covariance(state), exact, rtol=1e-4, atol=1e-6)


@both
def test_sticking_the_landing_leaves_no_noise_at_the_optimum(kind):
    temperature = 0.1
    precision = PRECISION if kind is vi_dense else PRECISION.diag().diag()
    transform = kind.build(Quadratic(precision), temperature, Uphill())
    state = transform.init({THETA: CENTRE.expand(1000, 3).clone()})
    if kind is vi_diag:
        spread = {"log_sd": {THETA: (temperature / precision.diag()).log().div(2).expand(1000, 3)}}
    else:
        root = torch.linalg.cholesky(temperature * torch.linalg.inv(precision))
        spread = {"factor": (root.tril(-1) + root.diag().log().diag()).expand(1000, 3, 3)}
    moved, _ = transform.update(state._replace(**spread), None)
    new = moved.log_sd[THETA] if kind is vi_diag else moved.factor
    old = spread["log_sd"][THETA] if kind is vi_diag else spread["factor"]
    assert (moved.params[THETA] - CENTRE).abs().max() < 1e-12
    assert (new - old).abs().max() < 1e-12
    noisy, _ = kind.build(Quadratic(precision), temperature, Uphill(), stl=False).update(state._replace(**spread), None)
    assert (noisy.params[THETA] - CENTRE).std() > 0.1  # without it, there is


@pytest.mark.parametrize("stl", [False, True])
def test_diagonal_gradient_is_that_of_the_expected_elbo(stl):
    mean, log_sd, temperature, rows = 0.4, -0.5, 0.3, 200_000

    def elbo(mu, rho):  # E θ⁴ = μ⁴ + 6 μ²σ² + 3σ⁴
        var = math.exp(2 * rho)
        return -(mu**4 + 6 * mu**2 * var + 3 * var**2) / 4 + mu + temperature * rho

    transform = vi_diag.build(Quartic(), temperature, Uphill(), log_sd=log_sd, stl=stl)
    state = transform.init({THETA: torch.full((rows, 1), mean, dtype=torch.float64)})
    moved, _ = transform.update(state, None)
    h = 1e-5
    slope_mean = (elbo(mean + h, log_sd) - elbo(mean - h, log_sd)) / (2 * h)
    slope_log_sd = (elbo(mean, log_sd + h) - elbo(mean, log_sd - h)) / (2 * h)
    assert_mean(moved.params[THETA] - mean, slope_mean)
    assert_mean(moved.log_sd[THETA] - log_sd, slope_log_sd)


@pytest.mark.parametrize("stl", [False, True])
def test_dense_gradient_is_that_of_the_expected_elbo(stl):
    temperature, rows = 0.3, 100_000
    mean = torch.tensor([0.5, -1.0, 0.2], dtype=torch.float64)
    factor = torch.tensor([[-0.5, 0.0, 0.0], [0.4, -1.0, 0.0], [-0.2, 0.7, 0.1]], dtype=torch.float64)

    def elbo(mean, factor):
        root = factor.tril(-1) + factor.diag().exp().diag()
        second = root @ root.T + torch.outer(mean - CENTRE, mean - CENTRE)
        return -0.5 * (PRECISION * second).sum() + temperature * factor.diag().sum()

    transform = vi_dense.build(Quadratic(), temperature, Uphill(), stl=stl)
    state = transform.init({THETA: mean.expand(rows, 3).clone()})._replace(factor=factor.expand(rows, 3, 3))
    moved, _ = transform.update(state, None)
    h, unit = 1e-5, torch.eye(9, dtype=torch.float64)
    slopes = [(elbo(mean, factor + h * e.view(3, 3)) - elbo(mean, factor - h * e.view(3, 3))) / (2 * h) for e in unit]
    slope_mean = [(elbo(mean + h * e, factor) - elbo(mean - h * e, factor)) / (2 * h) for e in unit[:3, :3]]
    assert_mean(moved.params[THETA] - mean, torch.stack(slope_mean))
    lower = torch.ones(3, 3).tril().bool()
    assert_mean((moved.factor - factor)[:, lower], torch.stack(slopes).view(3, 3)[lower])
    assert torch.equal(moved.factor[:, ~lower], torch.zeros(rows, 3, dtype=torch.float64))


@both
@pytest.mark.parametrize("draws", [1, 4, 16])
def test_variance_falls_with_the_number_of_draws(kind, draws):
    # For -½ λ θ² the gradient of the mean is -λ (μ + σ ε): variance λ² σ² over the draws.
    precision = torch.tensor([[3.0]], dtype=torch.float64)
    joint = Quadratic(precision, torch.zeros(1, dtype=torch.float64))
    transform = kind.build(joint, 0.1, Uphill(), log_sd=math.log(0.2), draws=draws, stl=False)
    moved, _ = transform.update(transform.init({THETA: torch.zeros(50_000, 1, dtype=torch.float64)}), None)
    assert_mean(moved.params[THETA].square(), 9 * 0.04 / draws)


@both
def test_value_is_the_expected_log_joint(kind):
    # E[-½ (θ-a)ᵀΛ(θ-a)] at μ = a is -½ σ² tr Λ, whatever the number of draws
    for draws in (1, 3):
        transform = kind.build(Quadratic(), 0.1, log_sd=math.log(0.3), draws=draws)
        state, outputs = transform.update(transform.init({THETA: CENTRE.expand(20_000, 3).clone()}), None)
        assert_mean(state.log_joint, -0.5 * 0.09 * PRECISION.trace())
        assert outputs.shape == (20_000, 3)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.1])
def test_without_noise_it_is_the_optimiser(inplace, temperature):
    rule = Adam(0.05)
    plain = optimise.build(Quadratic(), rule, clip=0.5)
    transform = vi_diag.build(Quadratic(), temperature, rule, log_sd=-math.inf, stl=temperature == 0, draws=1, clip=0.5)
    start = {THETA: torch.zeros(3, dtype=torch.float64)}
    one, two = plain.init({THETA: start[THETA].clone()}), transform.init(start)
    for _ in range(50):
        one, _ = plain.update(one, None, inplace=inplace)
        two, _ = transform.update(two, None, inplace=inplace)
        assert torch.equal(one.params[THETA], two.params[THETA])
    assert (two.log_sd[THETA] == -math.inf).all()


@both
@pytest.mark.parametrize("stl", [False, True])
def test_at_temperature_zero_only_the_expected_log_joint_is_left(cubature, kind, stl):
    # Its slope in log σᵢ is -Λᵢᵢ σ², in the mean -Λ (μ-a), and nothing holds σ up.
    cubature(3)
    transform = kind.build(Quadratic(), 0.0, Uphill(), log_sd=math.log(0.2), draws=6, stl=stl)
    moved, _ = transform.update(transform.init({THETA: torch.zeros(3, dtype=torch.float64)}), None)
    torch.testing.assert_close(moved.params[THETA], PRECISION @ CENTRE)
    log_sd = moved.log_sd[THETA] if kind is vi_diag else moved.factor.diagonal()
    torch.testing.assert_close(log_sd - math.log(0.2), -PRECISION.diag() * 0.04)


class Descent:
    """An optimiser as torchopt has them, with a state: heavy-ball descent."""

    def init(self, params):
        return {k: torch.zeros_like(p) for k, p in params.items()}

    def update(self, grads, state, *, params=None, inplace=True):
        assert grads.keys() == params.keys()
        if inplace:
            velocity = {k: v.mul_(0.9).add_(grads[k]) for k, v in state.items()}
        else:
            velocity = {k: 0.9 * v + grads[k] for k, v in state.items()}
        return {k: -0.05 * v for k, v in velocity.items()}, velocity


class Stateless:
    """The least an optimiser of that form must have."""

    def init(self, params):
        return ()

    def update(self, grads, state, params=None):
        return {k: -0.4 * g for k, g in grads.items()}, state


@both
@pytest.mark.parametrize("optimiser", [Descent(), Stateless()])
def test_any_optimiser_will_do(cubature, kind, optimiser):
    cubature(3)
    transform = kind.build(Quadratic(), 0.1, optimiser, log_sd=math.log(0.2), draws=6)
    state = transform.init({THETA: torch.zeros(3, dtype=torch.float64)})
    pure = run(transform, state, 3, inplace=False)
    assert torch.equal(state.params[THETA], torch.zeros(3, dtype=torch.float64))
    assert all((velocity == 0).all() for velocity in dict(state.rule).values())  # its state is left too
    again = run(transform, transform.init({THETA: torch.zeros(3, dtype=torch.float64)}), 3)
    torch.testing.assert_close(pure.params, again.params)
    state = run(transform, state, 600)
    torch.testing.assert_close(state.params[THETA], CENTRE, rtol=0, atol=1e-6)
    exact = 0.1 / PRECISION.diag() if kind is vi_diag else (0.1 * torch.linalg.inv(PRECISION)).diag()
    variance = state.log_sd[THETA].exp() ** 2 if kind is vi_diag else vi_dense.covariance(state).diag()
    torch.testing.assert_close(variance, exact, rtol=1e-6, atol=0)


@both
def test_each_gradient_is_clipped_by_itself_in_every_row(kind):
    state = kind.build(Quadratic(), 0.1, Uphill(), log_sd=0.0, clip=0.01).init({THETA: torch.zeros(5, 3).double()})
    moved, _ = kind.build(Quadratic(), 0.1, Uphill(), clip=0.01).update(state, None)
    spread = moved.log_sd[THETA] if kind is vi_diag else (moved.factor - state.factor).flatten(1)
    for step in (moved.params[THETA], spread):
        torch.testing.assert_close(step.norm(dim=1), torch.full((5,), 0.01).double(), rtol=1e-4, atol=0)


@both
@pytest.mark.parametrize("draws", [1, 3])
def test_in_place_and_pure_agree(kind, draws):
    batch, log_joint, start, *_ = regression()
    transform = kind.build(log_joint, 1 / 30, Adam(0.05), draws=draws, clip=0.3)
    states = []
    for inplace in (False, True):
        with drawing_from([torch.Generator().manual_seed(1)]):
            states.append(run(transform, transform.init(start), 20, batch, inplace))
    pure, fused = states
    spreads = [s.log_sd if kind is vi_diag else s.factor for s in states]
    torch.testing.assert_close(pure.params, fused.params, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(*spreads, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(pure.log_joint, fused.log_joint, rtol=1e-9, atol=1e-12)


@both
def test_pure_update_leaves_the_old_state(kind):
    batch, log_joint, start, *_ = regression()
    transform = kind.build(log_joint, 1 / 30)
    old = transform.init(start)
    before = {k: v.clone() for k, v in pack_state(old).items()}
    new, _ = transform.update(old, batch)
    for name, value in pack_state(old).items():
        assert torch.equal(value, before[name]) or name == "log_joint"
    assert not torch.equal(new.params["slope"], old.params["slope"])


@both
def test_in_place_leaves_what_it_was_started_from(kind):
    theta = torch.zeros(3, dtype=torch.float64)
    transform = kind.build(Quadratic(), 0.1)
    run(transform, transform.init({THETA: theta}), 3)
    assert torch.equal(theta, torch.zeros(3, dtype=torch.float64))


@both
def test_rows_are_members_of_their_own(kind):
    theta = torch.randn(3, 3, dtype=torch.float64)
    transform = kind.build(Quadratic(), 0.1, Adam(0.05), draws=2, clip=0.5)
    with drawing_from([torch.Generator().manual_seed(i) for i in range(3)]):
        together = run(transform, transform.init({THETA: theta}), 10)
        draw = kind.sample(together)
    assert together.log_joint.shape == (3,)
    for i, row in enumerate(theta):
        with drawing_from([torch.Generator().manual_seed(i)]):
            alone = run(transform, transform.init({THETA: row}), 10)
            torch.testing.assert_close(together.params[THETA][i], alone.params[THETA])
            torch.testing.assert_close(draw[THETA][i], kind.sample(alone)[THETA])
        torch.testing.assert_close(together.log_joint[i], alone.log_joint)


@both
def test_update_can_be_vmapped(kind):
    batch, log_joint, start, *_ = regression()
    transform = kind.build(log_joint, 1 / 30, Adam(0.05))
    states = torch.vmap(transform.init)({k: p.expand(4, *p.shape) for k, p in start.items()})
    stepped, outputs = torch.vmap(transform.update, in_dims=(0, None), randomness="different")(states, batch)
    assert outputs.shape == (4, 30)
    assert len(stepped.log_joint.unique()) == 4  # each its own noise
    draws = torch.vmap(kind.sample, randomness="different")(stepped)
    assert draws["slope"].shape == (4, 2)
    quiet = kind.build(log_joint, 0.0, Adam(0.05), log_sd=-700.0)  # nothing of the noise is left
    stepped, _ = torch.vmap(quiet.update, in_dims=(0, None), randomness="different")(
        torch.vmap(quiet.init)({k: p.expand(4, *p.shape) for k, p in start.items()}), batch
    )
    single, _ = quiet.update(quiet.init(start), batch)
    torch.testing.assert_close(stepped.params["slope"][3], single.params["slope"])


@both
def test_draws_have_the_law_of_q(kind):
    mean = torch.tensor([0.5, -1.0, 0.2], dtype=torch.float64)
    state = kind.build(Quadratic(), 0.1).init({THETA: mean.expand(100_000, 3).clone()})
    if kind is vi_diag:
        log_sd = torch.tensor([0.1, -0.5, -2.0], dtype=torch.float64)
        state, covariance = state._replace(log_sd={THETA: log_sd.expand(100_000, 3)}), (2 * log_sd).exp().diag()
    else:
        factor = torch.tensor([[-0.5, 0.0, 0.0], [0.4, -1.0, 0.0], [-0.2, 0.7, 0.1]], dtype=torch.float64)
        root = factor.tril(-1) + factor.diag().exp().diag()
        state, covariance = state._replace(factor=factor.expand(100_000, 3, 3)), root @ root.T
    gap = kind.sample(state)[THETA] - mean
    assert_mean(gap, torch.zeros(3))
    assert_mean(gap.unsqueeze(-1) * gap.unsqueeze(-2), covariance)


def test_a_flat_model_keeps_its_mean_apart_from_its_draws():
    torch.manual_seed(0)
    model = shell_of(Mlp())
    data = Data(torch.randn(20, 3), torch.randn(20, 2))
    joint = Objective(model, Gaussian(1.0), 20)
    for kind in KINDS.values():
        start = model.theta.clone()
        transform = kind.build(joint, 1 / 20, Adam(0.01), log_sd=-1.0, draws=2)
        plain = kind.build(joint.__call__, 1 / 20, Adam(0.01), log_sd=-1.0, draws=2)  # no memory shared
        with drawing_from([torch.Generator().manual_seed(0)]):
            ours = transform.init({THETA: model.theta})
            for _ in range(5):
                ours, _ = transform.update(ours, data.take(torch.arange(10)), inplace=True)
                score(model, Gaussian(1.0), ours.params[THETA], as_batches(data))  # as the loop does after an epoch
        with drawing_from([torch.Generator().manual_seed(0)]):
            theirs = run(plain, plain.init({THETA: start}), 5, data.take(torch.arange(10)), inplace=False)
        torch.testing.assert_close(ours.params[THETA], theirs.params[THETA], rtol=1e-4, atol=1e-6)
        model.load(start)


@pytest.mark.parametrize("pairs", [False, True])
def test_dense_posterior_is_calibrated(pairs):
    """Simulation-based calibration: θ from the prior, y from θ; its rank among posterior draws is uniform."""
    problems, num, draws, noise = 2000, 8, 99, 0.8
    theta = torch.randn(problems, 2, dtype=torch.float64)
    x = torch.randn(problems, num, 2, dtype=torch.float64) @ torch.tensor([[1.0, 0.8], [0.0, 0.6]]).double()
    y = vi_dense.times(x, theta) + noise * torch.randn(problems, num, dtype=torch.float64)

    class Rows:
        def value_and_grad(self, params, batch):
            weights = params[THETA]
            residual = y - vi_dense.times(x, weights)
            value = -0.5 * residual.square().mean(-1) / noise**2 - 0.5 * weights.square().sum(-1) / num
            return value, residual, {THETA: vi_dense.times(x.mT, residual) / (noise**2 * num) - weights / num}

    transform = vi_dense.build(Rows(), 1 / num, Adam(decay(0.05, 150)), log_sd=math.log(0.3), pairs=pairs)
    state = run(transform, transform.init({THETA: torch.zeros(problems, 2, dtype=torch.float64)}), 600)
    ranks = sum((with_sum(vi_dense.sample(state)[THETA]) < with_sum(theta)).long() for _ in range(draws))
    for rank in ranks.T:
        assert_uniform(rank, draws + 1)


def with_sum(theta):
    """Both weights and their sum, whose law depends on their correlation."""
    return torch.cat([theta, theta.sum(-1, keepdim=True)], -1)


def assert_uniform(ranks, levels, bins=20, failure_rate=1e-6):
    counts = torch.bincount(ranks * bins // levels, minlength=bins)
    pvalue = stats.chisquare(counts.numpy()).pvalue
    assert pvalue > failure_rate, f"ranks {counts.tolist()}, p = {pvalue:.1e}"


@both
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0 .*; got -0.1"),
        ({"temperature": math.nan}, "temperature must be at least 0 .*; got nan"),
        ({"temperature": 0.1, "draws": 0}, "draws must be at least 1; got 0"),
        ({"temperature": 0.1, "clip": 0.0}, "clip must be positive; got 0.0"),
        ({"temperature": 0.1, "log_sd": math.inf}, "log_sd must be .*finite.*; got inf"),
        ({"temperature": 0.1, "log_sd": -math.inf}, "log_sd must be finite.*; got -inf"),
        ({"temperature": 0.1, "rule": Adam(weight_decay=0.1)}, "rule.weight_decay must be 0.*; got 0.1"),
        ({"temperature": 0.1, "rule": "adam"}, "rule must have init and step, or init and update; got str"),
    ],
)
def test_settings_are_checked(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind.build(Quadratic(), **settings)


def test_dense_refuses_many_weights_and_names_the_memory():
    transform = vi_dense.build(Quadratic(), 0.1)
    with pytest.raises(ValueError, match="at most 5000 weights .* got 6000, whose matrices would need 0.6 GB"):
        transform.init({"a": torch.zeros(1000, 5), "b": torch.zeros(1000)})
    with pytest.raises(ValueError, match="would need 1.2 GB"):
        transform.init({THETA: torch.zeros(2, 6000)})


@both
def test_pairs_cancel_what_is_odd(kind):
    """On a Gaussian target ∂μ is the gradient at μ without noise, and the gradient at μ is not in that of the spread:
    a batch that pulls the mean far away leaves it as it is. One draw of each cannot do either."""
    pulled_by = torch.tensor([30.0, -20.0, 10.0], dtype=torch.float64)

    class Pulled(Quadratic):
        def value_and_grad(self, params, batch):
            value, outputs, grads = super().value_and_grad(params, batch)
            return value, outputs, {k: g + pulled_by for k, g in grads.items()}

    calm, pulled = Quadratic(), Pulled()
    mean = torch.tensor([0.3, 0.1, -0.4], dtype=torch.float64)
    transform = kind.build(calm, 0.1, log_sd=-1.0)
    state = transform.init({THETA: mean})
    found = {}
    for pairs in (True, False):
        with drawing_from(torch.Generator().manual_seed(0)):
            one = kind.elbo_gradient(state, None, calm, 0.1, pairs=pairs)
        with drawing_from(torch.Generator().manual_seed(0)):
            two = kind.elbo_gradient(state, None, pulled, 0.1, pairs=pairs)
        spread = [next(iter(part[3].values())) for part in (one, two)]
        found[pairs] = (one[2][THETA] - calm.value_and_grad({THETA: mean}, None)[2][THETA]).abs().max()
        assert torch.allclose(*spread) == pairs
    assert found[True] < 1e-12
    assert found[False] > 1e-3
