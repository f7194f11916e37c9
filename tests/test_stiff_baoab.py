"""Langevin dynamics with stiff friction and variance reduced gradients, against exact laws and slow twins."""

import math

import pytest
import torch
from scipy import linalg

from bayesformer.core.draws import drawing_from
from bayesformer.core.types import Batch
from bayesformer.core.vectors import THETA
from bayesformer.inference import baoab, stiff_baoab, svrg
from bayesformer.inference.stiff_baoab import StiffSettings
from bayesformer.inference.stiff_friction import StiffDirections, relax, stiff_directions

make = {"dtype": torch.float64}
NONE = Batch(torch.zeros(1), torch.zeros(1))


class Quadratic:
    """U = -½ θᵀ Λ θ over N = 1 example, with scores that are given and curvature that is Λ or a bound of it."""

    num_data = 1

    def __init__(self, precision, scores=None, largest=None):
        self.precision, self.given, self.largest = precision, scores, largest

    def value_and_grad(self, params, batch):
        theta = params[THETA]
        force = -self.precision @ theta
        return 0.5 * theta @ force, torch.zeros(1), {THETA: force}

    def over_all(self, params):
        value, _, gradient = self.value_and_grad(params, None)
        return value, gradient

    def curvature_times(self, params, batch, vector):
        return self.precision @ vector if self.largest is None else self.largest * vector

    def scores(self, params, batch, count):
        return torch.zeros(1, len(self.precision), **make) if self.given is None else self.given.clone()


class Regression:
    """Linear regression with unit noise and a unit prior: minibatches, and an exact Gaussian posterior."""

    def __init__(self, count=400, size=12, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, size, generator=g, **make) * torch.logspace(0, 0.7, size, **make)
        self.y = self.x @ torch.randn(size, generator=g, **make) + torch.randn(count, generator=g, **make)
        self.num_data, self.generator = count, g
        self.precision = self.x.mT @ self.x + torch.eye(size, **make)
        self.mean = torch.linalg.solve(self.precision, self.x.mT @ self.y)

    def value_and_grad(self, params, batch):
        x, y, theta = batch.inputs, batch.targets, params[THETA]
        away = y - x @ theta
        value = -0.5 * away.square().mean() - 0.5 * theta @ theta / self.num_data
        return value, away, {THETA: x.mT @ away / len(x) - theta / self.num_data}

    def over_all(self, params):
        value, _, gradient = self.value_and_grad(params, Batch(self.x, self.y))
        return value, gradient

    def curvature_times(self, params, batch, vector):
        return batch.inputs.mT @ (batch.inputs @ vector) / len(batch.inputs) + vector / self.num_data

    def scores(self, params, batch, count):
        rows = self.x[torch.randint(self.num_data, (count,), generator=self.generator)]
        return rows * torch.randn(count, 1, generator=self.generator, **make)

    def batches(self, size):
        while True:
            order = torch.randperm(self.num_data, generator=self.generator)
            for index in order.split(size):
                yield Batch(self.x[index], self.y[index])


def stiff_of(rows, curvature):
    return StiffDirections(rows, torch.tensor(curvature, **make))


def dense_friction(stiff, friction):
    """Γ as a matrix."""
    gamma = friction * torch.eye(stiff.rows.shape[1], **make)
    for u, value in zip(*stiff, strict=True):
        if value > 1:
            gamma += (max(friction, 2 * math.sqrt(value)) - friction) * torch.outer(u, u)
    return gamma


