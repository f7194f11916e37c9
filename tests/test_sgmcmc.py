"""Samplers against their exact stationary laws in discrete time, their limits, and each other."""

import inspect
import math

import pytest
import torch
from scipy import stats

from bayesformer.core.draws import drawing_from
from bayesformer.core.vectors import THETA, dot, is_matrix
from bayesformer.inference import baoab, psgld, schedules, sghmc, sgld, sgnht
from bayesformer.inference.diagnostics import kinetic_temperature
from bayesformer.likelihoods import Categorical
from bayesformer.train.loop import train
from bayesformer.train.objective import Objective
from bayesformer.train.training import Training
from tests.laws import assert_mean
from tests.nets import Mlp, blobs, job_of, shell_of

N = 40_000  # independent chains in one vector: a variance is known to 0.7 %


class Gaussian:
    """U = -λ/2 |θ|² whose gradient has additive noise of variance V. Takes parameters in any form."""

    def __init__(self, lam=1.0, noise=0.0):
        self.lam, self.noise = lam, noise

    def value_and_grad(self, params, batch):
        grads = {k: -self.lam * p for k, p in params.items()}
        if self.noise:
            grads = {k: g + math.sqrt(self.noise) * torch.randn_like(g) for k, g in grads.items()}
        return -self.lam / 2 * dot(params, params), torch.zeros(()), grads


def quartic(params, batch):
    """A plain log joint, not quadratic."""
    return -sum((p.square() + 0.1 * p**4).sum() for p in params.values()), torch.zeros(())


class QuarticRows:
    """The same for members in rows."""

    def value_and_grad(self, params, batch):
        (rows,) = params.values()
        return -(rows.square() + 0.1 * rows**4).sum(-1), torch.zeros(()), {THETA: -2 * rows - 0.4 * rows**3}


SAMPLERS = {
    "sgld": sgld.build,
    "psgld": psgld.build,
    "psgld frozen": lambda *a, **k: psgld.build(*a, freeze=3, eps=0.1, **k),
    "sghmc": sghmc.build,
    "sghmc explicit": lambda *a, **k: sghmc.build(*a, scheme="explicit", **k),
    "sgnht": sgnht.build,
    "baoa": baoab.build,
    "baoab": lambda *a, **k: baoab.build(*a, order="baoab", **k),
}
every_sampler = pytest.mark.parametrize("build", SAMPLERS.values(), ids=SAMPLERS)
both_settings = pytest.mark.parametrize("scheduled", [False, True], ids=["numbers", "schedules"])


def start():
    return {
        "a": torch.linspace(-1, 2, 6, dtype=torch.float64).view(2, 3),
        "b": torch.tensor([0.5], dtype=torch.float64),
    }


def settings(scheduled, lr=0.02, temperature=0.1):
    if scheduled:
        return schedules.cyclical_lr(lr, 2, 20), schedules.cyclical_temperature(temperature, 2, 20, 0.5)
    return lr, temperature


def run(transform, params, steps, inplace=True, batch=None):
    state = transform.init(params)
    for _ in range(steps):
        state, _ = transform.update(state, batch, inplace=inplace)
    return state


def settled(transform, steps=400):
    """θ and m of independent chains after the start is forgotten."""
    state = run(transform, {THETA: torch.zeros(N)}, steps)
    return state.params[THETA], state.momenta[THETA] if hasattr(state, "momenta") else None


def tensors(state):
    return [t for value in state for t in (value.values() if isinstance(value, dict) else [value])]


# Stationary laws


@pytest.mark.parametrize("noise", [0.0, 2.0])
@pytest.mark.parametrize("lr", [0.1, 0.4])
def test_sgld_has_the_variance_of_the_euler_chain(lr, noise):
    lam, heat = 1.5, 0.7
    theta, _ = settled(sgld.build(Gaussian(lam, noise), lr, heat), 120)
    assert_mean(theta.square(), (heat + lr * noise / 2) / (lam * (1 - lr * lam / 2)))
    assert_mean(theta, 0.0)


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_frozen_psgld_has_the_variance_of_the_euler_chain_of_its_scale(noise):
    lam, heat, lr, size = 1.5, 0.7, 0.1, 0.3
    transform = psgld.build(Gaussian(lam, noise), lr, heat, freeze=1, eps=0.01)
    state = transform.init({THETA: torch.zeros(N)})
    state = state._replace(square={THETA: torch.full((N,), size**2)}, step=torch.tensor(1.0))
    for _ in range(150):
        state, _ = transform.update(state, None, inplace=True)
    scale = 1 / (0.01 + size)
    expected = (heat + lr * scale * noise / 2) / (lam * (1 - lr * scale * lam / 2))
    assert_mean(state.params[THETA].square(), expected)
    torch.testing.assert_close(state.square[THETA], torch.full((N,), size**2))


