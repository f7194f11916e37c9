"""SWA and SWAG on paths whose moments are known."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from bayesformer.core.draws import drawing_from
from bayesformer.core.types import Params, Transform
from bayesformer.core.vectors import THETA
from bayesformer.data import Data, as_batches
from bayesformer.inference import optimise, swag, vi_diag
from bayesformer.inference.optimise import Adam
from bayesformer.likelihoods import Gaussian
from bayesformer.train.checkpoint import pack_state, unpack_state
from bayesformer.train.loop import score
from bayesformer.train.objective import Objective
from tests.laws import assert_mean
from tests.nets import Mlp, shell_of


class Walk(NamedTuple):
    params: Params
    position: Tensor
    log_joint: Tensor


def walk(path):
    """An algorithm that visits the rows of `path`, then stays at the last; everything else is its own."""

    def init(params):
        return Walk(params, torch.tensor(0), torch.tensor(0.0))

    def update(state, batch, inplace=False):
        place = state.position.clamp(max=len(path) - 1)
        params = {k: p.copy_(path[place]) if inplace else path[place] + 0 * p for k, p in state.params.items()}
        return Walk(params, state.position + 1, state.position.to(torch.float32)), place

    return Transform(init, update)


def run(transform, params, steps, inplace=False):
    state = transform.init(params)
    for _ in range(steps):
        state, _ = transform.update(state, None, inplace=inplace)
    return state


def zeros(*shape):
    return {THETA: torch.zeros(*shape, dtype=torch.float64)}


both_ways = pytest.mark.parametrize("inplace", [False, True])


@both_ways
@pytest.mark.parametrize(("start", "every", "steps"), [(0, 1, 12), (3, 2, 11), (4, 5, 30), (2, 1, 4)])
def test_moments_of_a_path(inplace, start, every, steps):
    path, rank = torch.randn(30, 4, dtype=torch.float64), 4
    state = run(swag.build(walk(path), start, every, rank), zeros(4), steps, inplace)
    taken = path[start + every - 1 : steps : every]  # after steps start + every, start + 2 every, ...
    assert state.snapshots.item() == len(taken)
    assert state.step.item() == steps
    torch.testing.assert_close(state.params[THETA], taken.mean(0))
    torch.testing.assert_close(state.variance[THETA], taken.square().mean(0) - taken.mean(0).square())
    deviations = torch.stack([row - taken[: i + 1].mean(0) for i, row in enumerate(taken)])[-rank:]
    ours = state.deviations[THETA]
    torch.testing.assert_close(ours.T @ ours, deviations.T @ deviations)  # the ring's order does not matter


@both_ways
def test_mean_is_the_current_weights_until_the_first_snapshot(inplace):
    path = torch.randn(10, 4, dtype=torch.float64)
    transform = swag.build(walk(path), start=3, every=2)
    state = transform.init(zeros(4))
    for step in range(5):
        state, _ = transform.update(state, None, inplace=inplace)
        assert torch.equal(state.params[THETA], path[step])
    assert state.snapshots.item() == 1
    state, _ = transform.update(state, None, inplace=inplace)
    assert torch.equal(state.params[THETA], path[4])  # and only snapshots after it


@both_ways
def test_linear_path(inplace):
    # θₙ = n v for n = 1..N: mean (N+1)/2 v, variance (N²-1)/12 v².
    velocity, num = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), 9
    path = torch.arange(1, num + 1, dtype=torch.float64).unsqueeze(-1) * velocity
    state = run(swag.build(walk(path), rank=3), zeros(3), num, inplace)
    torch.testing.assert_close(state.params[THETA], (num + 1) / 2 * velocity)
    torch.testing.assert_close(state.variance[THETA], (num**2 - 1) / 12 * velocity.square())
    # the deviation of the n-th is (n - (n+1)/2) v = (n-1)/2 v
    torch.testing.assert_close(state.deviations[THETA].square().sum(0), (3**2 + 3.5**2 + 4**2) * velocity.square())


def closed_form(path, rank, scale):
    """Covariance of a draw, from the paper."""
    deviations = torch.stack([row - path[: i + 1].mean(0) for i, row in enumerate(path)])[-rank:]
    diagonal = (path - path.mean(0)).square().mean(0).diag()
    return scale * (diagonal + deviations.T @ deviations / (len(deviations) - 1))


@pytest.mark.parametrize(("steps", "rank", "scale"), [(12, 5, 0.5), (4, 6, 0.5), (12, 3, 1.0)])
def test_draws_have_the_covariance_of_the_closed_form(steps, rank, scale):
    path = torch.randn(steps, 3, dtype=torch.float64) @ torch.randn(3, 3, dtype=torch.float64)
    state = run(swag.build(walk(path), rank=rank), zeros(3), steps)
    exact = closed_form(path, rank, scale)
    sd, factor = swag.spread(state, scale)
    torch.testing.assert_close(sd[THETA].square().diag() + factor[THETA].T @ factor[THETA], exact)
    draws = torch.vmap(lambda _: swag.sample(state, scale)[THETA], randomness="different")(torch.zeros(100_000))
    gap = draws - path.mean(0)
    assert_mean(gap, torch.zeros(3))
    assert_mean(gap.unsqueeze(-1) * gap.unsqueeze(-2), exact)


def test_rank_zero_is_the_diagonal():
    path = torch.randn(12, 3, dtype=torch.float64)
    state = run(swag.build(walk(path), rank=0), zeros(3), 12)
    draws = torch.vmap(lambda _: swag.sample(state)[THETA], randomness="different")(torch.zeros(100_000))
    gap = draws - path.mean(0)
    exact = 0.5 * (path - path.mean(0)).square().mean(0).diag()
    assert_mean(gap.unsqueeze(-1) * gap.unsqueeze(-2), exact)


def test_no_spread_from_one_snapshot_or_equal_ones_or_scale_zero():
    row = torch.randn(1, 4, dtype=torch.float64)
    for steps in (1, 5):  # the walk stays where it is
        state = run(swag.build(walk(row), rank=3), zeros(4), steps)
        assert torch.equal(swag.sample(state)[THETA], row[0])
    path = torch.randn(6, 4, dtype=torch.float64)
    state = run(swag.build(walk(path), rank=3), zeros(4), 6)
    assert torch.equal(swag.sample(state, scale=0.0)[THETA], state.params[THETA])  # SWA


def test_variance_keeps_its_digits_in_single_precision():
    # Weights at 1 with a spread of 1e-4: the mean of θ² minus θ̄² has an error of 1e-7, ten times the variance.
    path = (1 + 1e-4 * torch.randn(200, 50, dtype=torch.float64)).float()
    state = run(swag.build(walk(path), rank=0), {THETA: torch.zeros(50)}, 200)
    torch.testing.assert_close(state.variance[THETA].double(), path.double().var(0, correction=0), rtol=1e-2, atol=0)


def quadratic(params, batch):
    return -sum((p - 1).square().sum() for p in params.values()), torch.zeros(())


def named():
    return {"a": torch.zeros(2, 3, dtype=torch.float64), "b": torch.ones((), dtype=torch.float64)}


@pytest.mark.parametrize("rank", [0, 3])
def test_in_place_and_pure_agree(rank):
    # all but the inner state: Adam's fused kernel keeps its momentum with the other sign
    transform = swag.build(optimise.build(quadratic, Adam(0.1)), start=4, every=3, rank=rank)
    pure, inplace = (run(transform, named(), 20, way) for way in (False, True))
    for field in ("params", "variance", "deviations", "snapshots", "step", "log_joint"):
        torch.testing.assert_close(getattr(pure, field), getattr(inplace, field), rtol=1e-9, atol=1e-12)


def test_pure_update_leaves_the_old_state():
    transform = swag.build(optimise.build(quadratic, Adam(0.1)), rank=3)
    old = run(transform, named(), 3)
    before = {k: v.clone() for k, v in pack_state(old).items()}
    new, _ = transform.update(old, None)
    assert all(torch.equal(value, before[name]) for name, value in pack_state(old).items())
    assert not torch.equal(new.params["a"], old.params["a"])


class Rows:
    def value_and_grad(self, params, batch):
        rows = params[THETA]
        return -(rows - 1).square().sum(-1), torch.zeros(()), {THETA: -2 * (rows - 1)}


def test_rows_are_members_of_their_own():
    theta = torch.randn(3, 5, dtype=torch.float64)
    transform = swag.build(vi_diag.build(Rows(), 0.1, Adam(0.1)), start=2, every=2, rank=3)
    with drawing_from([torch.Generator().manual_seed(i) for i in range(3)]):
        together = run(transform, {THETA: theta}, 11, inplace=True)
        draw = swag.sample(together)[THETA]
    assert together.log_joint.shape == (3,)
    assert together.deviations[THETA].shape == (3, 3, 5)
    for i, row in enumerate(theta):
        with drawing_from([torch.Generator().manual_seed(i)]):
            alone = run(transform, {THETA: row}, 11, inplace=True)
            torch.testing.assert_close(together.params[THETA][i], alone.params[THETA])
            torch.testing.assert_close(draw[i], swag.sample(alone)[THETA])


def test_named_weights_share_the_low_rank_noise():
    # Two names that move together stay together in every draw of the low-rank part.
    path = torch.randn(6, dtype=torch.float64)
    state = run(swag.build(walk(path), rank=4), {"a": path.new_zeros(()), "b": path.new_zeros(())}, 6)
    quiet = state._replace(variance={k: torch.zeros_like(v) for k, v in state.variance.items()})
    draw = swag.sample(quiet)
    assert draw["a"] != quiet.params["a"]
    assert torch.equal(draw["a"], draw["b"])


def test_update_can_be_vmapped():
    transform = swag.build(optimise.build(quadratic, Adam(0.1)), start=1, every=2, rank=2)
    starts = {k: torch.stack([p, p + 1, p - 1]) for k, p in named().items()}
    states = torch.vmap(transform.init)(starts)
    for _ in range(8):
        states, _ = torch.vmap(transform.update, in_dims=(0, None))(states, None)
    alone = run(transform, {k: p[1] for k, p in starts.items()}, 8)
    torch.testing.assert_close(states.params["a"][1], alone.params["a"])
    torch.testing.assert_close(states.deviations["b"][1], alone.deviations["b"])
    draws = torch.vmap(swag.sample, randomness="different")(states)
    assert draws["a"].shape == (3, 2, 3)


def test_a_flat_model_that_scores_the_mean_does_not_move_the_inner_weights():
    model = shell_of(Mlp())
    data = Data(torch.randn(20, 3), torch.randn(20, 2))
    joint = Objective(model, Gaussian(1.0), 20)
    inner = optimise.build(joint, Adam(0.01))
    begin = model.theta.clone()
    transform = swag.build(inner, start=2, every=1, rank=2)
    state = transform.init({THETA: model.theta})
    for _ in range(6):
        state, _ = transform.update(state, data.take(torch.arange(20)), inplace=True)
        score(model, Gaussian(1.0), state.params[THETA], as_batches(data))  # as the loop does after an epoch
    plain = inner.init({THETA: begin})
    for _ in range(6):
        plain, _ = inner.update(plain, data.take(torch.arange(20)), inplace=True)
    torch.testing.assert_close(state.inner.params[THETA], plain.params[THETA])


@pytest.mark.parametrize("rank", [0, 3])
def test_a_checkpoint_continues_the_run(rank):
    transform = swag.build(optimise.build(quadratic, Adam(0.1)), start=4, every=3, rank=rank)
    halfway = run(transform, named(), 9, inplace=True)
    resumed = transform.init(named())
    unpack_state(resumed, pack_state(halfway))
    for _ in range(9):
        halfway, _ = transform.update(halfway, None, inplace=True)
        resumed, _ = transform.update(resumed, None, inplace=True)
    torch.testing.assert_close(pack_state(resumed), pack_state(halfway), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": -1}, "start must be at least 0; got -1"),
        ({"every": 0}, "every must be at least 1; got 0"),
        ({"rank": -1}, "rank must be 0 .*; got -1"),
        ({"rank": 1}, "rank must be 0 .diagonal. or at least 2, .*; got 1"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        swag.build(optimise.build(quadratic), **settings)


def test_scale_is_checked():
    state = run(swag.build(optimise.build(quadratic)), named(), 2)
    with pytest.raises(ValueError, match="scale must be at least 0; got -0.5"):
        swag.sample(state, scale=-0.5)
    with pytest.raises(ValueError, match="scale must be at least 0; got nan"):
        swag.sample(state, scale=math.nan)
