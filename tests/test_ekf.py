"""Extended Kalman filters against the exact posterior of linear regression."""

import math

import pytest
import torch
from scipy import stats
from torch import nn

import bayesformer as bf
from bayesformer.core.draws import drawing_from
from bayesformer.core.types import Batch
from bayesformer.core.vectors import THETA
from bayesformer.data import Data, as_batches
from bayesformer.inference import ekf_common as ekf
from bayesformer.inference import ekf_dense as dense
from bayesformer.inference import ekf_diag as diag
from bayesformer.likelihoods import Categorical
from bayesformer.train import example_scores
from bayesformer.train.checkpoint import pack_state
from bayesformer.train.objective import Objective
from bayesformer.train.problem import Problem
from bayesformer.train.prototype import Prototype
from tests.laws import assert_mean
from tests.nets import Mlp, blobs, shell_of

KINDS = {"diag": diag, "dense": dense}
both = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
NOISE = 0.6


def log_likelihood(params, batch):
    outputs = batch.inputs @ params[THETA]
    return (-0.5 * ((batch.targets - outputs) / NOISE).square()).mean(-1), outputs


class Rows:
    """The same for members in rows, every one with data of its own."""

    def value_and_grad(self, params, batch):
        outputs = (batch.inputs @ params[THETA].unsqueeze(-1)).squeeze(-1)
        residual = (batch.targets - outputs) / NOISE**2
        value = -0.5 * (residual * NOISE).square().mean(-1)
        return value, outputs, {THETA: (batch.inputs.mT @ residual.unsqueeze(-1)).squeeze(-1) / outputs.shape[-1]}


def hessian(params, batch):
    """Minus the Hessian of the mean log-likelihood, (..., P, P)."""
    return batch.inputs.mT @ batch.inputs / (NOISE**2 * batch.inputs.shape[-2])


def hessian_diagonal(params, batch):
    return {THETA: hessian(params, batch).diagonal(dim1=-2, dim2=-1)}


def data(num=24, size=3, orthogonal=False):
    x = torch.randn(num, size, dtype=torch.float64)
    if orthogonal:
        x = torch.eye(size, dtype=torch.float64)[torch.arange(num) % size] * x[:, :1]
    y = x @ torch.linspace(-1, 1, size, dtype=torch.float64) + NOISE * torch.randn(num, dtype=torch.float64)
    return Batch(x, y)


def batches(whole, sizes):
    return [Batch(x, y) for x, y in zip(whole.inputs.split(sizes), whole.targets.split(sizes), strict=True)]


def absorb(transform, params, parts, inplace=False):
    state = transform.init(params)
    for part in parts:
        state, _ = transform.update(state, part, inplace=inplace)
    return state


def posterior(whole, start, sd):
    precision = whole.inputs.mT @ whole.inputs / NOISE**2 + torch.eye(len(start), dtype=torch.float64) / sd**2
    return torch.linalg.solve(precision, whole.inputs.mT @ whole.targets / NOISE**2 + start / sd**2), precision


