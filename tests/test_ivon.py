"""IVON on quadratics, where its curvature, variance and mean are known, and step by step against its equations."""

import math

import pytest
import torch

from bayesformer.core.draws import drawing_from
from bayesformer.core.vectors import THETA
from bayesformer.data import Data, as_batches
from bayesformer.inference import ivon, schedules
from bayesformer.likelihoods import Gaussian
from bayesformer.train.checkpoint import pack_state, unpack_state
from bayesformer.train.loop import score
from bayesformer.train.objective import Objective
from tests.laws import assert_mean
from tests.nets import Mlp, shell_of

CURVATURE = torch.tensor([3.0, 0.5, 10.0], dtype=torch.float64)
CENTRE = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


class Quadratic:
    """log_joint = -½ Σ c (θ-a)², on one vector or on rows."""

    def __init__(self, curvature=CURVATURE, centre=CENTRE):
        self.curvature, self.centre = curvature, centre

    def __call__(self, params, batch):
        gap = params[THETA] - self.centre
        return -0.5 * (self.curvature * gap.square()).sum(), gap

    def value_and_grad(self, params, batch):
        gap = params[THETA] - self.centre
        return -0.5 * (self.curvature * gap.square()).sum(-1), gap, {THETA: -self.curvature * gap}


class Constant:
    """A gradient that does not care where it is taken."""

    def __init__(self, grad):
        self.grad = grad

    def value_and_grad(self, params, batch):
        return torch.zeros(()), torch.zeros(()), {k: self.grad.expand_as(p).clone() for k, p in params.items()}


def start(*shape):
    return {THETA: torch.zeros(*shape, dtype=torch.float64)}


def run(transform, state, steps, batch=None, inplace=True):
    for _ in range(steps):
        state, _ = transform.update(state, batch, inplace=inplace)
    return state