def test_relaxation_is_that_of_the_dense_friction_matrix():
    rows = torch.linalg.qr(torch.randn(7, 4, **make)).Q.mT
    stiff, friction, time = stiff_of(rows, [90.0, 5.0, 1.5, 0.8]), 0.3, 0.11
    p, z = torch.randn(7, **make), torch.randn(7, **make)
    decay = linalg.expm(-time * dense_friction(stiff, friction).numpy())
    spread = linalg.sqrtm((torch.eye(7, **make) - torch.from_numpy(decay @ decay)).numpy()).real
    expected = torch.from_numpy(decay) @ p + torch.from_numpy(spread) @ z
    before = p.clone()
    along = relax(p, z, stiff, friction, time)
    torch.testing.assert_close(p, expected)
    torch.testing.assert_close(along[:, 0], rows @ before)
    torch.testing.assert_close(along[:3, 1], (rows @ p)[:3])


def test_stiff_directions_are_the_eigenvectors_of_the_scores():
    scores = torch.randn(5, 30, **make) * torch.tensor([1e3, 1e2, 10.0, 3.0, 0.01], **make)[:, None]
    rows, curvature = stiff_directions(scores)
    used = curvature > 1
    assert used.sum() == 4
    torch.testing.assert_close(rows[used] @ rows[used].mT, torch.eye(4, **make))
    whole = scores.mT @ scores
    torch.testing.assert_close(whole @ rows[used].mT, rows[used].mT * curvature[used], rtol=1e-6, atol=1e-4)


def test_stiff_directions_are_orthonormal_in_single_precision():
    scores = torch.randn(50, 400) * torch.logspace(3, 0, 50)[:, None]
    rows, curvature = stiff_directions(scores)
    rows = rows[curvature > 1]
    assert (rows @ rows.mT - torch.eye(len(rows))).abs().max() < 2e-3