@pytest.mark.parametrize("sizes", [[24], [8, 8, 8], [10, 10, 4], [1] * 24])
@pytest.mark.parametrize("inplace", [False, True])
def test_dense_with_exact_curvature_is_the_posterior(sizes, inplace):
    # lr=None is the size of each batch, so the split does not matter, a short last batch included.
    whole, start = data(), torch.tensor([0.3, 0.0, -0.2], dtype=torch.float64)
    transform = dense.build(log_likelihood, sd=2.0, curvature=hessian)
    state = absorb(transform, {THETA: start}, batches(whole, sizes), inplace)
    mean, precision = posterior(whole, start, 2.0)
    torch.testing.assert_close(state.params[THETA], mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state.precision, precision, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(dense.covariance(state), torch.linalg.inv(precision), rtol=1e-9, atol=1e-12)


def test_rate_equal_to_the_batch_size_is_the_untempered_update():
    whole, start = data(), {THETA: torch.zeros(3, dtype=torch.float64)}
    given = absorb(dense.build(log_likelihood, 8.0, curvature=hessian), start, batches(whole, [8] * 3))
    own = absorb(dense.build(log_likelihood, curvature=hessian), start, batches(whole, [8] * 3))
    torch.testing.assert_close(given, own)
    # B/τ divides the likelihood's precision by τ
    cold = absorb(dense.build(log_likelihood, 8.0 / 0.5, curvature=hessian), start, batches(whole, [8] * 3))
    eye = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(cold.precision - eye, 2 * (own.precision - eye))


def test_diagonal_with_orthogonal_inputs_is_the_posterior():
    whole, start = data(orthogonal=True), torch.tensor([0.3, 0.0, -0.2], dtype=torch.float64)
    transform = diag.build(log_likelihood, sd=2.0, curvature=hessian_diagonal)
    state = absorb(transform, {THETA: start}, batches(whole, [10, 10, 4]))
    mean, precision = posterior(whole, start, 2.0)
    torch.testing.assert_close(state.params[THETA], mean)
    torch.testing.assert_close(state.precision[THETA], precision.diag())


@pytest.mark.parametrize("transition_sd", [0.0, 0.3])
def test_dense_equals_diagonal_when_inputs_lie_along_the_axes(transition_sd):
    # A score is along its input, so the outer products are diagonal too: the empirical Fisher needs no Hessian here.
    whole, start = data(orthogonal=True), {THETA: torch.zeros(3, dtype=torch.float64)}
    one = absorb(diag.build(log_likelihood, transition_sd=transition_sd), start, batches(whole, [6] * 4))
    two = absorb(dense.build(log_likelihood, transition_sd=transition_sd), start, batches(whole, [6] * 4))
    torch.testing.assert_close(one.params, two.params)
    torch.testing.assert_close(one.precision[THETA].diag(), two.precision)
    torch.testing.assert_close(one.log_joint, two.log_joint)


def test_fisher_is_the_mean_outer_product_of_scores():
    whole, theta = data(), torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64)
    residual = (whole.targets - whole.inputs @ theta) / NOISE**2
    score = residual.unsqueeze(-1) * whole.inputs  # by hand
    value, outputs, ours = ekf.scores(log_likelihood, {THETA: theta}, whole)
    torch.testing.assert_close(ours[THETA], score)
    torch.testing.assert_close(outputs, whole.inputs @ theta)
    torch.testing.assert_close(value.mean(), log_likelihood({THETA: theta}, whole)[0])
    state, _ = dense.build(log_likelihood, 5.0).update(dense.init({THETA: theta}), whole)
    fisher = 5.0 * score.T @ score / 24
    torch.testing.assert_close(state.precision, torch.eye(3, dtype=torch.float64) + fisher)
    torch.testing.assert_close(state.precision @ (state.params[THETA] - theta), 5.0 * score.mean(0))
    state, _ = diag.build(log_likelihood, 5.0).update(diag.init({THETA: theta}), whole)
    torch.testing.assert_close(state.precision[THETA], 1 + fisher.diag())


def test_empirical_fisher_is_right_on_average_at_the_truth():
    size = 20_000
    x = torch.randn(size, 1, 2, dtype=torch.float64)
    theta = torch.tensor([0.5, -0.2], dtype=torch.float64).expand(size, 2).clone()
    y = (x @ theta.unsqueeze(-1)).squeeze(-1) + NOISE * torch.randn(size, 1, dtype=torch.float64)
    state, _ = dense.build(log_likelihood).update(dense.init({THETA: theta}), Batch(x, y))
    assert_mean(state.precision - torch.eye(2, dtype=torch.float64), torch.eye(2) / NOISE**2)  # E x xᵀ = I