@pytest.mark.parametrize("noise", [0.0, 2.0])
@pytest.mark.parametrize(("lr", "friction", "sigma"), [(0.2, 1.0, 1.0), (0.4, 0.7, 1.3)])
def test_sghmc_has_the_variance_of_the_semi_implicit_chain(lr, friction, sigma, noise):
    lam, heat = 2.0, 0.7
    theta, momentum = settled(sghmc.build(Gaussian(lam, noise), lr, heat, friction, sigma))
    c, kappa = 1 - lr * friction / sigma**2, lr**2 * lam / sigma**2
    expected = (heat + lr * noise / (2 * friction)) / lam * (1 + c) / (1 + c - kappa / 2)
    assert_mean(theta.square(), expected)
    assert_mean(momentum.square(), expected * 2 * lam * sigma**2 / (1 + c))
    assert_mean(theta * momentum, expected * lr * lam / (1 + c))


@pytest.mark.parametrize("noise", [0.0, 2.0])
@pytest.mark.parametrize(("lr", "theta_variance"), [(0.2, 0.596), (0.05, 0.389)])
def test_explicit_sghmc_has_the_variance_of_the_explicit_chain(lr, theta_variance, noise):
    lam, heat, friction = 2.0, 0.7, 1.0
    theta, momentum = settled(
        sghmc.build(Gaussian(lam, noise), lr, heat, friction, scheme="explicit"), 400 if lr > 0.1 else 800
    )
    a, b, c, q = lr, lr * lam, 1 - lr * friction, 2 * lr * heat * friction + lr**2 * noise
    kinetic = q / (1 - c**2 - a * b * c - a * b * (1 + c + a * b) / 2)
    expected = a / b * kinetic * (1 + c + a * b) / 2
    assert_mean(theta.square(), expected)
    assert_mean(momentum.square(), kinetic)
    if not noise:
        assert expected == pytest.approx(theta_variance, abs=5e-4)  # far from T/λ = 0.35


@pytest.mark.parametrize("noise", [0.0, 2.0])
@pytest.mark.parametrize("order", ["baoa", "baoab"])
@pytest.mark.parametrize(("lr", "friction", "sigma"), [(0.1, 1.5, 1.0), (0.5, 1.0, 1.0), (1.2, 0.8, 1.3)])
def test_baoa_and_baoab_have_the_exact_variance_at_every_step_size(lr, friction, sigma, order, noise):
    lam, heat = 1.5, 0.7
    theta, momentum = settled(baoab.build(Gaussian(lam, noise), lr, heat, friction, sigma, order), 300)
    c, kappa = math.exp(-lr * friction / sigma**2), lr**2 * lam / sigma**2
    heating = lr**2 * noise * (1 + c) / (lam * sigma**2 * (1 - c) * (4 - kappa))
    assert_mean(theta.square(), heat / lam + heating)
    if noise:
        return
    assert_mean(momentum.square(), heat * sigma**2 * (1 - kappa / 4 if order == "baoab" else 1))


def thermostat_law(lr, heat, friction, sigma, lam, noise):
    """(ξ, var θ) of many weights under SGNHT."""
    s, q = 1 - lr**2 * lam / sigma**2 / 4, lr / sigma**2 * (2 * friction + lr * noise / heat)
    u = s - math.sqrt(s**2 - q)
    return u * sigma**2 / lr, heat / lam * (1 - u / 2)


