"""What NUTS costs beside its gradients: time per leapfrog in units of one evaluation of value and gradient.

Steps are so short that no trajectory turns: a transition of depth 4 has 15 leapfrogs. The peer is blackjax, compiled,
on a causal transformer layer written in jax, in units of its own compiled gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from bayesformer.core.draws import drawing_from
from bayesformer.core.vectors import THETA
from bayesformer.inference import nuts
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Space
from bayesformer.priors.prior import as_prior
from bayesformer.train.objective import Objective
from bayesformer.train.vector_prior import NamedPrior
from benchmarks.harness import Comparison
from benchmarks.workloads import Workload, of_task

DEPTH, STEP = 4, 1e-10
LEAPFROGS = 2**DEPTH - 1


def comparisons() -> Iterator[Comparison]:
    """Ours on the small causal transformer, and blackjax's on one of its size."""
    trajectory, gradients = ours(of_task("toy", "toy/m1"))
    yield Comparison("NUTS leapfrog, toy, in gradient evaluations", trajectory, gradients, 1.3, rounds=15)
    name = "blackjax NUTS leapfrog, jax transformer, in its gradient evaluations"
    yield Comparison(name, _peer_trajectory, _peer_gradients, None, rounds=9)


def ours(work: Workload) -> tuple[Callable[[], object], Callable[[], object]]:
    """15 leapfrogs of NUTS, and 15 evaluations of the same objective."""
    model = work.model().eval()
    space = Space.of(model)
    shell = Skeleton(model, space).shell()
    shell.module.eval()
    objective = Objective(shell, work.likelihood, work.num_data, NamedPrior(as_prior("normal(0, 1)"), space))
    transform = nuts.build(objective, 1 / work.num_data, warm_up=0, step_size=STEP, max_depth=DEPTH)
    state, theta = [transform.init({THETA: shell.theta})], shell.theta.clone()
    source = torch.Generator("cpu").manual_seed(0)

    def trajectory() -> None:
        with drawing_from(source):
            state[0], statistics = transform.update(state[0], work.batch, inplace=True)
        assert int(statistics.leapfrogs) == LEAPFROGS

    def gradients() -> None:
        for _ in range(LEAPFROGS):
            objective.value_and_grad({THETA: theta}, work.batch)

    return trajectory, gradients


def _peer_trajectory() -> object:
    return peer()[0]()


def _peer_gradients() -> object:
    return peer()[1]()


@cache
def peer() -> tuple[Callable[[], object], Callable[[], object]]:
    """The same of blackjax, on a causal transformer layer of width 16 on 50 series of length 10."""
    import blackjax
    import jax
    from jax import numpy as jnp

    width, key = 16, jax.random.key(0)
    shapes = {
        "in": (1, width),
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 64),
        "down": (64, width),
    }
    shapes["head"] = (width, 1)
    weights = {name: 0.3 * jax.random.normal(key, shape) for name, shape in shapes.items()}
    x = jax.random.normal(key, (50, 10, 1))

    def outputs(w: Any) -> Any:
        h = x @ w["in"]
        q, k, v = jnp.split(h @ w["qkv"], 3, -1)
        scores = jnp.where(jnp.tril(jnp.ones((10, 10))) > 0, q @ k.swapaxes(1, 2) / 4, -jnp.inf)
        h = h + jax.nn.softmax(scores) @ v @ w["out"]
        return (h + jax.nn.relu(h @ w["up"]) @ w["down"]) @ w["head"]

    def log_density(w: Any) -> Any:
        prior = sum(jnp.sum(part**2) for part in w.values())
        return -0.5 * (prior + 16 * jnp.sum((outputs(w)[:, :-1] - x[:, 1:]) ** 2))

    size = sum(part.size for part in weights.values())
    kernel = blackjax.nuts(log_density, STEP, jnp.ones(size), max_num_doublings=DEPTH)
    step, gradient = jax.jit(kernel.step), jax.jit(jax.value_and_grad(log_density))
    state = kernel.init(weights)

    def trajectory() -> None:
        _, info = step(key, state)
        assert int(info.num_integration_steps) == LEAPFROGS

    def gradients() -> None:
        for _ in range(LEAPFROGS):
            jax.block_until_ready(gradient(weights))

    return trajectory, gradients
