"""Adam and its schedules against torch.optim, in place and pure."""

import math

import pytest
import torch

from bayesformer.core.vectors import THETA, dot
from bayesformer.inference import optimise, schedules
from bayesformer.inference.optimise import Adam


def quadratic(params, batch):
    """A log joint with its maximum at 1, anisotropic."""
    loss = sum((scale * (p - 1).square()).sum() for p, scale in zip(params.values(), [1.0, 3.0], strict=False))
    return -loss, torch.zeros(())


def start():
    return {
        "a": torch.linspace(-1, 2, 6, dtype=torch.float64).view(2, 3),
        "b": torch.tensor([0.5], dtype=torch.float64),
    }


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_path_equals_torch_optim(inplace, weight_decay):
    kind = torch.optim.AdamW if weight_decay else torch.optim.Adam
    leaves = {k: v.clone().requires_grad_() for k, v in start().items()}
    optimizer = kind(leaves.values(), lr=0.05, weight_decay=weight_decay)
    transform = optimise.build(quadratic, Adam(0.05, weight_decay=weight_decay), clip=0.7)
    state = transform.init(start())
    for _ in range(30):
        optimizer.zero_grad()
        (-quadratic(leaves, None)[0]).backward()
        torch.nn.utils.clip_grad_norm_(leaves.values(), 0.7)
        optimizer.step()
        state, _ = transform.update(state, None, inplace=inplace)
    for name, leaf in leaves.items():
        torch.testing.assert_close(state.params[name], leaf.detach(), rtol=1e-9, atol=1e-12)
    assert state.adam.step.item() == 30


def test_pure_and_in_place_steps_may_take_turns():
    transform = optimise.build(quadratic, Adam(0.05))
    pure, mixed = transform.init(start()), transform.init(start())
    for step in range(12):
        pure, _ = transform.update(pure, None)
        mixed, _ = transform.update(mixed, None, inplace=step % 2 == 1)
    torch.testing.assert_close(mixed.params["a"], pure.params["a"])
    torch.testing.assert_close(mixed.adam.momentum["a"], pure.adam.momentum["a"])


def test_pure_update_leaves_the_old_state():
    transform = optimise.build(quadratic, Adam(0.05))
    old = transform.init(start())
    new, _ = transform.update(old, None)
    assert torch.equal(old.params["a"], start()["a"])
    assert not torch.equal(new.params["a"], old.params["a"])


def test_rows_of_a_matrix_are_members_of_their_own():
    theta = torch.randn(3, 5, dtype=torch.float64) * torch.tensor([[0.1], [1.0], [10.0]])

    def joint(params, batch):
        return -(params[THETA] - 1).square().sum(), torch.zeros(())

    class Rows:
        def value_and_grad(self, params, batch):
            rows = params[THETA]
            return -(rows - 1).square().sum(-1), torch.zeros(()), {THETA: -2 * (rows - 1)}

    together = optimise.build(Rows(), Adam(0.1), clip=0.5)
    alone = optimise.build(joint, Adam(0.1), clip=0.5)
    state = together.init({THETA: theta.clone()})
    singles = [alone.init({THETA: row.clone()}) for row in theta]
    for _ in range(10):
        state, _ = together.update(state, None, inplace=True)
        singles = [alone.update(s, None)[0] for s in singles]
    torch.testing.assert_close(state.params[THETA], torch.stack([s.params[THETA] for s in singles]))
    assert state.log_joint.shape == (3,)


def test_update_can_be_vmapped():
    transform = optimise.build(quadratic, Adam(0.05))
    many = {k: torch.stack([v, v + 1]) for k, v in start().items()}
    states = torch.vmap(transform.init)(many)
    stepped, _ = torch.vmap(transform.update, in_dims=(0, None))(states, None)
    single, _ = transform.update(transform.init(start()), None)
    torch.testing.assert_close(stepped.params["a"][0], single.params["a"])


def test_warmup_rises_to_the_peak_then_falls_with_the_root():
    rate = schedules.warmup_inverse_sqrt(0.01, 100)
    steps = torch.arange(1.0, 1001.0)
    values = rate(steps)
    assert values.argmax().item() == 99
    assert values[99].item() == pytest.approx(0.01)
    assert values[49].item() == pytest.approx(0.005)
    assert values[399].item() == pytest.approx(0.005)
    assert schedules.constant(0.3)(torch.tensor(7.0)).item() == pytest.approx(0.3)
    with pytest.raises(ValueError, match="warmup must be at least 1 step; got 0"):
        schedules.warmup_inverse_sqrt(0.01, 0)


def test_schedule_sets_the_step_size():
    # Adam's first step has size lr whatever the gradient.
    transform = optimise.build(quadratic, Adam(schedules.warmup_inverse_sqrt(0.1, 10)))
    state, _ = transform.update(transform.init(start()), None)
    assert (state.params["b"] - 0.5).abs().item() == pytest.approx(0.01, rel=1e-5)


def norm(grads):
    return dot(grads, grads).sqrt().item()


def test_clipping_bounds_the_norm():
    grads = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    assert norm(grads) == pytest.approx(5)
    assert norm(optimise.clip_gradient(grads, 1.0)) == pytest.approx(1, rel=1e-5)
    assert optimise.clip_gradient(grads, math.inf) is grads
    assert torch.equal(optimise.clip_gradient(grads, 50.0)["a"], grads["a"])