def test_three_steps_by_hand():
    lr, ess, delta, h0, b1, b2 = 0.1, 50.0, 0.2, 0.7, 0.8, 0.95
    noise = torch.randn(3, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    m, g, h = torch.zeros(3).double(), torch.zeros(3).double(), torch.full((3,), h0).double()
    for t in range(1, 4):
        sigma = 1 / (ess * (h + delta)).sqrt()
        theta = m + sigma * noise[t - 1]  # (2, P), two draws
        grads = CURVATURE * (theta - CENTRE)
        g_hat, h_hat = grads.mean(0), (grads * (theta - m) / sigma**2).mean(0)
        g = b1 * g + (1 - b1) * g_hat
        h = b2 * h + (1 - b2) * h_hat + 0.5 * (1 - b2) ** 2 * (h - h_hat) ** 2 / (h + delta)
        m = m - lr * (h0 + delta) * (g / (1 - b1**t) + delta * m) / (h + delta)
    transform = ivon.build(Quadratic(), lr, ess, weight_decay=delta, h0=h0, betas=(b1, b2), draws=2)
    for inplace in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            turn = iter(noise.reshape(6, 3))
            patch.setattr(ivon, "normal_like", lambda tensor, turn=turn: next(turn))
            state = run(transform, transform.init(start(3)), 3, inplace=inplace)
        torch.testing.assert_close(state.params[THETA], m)
        torch.testing.assert_close(state.hessian[THETA], h)
        torch.testing.assert_close(state.momentum[THETA], -g)  # kept uphill
        assert state.step.item() == 3


def test_curvature_estimate_is_unbiased():
    # E ĥ = c exactly on a quadratic, wherever the mean is; ĝ is the gradient at the mean.
    mean = torch.tensor([0.3, 0.0, -1.0], dtype=torch.float64)
    state = ivon.init({THETA: mean.expand(200_000, 3)}, h0=2.0)
    _, _, gradient, curvature = ivon.estimate(state, None, Quadratic(), ess=20.0, weight_decay=0.5)
    assert_mean(curvature[THETA], CURVATURE)
    assert_mean(gradient[THETA], -CURVATURE * (mean - CENTRE))


@pytest.mark.parametrize("draws", [1, 4])
def test_curvature_varies_as_it_should(draws):
    # ĥ = c (m-a) ε/σ + c ε²: variance c² (m-a)²/σ² + 2c², over the draws.
    c, gap, ess, h0, delta = 3.0, 0.1, 20.0, 2.0, 0.5
    joint = Quadratic(torch.tensor(c).double(), torch.tensor(0.0).double())
    state = ivon.init({THETA: torch.full((200_000, 1), gap, dtype=torch.float64)}, h0=h0)
    _, _, _, curvature = ivon.estimate(state, None, joint, ess, delta, draws)
    exact = (c**2 * gap**2 * ess * (h0 + delta) + 2 * c**2) / draws
    assert_mean((curvature[THETA] - c).square(), exact)


def test_stationary_curvature_variance_and_mean():
    """Rows are independent runs, so the averages below have honest standard errors.

    With a slow mean, E(h-ĥ)² = c² ((m-a)²/σ² + 2) up to O(1-β₂), and the drift of h vanishes at
    h = c + ½ (1-β₂) E(h-ĥ)² / (c+δ). The next order is (1-β₂) times smaller: 5 (1-β₂)² c covers it. The mean is the
    ridge solution r up to the correlation of g and h, which see the same noise: m - r = κ c² (m-a) / (c+δ)² with
    κ = (1-β₁)(1-β₂) / (1-β₁β₂).
    """
    rows, ess, delta, b1, b2 = 4000, 200.0, 0.3, 0.9, 0.99
    centre = 0.03 * CENTRE
    pull = (1 - b1) * (1 - b2) / (1 - b1 * b2) * (CURVATURE / (CURVATURE + delta)).square()
    mean = (CURVATURE * centre / (CURVATURE + delta) - pull * centre) / (1 - pull)
    joint = Quadratic(centre=centre)
    transform = ivon.build(joint, 2e-3, ess, weight_decay=delta, h0=3.0, betas=(b1, b2), rescale_lr=False)
    state = run(transform, transform.init({THETA: mean.expand(rows, 3)}), 1500)  # 0.99^1500 = 3e-7
    h = state.hessian[THETA]
    precision = ess * (CURVATURE + delta)
    noise = CURVATURE.square() * ((mean - centre).square() * precision + 2)
    expected = CURVATURE + 0.5 * (1 - b2) * noise / (CURVATURE + delta)
    error = 5 * h.std(0) / math.sqrt(rows) + 5 * (1 - b2) ** 2 * CURVATURE
    assert ((h.mean(0) - expected).abs() < error).all(), (h.mean(0), expected, error)
    assert_mean(state.params[THETA], mean)
    # the exact posterior has precision ess (c + δ); the bias of h and its own spread are of order 1-β₂
    sd = ivon.standard_deviation(state, ess, delta)[THETA]
    torch.testing.assert_close(sd.square().mean(0), 1 / precision, rtol=2 * (1 - b2), atol=0)


def test_curvature_tends_to_the_truth_as_beta_tends_to_one():
    # An exact gradient of the ridge problem: the bias of h is ½ (1-β₂) 2c² / (c+δ) at m = a, halved with 1-β₂.
    gaps = []
    for b2 in (0.96, 0.98):
        joint = Quadratic(torch.tensor(2.0).double(), torch.tensor(0.0).double())
        transform = ivon.build(joint, 1e-9, 100.0, weight_decay=0.1, h0=2.0, betas=(0.9, b2), rescale_lr=False)
        state = run(transform, transform.init(start(40_000, 1)), 400)  # 0.98^400 = 3e-4
        h = state.hessian[THETA].mean()
        gaps.append(h.item() - 2)
        assert h.item() == pytest.approx(2 + (1 - b2) * 4 / 2.1, abs=2 * (1 - b2) ** 2 * 2 + 0.01)
    assert gaps[0] / gaps[1] == pytest.approx(2, rel=0.2)


def test_fixed_point_without_noise_is_exact(monkeypatch):
    # On a quadratic the pair ε = ±1 gives ĝ and ĥ their expectations, so h and m converge to c and the ridge solution.
    signs = iter([1.0, -1.0] * 2000)
    monkeypatch.setattr(ivon, "normal_like", lambda tensor: torch.full_like(tensor, next(signs)))
    transform = ivon.build(Quadratic(), 0.05, 30.0, weight_decay=0.3, h0=3.0, betas=(0.9, 0.97), draws=2)
    state = run(transform, transform.init(start(3)), 1000)
    torch.testing.assert_close(state.hessian[THETA], CURVATURE)
    torch.testing.assert_close(state.params[THETA], CURVATURE * CENTRE / (CURVATURE + 0.3))
    exact = 1 / (30 * (CURVATURE + 0.3))
    torch.testing.assert_close(ivon.standard_deviation(state, 30.0, 0.3)[THETA].square(), exact)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_precision_at_most_halves_whatever_the_gradient(inplace, weight_decay):
    size = 5000
    transform = ivon.build(Constant(torch.tensor(0.0)), 1e-3, 10.0, weight_decay=weight_decay, betas=(0.9, 0.5))
    state, least = transform.init(start(size)), 1.0
    for scale in (1.0, 1e2, 1e4, 1e2, 1.0, 1e6, 1e-3):
        hostile = Constant(scale * torch.randn(size, dtype=torch.float64))
        before = state.hessian[THETA].clone() + weight_decay
        transform = ivon.build(hostile, 1e-3, 10.0, weight_decay=weight_decay, betas=(0.9, 0.5))
        state, _ = transform.update(state, None, inplace=inplace)
        after = state.hessian[THETA] + weight_decay
        assert (after >= before / 2 * (1 - 1e-9)).all()
        assert (after > 0).all()
        least = min(least, (after / before).min().item())
    assert least < 0.501  # the bound is reached


def test_draws_have_the_law_of_q():
    mean = torch.tensor([0.3, 0.0, -1.0], dtype=torch.float64)
    state = ivon.init({THETA: mean.expand(100_000, 3)})._replace(hessian={THETA: CURVATURE.expand(100_000, 3)})
    gap = ivon.sample(state, ess=7.0, weight_decay=0.2)[THETA] - mean
    assert_mean(gap, torch.zeros(3))
    assert_mean(gap.unsqueeze(-1) * gap.unsqueeze(-2), (1 / (7 * (CURVATURE + 0.2))).diag())


def test_step_is_scheduled_rescaled_and_clipped():
    push = Constant(torch.tensor(5.0, dtype=torch.float64))

    def first(**settings):
        transform = ivon.build(push, settings.pop("lr", 0.1), 1e12, weight_decay=0.0, h0=2.0, **settings)
        return transform.update(transform.init(start(1)), None)[0].params[THETA].item()

    # β₂ keeps h at 2 but for a part in 1e5 of a noisy ĥ, whose sd is 5 √(2e12)
    steady = {"betas": (0.9, 1 - 1e-12)}
    assert first(rescale_lr=False, **steady) == pytest.approx(0.1 * 5 / 2, rel=1e-3)
    assert first(**steady) == pytest.approx(0.1 * 5, rel=1e-3)
    assert first(clip_radius=0.5, rescale_lr=False, **steady) == pytest.approx(0.1 * 0.5)
    assert first(lr=schedules.warmup_inverse_sqrt(0.1, 10), **steady) == pytest.approx(0.01 * 5, rel=1e-3)


def test_in_place_and_pure_agree():
    transform = ivon.build(Quadratic(), 0.1, 50.0, weight_decay=0.1, betas=(0.9, 0.95), draws=2, clip_radius=0.8)
    states = []
    for inplace in (False, True):
        with drawing_from([torch.Generator().manual_seed(1)]):
            states.append(pack_state(run(transform, transform.init(start(3)), 30, inplace=inplace)))
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-9, atol=1e-12)