@pytest.mark.parametrize("noise", [0.0, 2.0])
@pytest.mark.parametrize("sigma", [1.0, 1.3])
def test_sgnht_holds_its_temperature_under_gradient_noise(sigma, noise):
    lr, heat, friction, lam = 0.1, 0.5, 1.0, 1.5
    state = run(sgnht.build(Gaussian(lam, noise), lr, heat, friction, sigma), {THETA: torch.zeros(N)}, 600)
    xi, variance = thermostat_law(lr, heat, friction, sigma, lam, noise)
    assert_mean(state.momenta[THETA].square(), heat * sigma**2)
    assert_mean(state.params[THETA].square(), variance)
    assert state.xi.item() == pytest.approx(xi, abs=6 * math.sqrt(heat / N))  # var ξ = T/d
    # SGHMC with the same settings runs hot:
    hot = run(sghmc.build(Gaussian(lam, noise), lr, heat, friction, sigma), {THETA: torch.zeros(N)}, 300)
    if noise:
        assert kinetic_temperature(hot.momenta, sigma).item() > 1.15 * heat
        assert kinetic_temperature(state.momenta, sigma).item() == pytest.approx(heat, rel=0.05)


@pytest.mark.parametrize(("build", "friction"), [(sgld.build, {}), (sghmc.build, {"friction": 0.8})])
def test_beta_allows_for_known_gradient_noise(build, friction):
    lam, heat, lr, noise = 1.5, 0.7, 0.2, 2.0
    with_noise, _ = settled(build(Gaussian(lam, noise), lr, heat, beta=noise / heat**2, **friction), 300)
    if friction:
        c = 1 - lr * 0.8
        expected = heat / lam * (1 + c) / (1 + c - lr**2 * lam / 2)
    else:
        expected = heat / (lam * (1 - lr * lam / 2))
    assert_mean(with_noise.square(), expected)


def test_sgnht_with_beta_returns_to_the_friction_of_no_gradient_noise():
    lam, heat, lr, noise = 1.5, 0.5, 0.1, 2.0
    transform = sgnht.build(Gaussian(lam, noise), lr, heat, beta=noise / heat**2)
    state = run(transform, {THETA: torch.zeros(N)}, 600)
    xi, _ = thermostat_law(lr, heat, 1.0, 1.0, lam, 0.0)
    assert state.xi.item() == pytest.approx(xi, abs=6 * math.sqrt(heat / N))


def test_step_size_biases_euler_but_not_baoa():
    def variance(build, lr, **more):
        theta, _ = settled(build(Gaussian(2.0), lr, 0.7, **more), 500)
        return theta.square().mean().item()

    error = 6 * math.sqrt(2 / N)  # of a variance, relative
    for lr in (0.05, 0.25, 0.5):
        assert variance(baoab.build, lr) == pytest.approx(0.35, rel=error)
    assert variance(sghmc.build, 0.5) > 0.35 * (1 + 2 * error)
    assert variance(sghmc.build, 0.05, scheme="explicit") > 0.35 * (1 + 2 * error)
    assert variance(sgld.build, 0.25) > 0.35 * (1 + 2 * error)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in {"psgld", "psgld frozen", "sgnht"}])
def test_half_the_temperature_is_half_the_variance(name):
    # The chain is linear: with the same noise the path shrinks by √2.
    ends = []
    for heat in (0.3, 0.15):
        torch.manual_seed(3)
        ends.append(run(SAMPLERS[name](Gaussian(), 0.1, heat), {THETA: torch.zeros(50).double()}, 30).params[THETA])
    torch.testing.assert_close(ends[0] / math.sqrt(2), ends[1])


# Posteriors


@pytest.mark.parametrize(("data", "chains"), [(10, 4000), (1000, 400)])
@pytest.mark.parametrize("name", ["sghmc", "baoa"])
def test_temperature_one_over_n_is_the_posterior_of_a_gaussian_mean(name, data, chains):
    x = torch.randn(data) + 2

    def joint(params, batch):
        mean = params["mean"]
        likelihood = -(batch[:, None] - mean).square().mean(0) / 2
        return (likelihood - mean.square() / 2 / data).sum(), mean.detach()

    state = run(SAMPLERS[name](joint, 0.2, 1 / data), {"mean": torch.zeros(chains)}, 150, batch=x)
    draws, exact = state.params["mean"], x.sum() / (data + 1)
    assert_mean(draws, exact)
    assert_mean((draws - exact).square(), 1 / (data + 1))