@both
def test_precision_never_falls_without_transition_noise(kind):
    transform = kind.build(log_likelihood)
    state = transform.init({THETA: torch.zeros(3, dtype=torch.float64)})
    for part in batches(data(), [3] * 8):
        before, (state, _) = state, transform.update(state, part)
        if kind is diag:
            assert (state.precision[THETA] >= before.precision[THETA]).all()
        else:
            assert torch.linalg.eigvalsh(state.precision - before.precision).min() > -1e-12


@both
def test_transition_noise_adds_its_variance(kind):
    flat = lambda params, batch: (0.0 * params[THETA].sum() * batch.targets.sum(), batch.targets)  # noqa: E731
    transform = kind.build(flat, transition_sd=0.5, sd=2.0)
    state, _ = transform.update(transform.init({THETA: torch.zeros(3, dtype=torch.float64)}), data(4))
    exact = torch.full((3,), 1 / (4 + 0.25), dtype=torch.float64)  # 2² + 0.5²
    precision = state.precision[THETA] if kind is diag else state.precision
    torch.testing.assert_close(precision, exact if kind is diag else exact.diag())


def test_transition_of_a_dense_precision():
    root = torch.randn(4, 4, dtype=torch.float64)
    precision = root @ root.T + 0.1 * torch.eye(4, dtype=torch.float64)
    exact = torch.linalg.inv(torch.linalg.inv(precision) + 0.09 * torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(dense.predict(precision, 0.3), exact)
    assert dense.predict(precision, 0.0) is precision


def test_dense_posterior_is_calibrated():
    """Simulation-based calibration: θ from the prior, y from θ; its rank among posterior draws is uniform."""
    problems, num, draws = 2000, 8, 99
    theta = torch.randn(problems, 2, dtype=torch.float64)
    x = torch.randn(problems, num, 2, dtype=torch.float64) @ torch.tensor([[1.0, 0.8], [0.0, 0.6]]).double()
    y = (x @ theta.unsqueeze(-1)).squeeze(-1) + NOISE * torch.randn(problems, num, dtype=torch.float64)
    transform = dense.build(Rows(), curvature=hessian)
    state = transform.init({THETA: torch.zeros(problems, 2, dtype=torch.float64)})
    for i in range(0, num, 2):
        state, _ = transform.update(state, Batch(x[:, i : i + 2], y[:, i : i + 2]))
    ranks = sum((with_sum(dense.sample(state)[THETA]) < with_sum(theta)).long() for _ in range(draws))
    for rank in ranks.T:
        counts = torch.bincount(rank // 5, minlength=20)
        pvalue = stats.chisquare(counts.numpy()).pvalue
        assert pvalue > 1e-6, f"ranks {counts.tolist()}, p = {pvalue:.1e}"


def with_sum(theta):
    """Both weights and their sum, whose law depends on their correlation."""
    return torch.cat([theta, theta.sum(-1, keepdim=True)], -1)


@both
def test_draws_have_the_law_of_the_state(kind):
    whole = data()
    start = torch.zeros(100_000, 3, dtype=torch.float64)
    state = absorb(kind.build(log_likelihood), {THETA: start[0]}, [whole])
    precision = state.precision[THETA].diag() if kind is diag else state.precision
    many = kind.init({THETA: state.params[THETA].expand_as(start)})
    wide = state.precision[THETA].expand_as(start) if kind is diag else precision.expand(100_000, 3, 3)
    gap = kind.sample(many._replace(precision={THETA: wide} if kind is diag else wide))[THETA] - state.params[THETA]
    assert_mean(gap, torch.zeros(3))
    assert_mean(gap.unsqueeze(-1) * gap.unsqueeze(-2), torch.linalg.inv(precision))


@both
@pytest.mark.parametrize("exact", [False, True])
def test_in_place_and_pure_agree(kind, exact):
    curvature = (hessian_diagonal if kind is diag else hessian) if exact else None
    transform = kind.build(log_likelihood, transition_sd=0.2, curvature=curvature)
    start, parts = {THETA: torch.zeros(3, dtype=torch.float64)}, batches(data(), [7, 7, 7, 3])
    pure, inplace = (pack_state(absorb(transform, start, parts, way)) for way in (False, True))
    for name, value in pure.items():
        torch.testing.assert_close(value, inplace[name], rtol=1e-12, atol=1e-14)
    assert torch.equal(start[THETA], torch.zeros(3, dtype=torch.float64))


@both
def test_pure_update_leaves_the_old_state(kind):
    transform = kind.build(log_likelihood, transition_sd=0.2)
    old = absorb(transform, {THETA: torch.zeros(3, dtype=torch.float64)}, [data()])
    before = {k: v.clone() for k, v in pack_state(old).items()}
    new, _ = transform.update(old, data())
    assert all(torch.equal(value, before[name]) for name, value in pack_state(old).items())
    assert not torch.equal(new.params[THETA], old.params[THETA])


@both
def test_rows_are_members_of_their_own(kind):
    parts = [data() for _ in range(3)]
    stacked = Batch(torch.stack([p.inputs for p in parts]), torch.stack([p.targets for p in parts]))
    theta = torch.randn(3, 3, dtype=torch.float64)
    transform = kind.build(log_likelihood, transition_sd=0.1)
    together, outputs = transform.update(transform.init({THETA: theta}), stacked)
    assert outputs.shape == (3, 24)
    assert together.log_joint.shape == (3,)
    with drawing_from([torch.Generator().manual_seed(i) for i in range(3)]):
        draws = kind.sample(together)[THETA]
    for i, part in enumerate(parts):
        alone, _ = transform.update(transform.init({THETA: theta[i]}), part)
        torch.testing.assert_close(together.params[THETA][i], alone.params[THETA])
        torch.testing.assert_close(together.log_joint[i], alone.log_joint)
        with drawing_from([torch.Generator().manual_seed(i)]):
            torch.testing.assert_close(draws[i], kind.sample(alone)[THETA])


@both
def test_named_weights_equal_the_flat_vector(kind):
    def named(params, batch):
        return log_likelihood({THETA: torch.cat([params["a"].view(1), params["b"].flatten()])}, batch)

    parts = batches(data(), [12, 12])
    zero = torch.zeros((), dtype=torch.float64)
    dicts = absorb(kind.build(named), {"a": zero, "b": torch.zeros(2, 1, dtype=torch.float64)}, parts)
    flat = absorb(kind.build(log_likelihood), {THETA: torch.zeros(3, dtype=torch.float64)}, parts)
    torch.testing.assert_close(torch.cat([p.flatten() for p in dicts.params.values()]), flat.params[THETA])
    if kind is dense:
        torch.testing.assert_close(dicts.precision, flat.precision)


@both
def test_update_can_be_vmapped(kind):
    whole, transform = data(), kind.build(log_likelihood, transition_sd=0.1)
    theta = torch.randn(4, 3, dtype=torch.float64)
    states = torch.vmap(transform.init)({THETA: theta})
    moved, _ = torch.vmap(transform.update, in_dims=(0, None), randomness="different")(states, whole)
    alone, _ = transform.update(transform.init({THETA: theta[2]}), whole)
    torch.testing.assert_close(moved.params[THETA][2], alone.params[THETA])
    draws = torch.vmap(kind.sample, randomness="different")(moved)
    assert draws[THETA].shape == (4, 3)


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def test_scores_of_a_flat_attention_model_are_those_of_single_examples():
    model = shell_of(Attentive())
    joint = Objective(model, Categorical(), 6)
    batch = Data(torch.randn(6, 5, 4), torch.arange(6) % 3).take(torch.arange(6))
    theta = model.theta.clone()
    value, outputs, ours = ekf.scores(joint, {THETA: theta}, batch)
    assert outputs.shape == (6, 3)
    for i in range(6):
        one = Batch(batch.inputs[i : i + 1], batch.targets[i : i + 1])
        exact, _, grad = joint.value_and_grad({THETA: theta}, one)
        torch.testing.assert_close(value[i], exact)
        torch.testing.assert_close(ours[THETA][i], grad[THETA], rtol=1e-4, atol=1e-6)


@both
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr must be positive, or None .*; got 0.0"),
        ({"lr": math.nan}, "lr must be positive, or None .*; got nan"),
        ({"transition_sd": -0.1}, "transition_sd must be at least 0; got -0.1"),
        ({"sd": 0.0}, "sd must be positive; got 0.0"),
    ],
)
def test_settings_are_checked(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind.build(log_likelihood, **settings)


def test_dense_refuses_many_weights_and_names_the_memory():
    with pytest.raises(ValueError, match="at most 5000 weights .* got 10000, whose matrices would need 1.2 GB"):
        dense.init({THETA: torch.zeros(10_000)})


def test_a_large_model_goes_through_example_by_example(monkeypatch):
    problem = Problem(Mlp(3, 8), Categorical(), as_batches(blobs(8), "data"), training=bf.Training(batch_size=4))
    prototype = Prototype(problem)
    assert example_scores.scores_for(prototype, ()) is ekf.scores
    monkeypatch.setattr(example_scores, "MOST", 4 * (3 + 8))
    assert example_scores.scores_for(prototype, ()) is ekf.looped_scores


@pytest.mark.parametrize("transition_sd", [0.0, 0.3])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_prior_that_is_centred_elsewhere_than_the_filter_starts(transition_sd, inplace):
    """On linear data it does not matter where likelihoods are linearised: the law is that of a start at the prior."""
    whole, mode = data(), torch.tensor([0.3, -2.0, 1.4], dtype=torch.float64)
    center, parts = torch.tensor([-0.5, 0.1, 0.2], dtype=torch.float64), batches(whole, [10, 10, 4])
    how = {"transition_sd": transition_sd, "sd": 2.0, "curvature": hessian}
    found = absorb(dense.build(log_likelihood, prior_mean=center, **how), {THETA: mode}, parts, inplace)
    plain = absorb(dense.build(log_likelihood, **how), {THETA: center}, parts, inplace)
    torch.testing.assert_close(dense.law(found).mean, dense.law(plain).mean)
    torch.testing.assert_close(found.precision, plain.precision)
    with drawing_from(torch.Generator().manual_seed(0)):
        draw = dense.sample(found)[THETA]
    with drawing_from(torch.Generator().manual_seed(0)):
        torch.testing.assert_close(draw, dense.sample(plain)[THETA])
    if not transition_sd:
        torch.testing.assert_close(dense.law(found).mean, posterior(whole, center, 2.0)[0])


@both
def test_a_temperature_divides_what_every_batch_counts(kind):
    whole, start = data(), {THETA: torch.zeros(3, dtype=torch.float64)}
    curvature = {dense: hessian, diag: hessian_diagonal}[kind]
    given = absorb(kind.build(log_likelihood, 8.0 / 0.5, curvature=curvature), start, batches(whole, [8] * 3))
    own = absorb(kind.build(log_likelihood, temperature=0.5, curvature=curvature), start, batches(whole, [8] * 3))
    torch.testing.assert_close(given, own)
    with pytest.raises(ValueError, match="temperature must be positive; got 0"):
        kind.build(log_likelihood, temperature=0.0)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_diagonal_filter_that_stays_has_the_best_diagonal(inplace):
    whole, start = data(), torch.tensor([0.3, 0.0, -0.2], dtype=torch.float64)
    transform = diag.build(log_likelihood, sd=2.0, curvature=hessian_diagonal, moves=False)
    state = absorb(transform, {THETA: start}, batches(whole, [10, 10, 4]), inplace)
    _, precision = posterior(whole, start, 2.0)
    assert torch.equal(state.params[THETA], start)
    torch.testing.assert_close(state.precision[THETA], precision.diag())