def test_pure_update_leaves_the_old_state():
    transform = ivon.build(Quadratic(), 0.1, 50.0)
    old = run(transform, transform.init(start(3)), 2)
    before = {k: v.clone() for k, v in pack_state(old).items()}
    new, _ = transform.update(old, None)
    assert all(torch.equal(value, before[name]) for name, value in pack_state(old).items())
    assert not torch.equal(new.params[THETA], old.params[THETA])


def test_in_place_leaves_what_it_was_started_from():
    params = start(3)
    transform = ivon.build(Quadratic(), 0.1, 50.0)
    run(transform, transform.init(params), 3)
    assert torch.equal(params[THETA], torch.zeros(3, dtype=torch.float64))


def test_rows_are_members_of_their_own():
    theta = torch.randn(3, 3, dtype=torch.float64)
    transform = ivon.build(Quadratic(), 0.1, 50.0, betas=(0.9, 0.95))
    with drawing_from([torch.Generator().manual_seed(i) for i in range(3)]):
        together = run(transform, transform.init({THETA: theta}), 10)
        draws = ivon.sample(together, 50.0, 1e-4)[THETA]
    assert together.log_joint.shape == (3,)
    for i, row in enumerate(theta):
        with drawing_from([torch.Generator().manual_seed(i)]):
            alone = run(transform, transform.init({THETA: row}), 10)
            torch.testing.assert_close(together.params[THETA][i], alone.params[THETA])
            torch.testing.assert_close(together.hessian[THETA][i], alone.hessian[THETA])
            torch.testing.assert_close(draws[i], ivon.sample(alone, 50.0, 1e-4)[THETA])


def test_update_can_be_vmapped(monkeypatch):
    def named(params, batch):
        return Quadratic()({THETA: torch.cat([params["a"], params["b"].view(1)])}, batch)

    transform = ivon.build(named, 0.1, 50.0)
    params = {"a": torch.zeros(4, 2, dtype=torch.float64), "b": torch.zeros(4, dtype=torch.float64)}
    states = torch.vmap(transform.init)(params)
    moved, outputs = torch.vmap(transform.update, in_dims=(0, None), randomness="different")(states, None)
    assert outputs.shape == (4, 3)
    assert len(moved.log_joint.unique()) == 4  # each its own noise
    monkeypatch.setattr(ivon, "normal_like", torch.ones_like)
    moved, _ = torch.vmap(transform.update, in_dims=(0, None))(states, None)
    alone, _ = transform.update(transform.init({k: p[2] for k, p in params.items()}), None)
    torch.testing.assert_close(moved.params["a"][2], alone.params["a"])
    torch.testing.assert_close(moved.hessian["b"][2], alone.hessian["b"])