class Regressions:
    """Bayesian linear regression, one data set per row: y = X θ + ε, θ ~ N(0, I), ε ~ N(0, I)."""

    def __init__(self, rows, data=20, weights=3):
        self.x = torch.randn(data, weights, generator=torch.Generator().manual_seed(1))
        self.truth = torch.randn(rows, weights)
        self.y = self.truth @ self.x.T + torch.randn(rows, data)
        self.data = data

    def value_and_grad(self, params, batch):
        theta = params[THETA]
        error = self.y - theta @ self.x.T
        value = -error.square().mean(-1) / 2 - theta.square().sum(-1) / (2 * self.data)
        return value, torch.zeros(()), {THETA: error @ self.x / self.data - theta / self.data}


@pytest.mark.parametrize(
    ("build", "lr", "apart"), [(sghmc.build, 0.1, 120), (baoab.build, 0.3, 40), (sgnht.build, 0.04, 300)]
)
def test_simulation_based_calibration(build, lr, apart):
    # θ from the prior, y from θ: the rank of θ among posterior draws is uniform (Talts et al., 2018).
    problem, kept = Regressions(rows=3000), 9
    transform = build(problem, lr, 1 / problem.data)
    state = run(transform, {THETA: torch.zeros_like(problem.truth)}, 2 * apart)
    below = torch.zeros_like(problem.truth)
    for _ in range(kept):
        for _ in range(apart):
            state, _ = transform.update(state, None, inplace=True)
        below += state.params[THETA] < problem.truth
    for ranks in below.T:
        counts = torch.bincount(ranks.long(), minlength=kept + 1)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-6 / 3, counts


# Limits