def stationary(precision, scores, scale, h, friction):
    """Stationary covariance of (θ, p), from the linear map that one step is: its matrix, and that of its noise."""
    size, noise = len(precision), []
    joint = Quadratic(precision, scores, largest=1.0)
    transform = stiff_baoab.build(joint, scale, StiffSettings(1.0, 1.0, friction, rows=len(scores), every=10**6))
    start = transform.init({THETA: torch.zeros(size, **make)})
    start.stiff.rows.copy_(stiff_directions(scores * scale / math.sqrt(len(scores))).rows)
    start.stiff.curvature.copy_(stiff_directions(scores * scale / math.sqrt(len(scores))).curvature)
    start.control.largest.fill_(h**-2)
    start.step.fill_(1)

    def one(theta, p, z):
        noise.append(z)
        state = stiff_baoab.copied(start)
        state.params[THETA].copy_(theta)
        state.momenta[THETA].copy_(p)
        state, _ = transform.update(state, NONE)
        return torch.cat([state.params[THETA], state.momenta[THETA]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stiff_baoab, "normal_like", lambda _: noise[-1])
        zero, eye = torch.zeros(size, **make), torch.eye(size, **make)
        moved = [one(e, zero, zero) for e in eye] + [one(zero, e, zero) for e in eye]
        noisy = [one(zero, zero, e) for e in eye]
    step, spread = torch.stack(moved, 1).numpy(), torch.stack(noisy, 1).numpy()
    return torch.from_numpy(linalg.solve_discrete_lyapunov(step, spread @ spread.T))


@pytest.mark.parametrize("friction", [0.05, 3.0])
def test_a_gaussian_is_sampled_exactly_whatever_the_friction(friction):
    root = torch.randn(4, 4, **make)
    precision = root @ root.mT + torch.eye(4, **make)
    scores, scale = 3 * torch.randn(3, 4, **make), torch.rand(4, **make) + 0.5
    h = 1.5 / math.sqrt(torch.linalg.eigvalsh(scale * precision * scale[:, None]).max())
    covariance = stationary(precision, scores, scale, h, friction)
    torch.testing.assert_close(covariance[:4, :4], torch.linalg.inv(precision))
    torch.testing.assert_close(covariance[4:, 4:], torch.eye(4, **make))


def test_without_stiff_directions_and_with_all_data_it_is_baoa():
    precision, temperature, h = torch.diag(torch.tensor([4.0, 1.0, 0.5], **make)), 0.2, 0.3
    joint = Quadratic(precision, largest=temperature / h**2 / temperature)
    scale = torch.full((3,), math.sqrt(temperature), **make)
    ours = stiff_baoab.build(joint, scale, StiffSettings(temperature, 1.0, 0.7, rows=1))
    plain = baoab.build(joint, h, temperature, 0.7)
    theta, p = torch.tensor([1.0, -2.0, 0.3], **make), torch.tensor([0.1, 0.2, -1.0], **make)
    a, b = ours.init({THETA: theta}), plain.init({THETA: theta.clone()})
    with drawing_from(torch.Generator().manual_seed(1)):
        a, _ = ours.update(a, NONE)  # draws momenta and looks at the curvature
    a.params[THETA].copy_(theta)
    a.momenta[THETA].copy_(p / math.sqrt(temperature))
    b = b._replace(momenta={THETA: p.clone()})
    for _ in range(25):
        with drawing_from(torch.Generator().manual_seed(2)):
            a, _ = ours.update(a, NONE, inplace=True)
        with drawing_from(torch.Generator().manual_seed(2)):
            b, _ = plain.update(b, NONE)
    torch.testing.assert_close(a.params[THETA], b.params[THETA])
    torch.testing.assert_close(a.momenta[THETA] * math.sqrt(temperature), b.momenta[THETA])


def test_variance_reduced_gradients_are_right_on_average_and_exact_at_the_snapshot():
    joint = Regression(60, 4)
    snapshot = svrg.blank_snapshot({THETA: torch.zeros(4, **make)})
    assert svrg.is_due(snapshot, 3)
    then, now = {THETA: torch.randn(4, **make)}, {THETA: torch.randn(4, **make)}
    _, gradient = svrg.take(joint, then, snapshot)
    torch.testing.assert_close(gradient, joint.over_all(then)[1][THETA])
    parts = [Batch(joint.x[i : i + 20], joint.y[i : i + 20]) for i in range(0, 60, 20)]
    torch.testing.assert_close(svrg.estimate(joint, then, parts[0], snapshot)[2], gradient)
    found = [svrg.estimate(joint, now, part, snapshot) for part in parts]
    exact_value, exact = joint.over_all(now)
    torch.testing.assert_close(torch.stack([f[2] for f in found]).mean(0), exact[THETA])
    torch.testing.assert_close(torch.stack([f[0] for f in found]).mean(0), exact_value)
    assert int(snapshot.age) == 5
    assert svrg.is_due(snapshot, 5)
    assert not svrg.is_due(snapshot, 6)


def chain(joint, size, steps, settings, seed=0):
    """Weights along a chain with reshuffled batches, and its last state."""
    transform = stiff_baoab.build(joint, torch.ones(len(joint.mean), **make), settings)
    state, batches, kept = transform.init({THETA: joint.mean}), joint.batches(size), []
    with drawing_from(torch.Generator().manual_seed(seed)):
        for _ in range(steps):
            state, _ = transform.update(state, next(batches), inplace=True)
            kept.append(state.params[THETA].clone())
    return torch.stack(kept), state


def test_batches_leave_the_posterior_and_the_temperature_as_they_are():
    joint = Regression(size=6)
    theta, state = chain(joint, 40, 6000, StiffSettings(1 / 400, 10.0, rows=32, burn_in=200))
    whitened = (theta[200:] - joint.mean) @ torch.linalg.cholesky(joint.precision)
    assert 0.95 < float(state.measured.kinetic / state.measured.steps) < 1.1
    assert 0.9 < whitened.var(0).mean().sqrt() < 1.1
    assert whitened.mean(0).square().mean().sqrt() < 0.35
    exact = float(torch.linalg.eigvalsh(joint.precision).max())
    assert exact < float(state.control.largest) < 3 * exact


def test_without_stiff_friction_batches_heat_and_the_control_sees_it():
    class Blind(Regression):
        def scores(self, params, batch, count):
            return torch.zeros(1, len(self.mean), **make)

    _, state = chain(Blind(), 5, 2000, StiffSettings(1 / 400, 20.0, friction=0.01, burn_in=200))
    assert float(state.measured.kinetic / state.measured.steps) > 1.15
    assert float(state.control.period) < 10  # it starts at half of the longest
    _, state = chain(Regression(size=6), 200, 1500, StiffSettings(1 / 400, 12.0, rows=32))
    assert float(state.control.period) > 7  # it starts at 6


def test_a_step_that_is_too_long_is_followed_by_a_shorter_one_and_the_chain_stays_finite():
    """The curvature grows a thousandfold after the first look, as that of a network may on its way from the mode."""

    class Growing(Regression):
        def curvature_times(self, params, batch, vector):
            return super().curvature_times(params, batch, vector) / 1000

        def scores(self, params, batch, count):
            return torch.zeros(1, len(self.mean), **make)

    theta, state = chain(Growing(size=6), 40, 2000, StiffSettings(1 / 400, 10.0, burn_in=500))
    assert float(state.measured.kinetic / state.measured.steps) < 2
    precision = Growing(size=6).precision
    exact = float(torch.linalg.eigvalsh(precision).max())
    assert exact / 8 < float(state.control.largest) < 16 * exact  # a step that is far too short stands still
    spread = theta[500:].std(0) / precision.inverse().diagonal().sqrt()
    assert 0.5 < float(spread.median()) < 2


def test_pure_and_in_place_steps_agree_and_pure_steps_keep_the_state():
    joint = Regression(40, 3)
    transform = stiff_baoab.build(joint, torch.ones(3, **make), StiffSettings(1 / 40, 6.0, rows=5, every=2))
    batches = joint.batches(8)
    parts = [next(batches) for _ in range(9)]
    ends = []
    for inplace in (False, True):
        joint.generator.manual_seed(5)
        state = transform.init({THETA: torch.ones(3, **make)})
        with drawing_from(torch.Generator().manual_seed(4)):
            for part in parts:
                before = stiff_baoab.copied(state)
                after, _ = transform.update(state, part, inplace=inplace)
                if not inplace:
                    torch.testing.assert_close(state, before, equal_nan=True, rtol=0, atol=0)
                state = after
        ends.append(state)
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="temperature must be positive and finite; got 0"):
        StiffSettings(0, 10)
    with pytest.raises(ValueError, match="rows must be at least 1; got 0"):
        StiffSettings(1, 10, rows=0)
    with pytest.raises(ValueError, match="decay must be at least 0 and below 1; got 1"):
        StiffSettings(1, 10, decay=1)
    joint = Quadratic(torch.eye(2, **make))
    with pytest.raises(ValueError, match="scale must be positive; got 0.0"):
        stiff_baoab.build(joint, torch.tensor([1.0, 0.0]), StiffSettings(1, 10))
    with pytest.raises(ValueError, match=r"params must be one vector .* got \{'theta': \(2, 3\)\}"):
        stiff_baoab.build(joint, torch.ones(3), StiffSettings(1, 10)).init({THETA: torch.zeros(2, 3)})


@pytest.mark.parametrize("curvature", [1e6, math.inf])
def test_steps_far_too_long_for_a_curvature_that_was_not_seen_are_undone(curvature):
    """The products say 1: at h = 1 the first step would end 10⁶ times as far out as it began, or nowhere."""
    blind = Quadratic(torch.full((200,), curvature, **make).diag(), largest=1.0)
    blind.value_and_grad = lambda params, batch: (torch.zeros((), **make), None, {THETA: -curvature * params[THETA]})
    transform = stiff_baoab.build(blind, torch.ones(200, **make), StiffSettings(temperature=1.0, longest=1))
    state = transform.init({THETA: torch.full((200,), 0.01, **make)})
    for _ in range(60):
        state = transform.update(state, NONE)[0]
        assert float(state.params[THETA].abs().max()) < 10