def test_a_flat_model_keeps_its_mean_apart_from_its_draws():
    model = shell_of(Mlp())
    data = Data(torch.randn(20, 3), torch.randn(20, 2))
    joint = Objective(model, Gaussian(1.0), 20)
    begin, batch = model.theta.clone(), data.take(torch.arange(10))
    settings = {"lr": 0.1, "ess": 20.0, "draws": 2, "betas": (0.9, 0.99)}
    transform, plain = ivon.build(joint, **settings), ivon.build(joint.__call__, **settings)
    with drawing_from([torch.Generator().manual_seed(0)]):
        ours = transform.init({THETA: model.theta})
        for _ in range(5):
            ours, _ = transform.update(ours, batch, inplace=True)
            score(model, Gaussian(1.0), ours.params[THETA], as_batches(data))  # as the loop does after an epoch
    with drawing_from([torch.Generator().manual_seed(0)]):
        theirs = run(plain, plain.init({THETA: begin}), 5, batch, inplace=False)
    torch.testing.assert_close(ours.params[THETA], theirs.params[THETA], rtol=1e-4, atol=1e-5)


def test_a_checkpoint_continues_the_run():
    transform = ivon.build(Quadratic(), 0.1, 50.0)
    halfway, resumed = run(transform, transform.init(start(3)), 5), transform.init(start(3))
    unpack_state(resumed, pack_state(halfway))
    states = []
    for state in (halfway, resumed):
        with drawing_from([torch.Generator().manual_seed(1)]):
            states.append(pack_state(run(transform, state, 5)))
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr must be positive; got 0.0"),
        ({"ess": 0.0}, "ess must be positive and finite .*; got 0.0"),
        ({"ess": math.inf}, "ess must be positive and finite .*; got inf"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0; got -1.0"),
        ({"h0": 0.0}, "h0 must be positive; got 0.0"),
        ({"betas": (0.9, 1.0)}, r"betas must lie in \[0, 1\); got \(0.9, 1.0\)"),
        ({"draws": 0}, "draws must be at least 1; got 0"),
        ({"clip_radius": 0.0}, "clip_radius must be positive; got 0.0"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        ivon.build(Quadratic(), **{"lr": 0.1, "ess": 10.0} | settings)


def test_in_pairs_the_gradient_at_the_mean_is_not_in_the_curvature():
    """ĥ = c ε² whatever the gradient at the mean, and ĝ is that gradient without noise: variance 2 c², and 0."""
    c, ess, h0, delta = 3.0, 20.0, 2.0, 0.5
    joint = Quadratic(torch.tensor(c).double(), torch.tensor(0.0).double())
    for gap in (0.0, 5.0):
        state = ivon.init({THETA: torch.full((200_000, 1), gap, dtype=torch.float64)}, h0=h0)
        _, _, gradient, curvature = ivon.estimate(state, None, joint, ess, delta, pairs=True)
        torch.testing.assert_close(gradient[THETA], torch.full_like(gradient[THETA], -c * gap))
        assert_mean(curvature[THETA], c)
        assert_mean((curvature[THETA] - c).square(), 2 * c**2)


@pytest.mark.parametrize("inplace", [False, True])
def test_the_curvature_of_the_law_is_averaged_after_a_step(inplace):
    settings = {"weight_decay": 0.1, "betas": (0.9, 0.5)}
    transform = ivon.build(Quadratic(), 0.01, 50.0, average_after=4, **settings)
    with drawing_from(torch.Generator().manual_seed(0)):
        state, seen = transform.init(start(3)), []
        for _ in range(10):
            state, _ = transform.update(state, None, inplace=inplace)
            seen.append(state.hessian[THETA].clone())
            expected = seen[-1] if len(seen) <= 4 else torch.stack(seen[4:]).mean(0)
            torch.testing.assert_close(state.averaged[THETA], expected)
    sd = ((expected + 0.1) * 50.0).rsqrt()
    torch.testing.assert_close(ivon.law(state, 50.0, 0.1).sd, sd)


def test_a_curvature_per_weight_to_start_from():
    transform = ivon.build(Quadratic(), 0.1, 50.0, h0=CURVATURE, rescale_lr=False)
    torch.testing.assert_close(transform.init(start(3)).hessian[THETA], CURVATURE)
    with pytest.raises(ValueError, match="rescale_lr must be False with a curvature h0 per weight"):
        ivon.build(Quadratic(), 0.1, 50.0, h0=CURVATURE)
    with pytest.raises(ValueError, match=r"h0 must be at least 0, and positive without weight_decay; got -3.0"):
        ivon.build(Quadratic(), 0.1, 50.0, h0=-CURVATURE / CURVATURE * 3, rescale_lr=False)