def descend(optimizer, leaves, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        (-quartic(leaves, None)[0]).backward()
        optimizer.step()
    return {k: v.detach() for k, v in leaves.items()}


@pytest.mark.parametrize("inplace", [False, True])
def test_sgld_at_temperature_zero_is_gradient_ascent(inplace):
    leaves = {k: v.requires_grad_() for k, v in start().items()}
    expected = descend(torch.optim.SGD(leaves.values(), lr=0.03), leaves, 50)
    state = run(sgld.build(quartic, 0.03, 0), start(), 50, inplace)
    torch.testing.assert_close(state.params, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dampening", [0.0, 0.4])
def test_sghmc_at_temperature_zero_is_sgd_with_momentum(dampening, inplace):
    rate, momentum = 0.03, 0.9
    leaves = {k: v.requires_grad_() for k, v in start().items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=rate, momentum=momentum, dampening=dampening)
    for leaf in leaves.values():  # torch would not dampen its first step
        optimizer.state[leaf]["momentum_buffer"] = torch.zeros_like(leaf)
    expected = descend(optimizer, leaves, 50)
    transform = sghmc.build(
        quartic, 1 - dampening, 0.0, friction=(1 - momentum) / rate, sigma=math.sqrt((1 - dampening) / rate)
    )
    torch.testing.assert_close(run(transform, start(), 50, inplace).params, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("inplace", [False, True])
def test_psgld_at_temperature_zero_is_rmsprop(inplace):
    leaves = {k: v.requires_grad_() for k, v in start().items()}
    expected = descend(torch.optim.RMSprop(leaves.values(), lr=0.01, alpha=0.95, eps=1e-3), leaves, 50)
    state = run(psgld.build(quartic, 0.01, 0.0, decay=0.95, eps=1e-3), start(), 50, inplace)
    torch.testing.assert_close(state.params, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["sgld", "psgld", "sghmc", "baoa"])
def test_temperature_zero_draws_nothing(name):
    before = torch.get_rng_state()
    run(SAMPLERS[name](quartic, 0.01, 0.0), start(), 3)
    assert torch.equal(torch.get_rng_state(), before)


@both_settings
def test_frozen_psgld_is_sgld_in_rescaled_coordinates(scheduled):
    lr, heat = settings(scheduled)
    transform = psgld.build(quartic, lr, heat, freeze=10)
    state = run(transform, {"a": start()["a"]}, 10)
    root = (1e-5 + state.square["a"].sqrt()).rsqrt()
    other = sgld.build(lambda params, batch: quartic({"a": params["a"] * root}, batch), lr, heat)
    twin = other.init({"a": state.params["a"] / root})._replace(step=state.step.clone())
    square = state.square["a"].clone()
    for step in range(10):
        torch.manual_seed(step)
        state, _ = transform.update(state, None)
        torch.manual_seed(step)
        twin, _ = other.update(twin, None)
    torch.testing.assert_close(state.params["a"], twin.params["a"] * root)
    assert torch.equal(state.square["a"], square)


@pytest.mark.parametrize(("freeze", "adapts"), [(None, [True] * 6), (4, [True] * 4 + [False] * 2)])
def test_psgld_adapts_for_as_many_steps_as_asked(freeze, adapts):
    transform, seen = psgld.build(quartic, 0.01, 0.1, freeze=freeze), []
    state = transform.init(start())
    for _ in range(6):
        before = state.square["a"]
        state, _ = transform.update(state, None)
        seen.append(not torch.equal(state.square["a"], before))
    assert seen == adapts


def test_baoab_has_the_path_of_baoa_with_its_momentum_half_a_kick_later():
    lr = 0.1
    one, two = baoab.build(quartic, lr, 0.2), baoab.build(quartic, lr, 0.2, order="baoab")

    def gradient(params):
        return torch.func.grad(lambda p: quartic(p, None)[0])(params)

    a, b = one.init(start()), two.init(start())
    b = b._replace(gradient=gradient(start()), momenta={k: lr / 2 * g for k, g in gradient(start()).items()})
    for step in range(20):
        torch.manual_seed(step)
        a, _ = one.update(a, None)
        torch.manual_seed(step)
        b, _ = two.update(b, None)
        torch.testing.assert_close(a.params, b.params)
        torch.testing.assert_close({k: m + lr / 2 * gradient(a.params)[k] for k, m in a.momenta.items()}, b.momenta)
    torch.testing.assert_close(b.log_joint, quartic(b.params, None)[0])


def test_thermostat_averages_over_all_weights_of_a_member():
    state = run(sgnht.build(quartic, 0.1, 0.5), start(), 1)
    mean = torch.cat([m.flatten() for m in state.momenta.values()]).square().mean()
    torch.testing.assert_close(state.xi, 1 + 0.1 * (mean - 0.5))


# The contract, for every sampler


@every_sampler
@both_settings
def test_in_place_is_the_pure_update_in_the_old_memory(build, scheduled):
    transform = build(quartic, *settings(scheduled))
    pure, own = transform.init(start()), transform.init(start())
    memory = {t.data_ptr() for t in tensors(own._replace(log_joint=own.step))}
    for step in range(12):
        torch.manual_seed(step)
        pure, _ = transform.update(pure, None)
        torch.manual_seed(step)
        own, _ = transform.update(own, None, inplace=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors(pure), tensors(own), strict=True))
    assert {t.data_ptr() for t in tensors(own._replace(log_joint=own.step))} == memory
    assert own.step.item() == 12


@every_sampler
def test_a_constant_schedule_is_a_number(build):
    ends = []
    for lr, heat in [(0.02, 0.1), (schedules.constant(0.02), schedules.constant(0.1))]:
        torch.manual_seed(7)
        ends.append(run(build(quartic, lr, heat), start(), 12).params)
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)


@every_sampler
def test_pure_update_leaves_the_old_state(build):
    transform = build(quartic, 0.02, 0.1)
    old = run(transform, start(), 2)
    copies = [t.clone() for t in tensors(old)]
    new, _ = transform.update(old, None)
    assert all(torch.equal(a, b) for a, b in zip(tensors(old), copies, strict=True))
    assert not torch.equal(new.params["a"], old.params["a"])


@every_sampler
@both_settings
def test_rows_of_a_matrix_are_members_of_their_own(build, scheduled):
    theta = torch.randn(3, 20, dtype=torch.float64) * torch.tensor([[0.1], [1.0], [2.0]])
    together, alone = build(QuarticRows(), *settings(scheduled)), build(quartic, *settings(scheduled))
    with drawing_from([torch.Generator().manual_seed(i) for i in range(3)]):
        state = run(together, {THETA: theta.clone()}, 15)
    for i, row in enumerate(theta):
        with drawing_from([torch.Generator().manual_seed(i)]):
            single = run(alone, {THETA: row.clone()}, 15, inplace=False)
        torch.testing.assert_close(state.params[THETA][i], single.params[THETA])
        torch.testing.assert_close(state.log_joint[i], single.log_joint)
    assert is_matrix(state.params)
    assert state.log_joint.shape == together.init({THETA: theta}).log_joint.shape == (3,)


@every_sampler
@both_settings
def test_update_can_be_vmapped(build, scheduled):
    lr, heat = settings(scheduled)

    def after(transform, params):
        states = torch.vmap(transform.init)(params)
        for _ in range(12):
            states, outputs = torch.vmap(transform.update, in_dims=(0, None), randomness="different")(states, None)
        assert outputs.shape == (3,)
        return states.params

    many = {k: torch.stack([v, v + 1, v - 1]) for k, v in start().items()}
    cold = build(quartic, lr, lambda step: 0 * step)
    single = run(cold, {k: v + 1 for k, v in start().items()}, 12).params
    torch.testing.assert_close({k: v[1] for k, v in after(cold, many).items()}, single)
    same = {k: torch.stack([v, v, v]) for k, v in start().items()}
    ends = after(build(quartic, lr, heat), same)["a"]
    assert not torch.equal(ends[0], ends[1])  # noise of their own


@pytest.mark.parametrize("name", ["sgld", "sghmc", "baoa"])
def test_many_chains_by_vmap_have_the_law(name):
    def joint(params, batch):
        return -(params["a"].square().sum() + params["b"].square().sum()) / 2, torch.zeros(())

    transform, lr, heat = SAMPLERS[name](joint, 0.3, 0.5), 0.3, 0.5
    states = torch.vmap(transform.init)({"a": torch.zeros(4000, 2), "b": torch.zeros(4000)})
    step = torch.vmap(transform.update, in_dims=(0, None), randomness="different")
    for _ in range(100):
        states, _ = step(states, None)
    bias = {"sgld": 1 / (1 - lr / 2), "sghmc": 1.7 / (1.7 - lr**2 / 2), "baoa": 1.0}[name]
    draws = torch.cat([states.params["a"], states.params["b"][:, None]], 1)
    assert_mean(draws.square(), torch.full((3,), heat * bias))


@every_sampler
def test_the_training_loop_drives_it(build):
    data, likelihood, torch_model = blobs(40), Categorical(), Mlp()

    def trained(members):
        flat = shell_of(torch_model)
        transform = build(Objective(flat, likelihood, len(data)), 0.05, 1 / len(data))
        theta = flat.theta.clone() if len(members) == 1 else flat.theta.expand(len(members), -1).clone()
        training = Training(epochs=4, batch_size=10)
        return train(job_of(flat, transform, theta, data, training, members))

    one = trained((1,))
    torch.testing.assert_close(one.theta[0], trained((0, 1)).theta[1], rtol=1e-3, atol=1e-4)
    assert all(math.isfinite(epoch["log_joint"][0]) for epoch in one.history)


# Schedules


def test_cyclical_rate_starts_high_ends_low_and_comes_back():
    steps = torch.arange(1.0, 41.0)
    rate = schedules.cyclical_lr(0.5, cycles=4, steps=40)(steps)
    assert torch.equal(rate.view(4, 10)[0], rate.view(4, 10)[3])
    torch.testing.assert_close(rate[::10], torch.full((4,), 0.5))  # the four maxima
    torch.testing.assert_close(rate[5], torch.tensor(0.25))
    torch.testing.assert_close(rate[9], torch.tensor(0.25 * (1 + math.cos(0.9 * math.pi))))
    assert (rate.view(4, 10).diff(dim=1) < 0).all()
    assert (rate > 0).all()


def test_cycles_that_do_not_divide_the_steps_have_the_length_rounded_up():
    position = schedules.cycle_position(cycles=3, steps=10)(torch.arange(1.0, 11.0))
    torch.testing.assert_close(position, torch.tensor([0.0, 1, 2, 3, 0, 1, 2, 3, 0, 1]) / 4)


def test_cyclical_temperature_is_zero_then_full():
    heat = schedules.cyclical_temperature(0.01, cycles=2, steps=20, exploration=0.7)(torch.arange(1.0, 21.0))
    torch.testing.assert_close(heat.view(2, 10), torch.tensor([[0.0] * 7 + [0.01] * 3] * 2))


def test_chains_explore_without_noise_and_sample_with_it():
    lr, heat = schedules.cyclical_lr(0.05, 2, 20), schedules.cyclical_temperature(0.1, 2, 20, 0.5)
    transform, paths = sghmc.build(quartic, lr, heat), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state, path = transform.init(start()), []
        for _ in range(10):
            state, _ = transform.update(state, None)
            path.append(state.params["a"])
        paths.append(path)
    same = [torch.equal(a, b) for a, b in zip(*paths, strict=True)]
    assert same == [True] * 5 + [False] * 5


# Errors


@pytest.mark.parametrize("build", [sgld.build, psgld.build, sghmc.build, sgnht.build, baoab.build])
def test_settings_are_checked(build):
    with pytest.raises(ValueError, match="lr must be positive and finite; got 0"):
        build(quartic, 0, 0.1)
    with pytest.raises(ValueError, match="lr must be positive and finite; got nan"):
        build(quartic, math.nan, 0.1)
    with pytest.raises(ValueError, match="temperature must be at least 0 and finite; got -0.1"):
        build(quartic, 0.1, -0.1)
    arguments = inspect.signature(build).parameters
    if "friction" in arguments:
        with pytest.raises(ValueError, match="friction must be positive and finite; got -1"):
            build(quartic, 0.1, 0.1, friction=-1)
        with pytest.raises(ValueError, match="sigma must be positive and finite; got 0"):
            build(quartic, 0.1, 0.1, sigma=0)
    if "beta" in arguments:
        with pytest.raises(ValueError, match="beta must be at least 0 and finite; got -1"):
            build(quartic, 0.1, 0.1, beta=-1)
        with pytest.raises(ValueError, match=r"beta must be at most 2 friction / \(temperature lr\) = 200; got 300"):
            build(quartic, 0.1, 0.1, beta=300)


def test_particular_settings_are_checked():
    with pytest.raises(ValueError, match="decay must be in \\[0, 1\\); got 1"):
        psgld.build(quartic, 0.1, 0.1, decay=1)
    with pytest.raises(ValueError, match="eps must be positive; got 0"):
        psgld.build(quartic, 0.1, 0.1, eps=0)
    with pytest.raises(ValueError, match="freeze must be at least 1 step, or None to adapt for ever; got 0"):
        psgld.build(quartic, 0.1, 0.1, freeze=0)
    with pytest.raises(ValueError, match="temperature must be positive: .* got 0"):
        sgnht.build(quartic, 0.1, 0.0)
    with pytest.raises(ValueError, match="unknown scheme 'explicitly'. Did you mean 'explicit'?"):
        sghmc.build(quartic, 0.1, 0.1, scheme="explicitly")
    with pytest.raises(ValueError, match="unknown order 'abobo'"):
        baoab.build(quartic, 0.1, 0.1, order="abobo")
    with pytest.raises(ValueError, match="cycles must be at least 1 and at most steps; got cycles=0, steps=10"):
        schedules.cyclical_lr(0.1, 0, 10)
    with pytest.raises(ValueError, match="exploration must be in \\[0, 1\\); got 1"):
        schedules.cyclical_temperature(0.1, 2, 10, 1)


def test_scheduled_gradient_noise_beyond_the_bath_adds_nothing():
    transform = sgld.build(quartic, lambda step: 0.1 * step / step, 0.1, beta=300)
    still = run(sgld.build(quartic, 0.1, 0.0), start(), 1)
    torch.testing.assert_close(run(transform, start(), 1).params, still.params)


@pytest.mark.parametrize("scheme", ["semi-implicit", "explicit"])
@pytest.mark.parametrize("inplace", [True, False], ids=["in place", "pure"])
def test_sghmc_with_a_scale_is_the_chain_of_scaled_weights(scheme, inplace):
    scale = {"a": torch.rand(2, 3, dtype=torch.float64) + 0.2, "b": torch.tensor([3.0], dtype=torch.float64)}
    scaled = sghmc.build(quartic, 0.05, 0.1, scheme=scheme, scale=scale)
    round_ = sghmc.build(
        lambda phi, batch: quartic({k: p * scale[k] for k, p in phi.items()}, batch), 0.05, 0.1, scheme=scheme
    )
    with drawing_from(torch.Generator().manual_seed(0)):
        ours = run(scaled, start(), 30, inplace)
    with drawing_from(torch.Generator().manual_seed(0)):
        theirs = run(round_, {k: p / scale[k] for k, p in start().items()}, 30, inplace)
    torch.testing.assert_close(ours.params, {k: p * scale[k] for k, p in theirs.params.items()})
    with pytest.raises(ValueError, match="scale must be positive; got -1.0"):
        sghmc.build(quartic, 0.05, 0.1, scale={"a": torch.tensor([-1.0])})
