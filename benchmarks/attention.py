"""Stochastic attention: the operation, whole training steps, draws.

The operation is timed under each family in units of explicit softmax attention: B 64, H 1, T 49, d 32.

From queries, keys and values to outputs and back, the KL included. Softmax is this library's, which masks; the one
without a mask is there for comparison. Peers are the same laws by torch.distributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch import distributions as laws
from torch.nn.utils import parameters_to_vector

from bayesformer.attention import (
    Contextual,
    DataDependent,
    Dirichlet,
    GaussianLogits,
    Lognormal,
    Softmax,
    Weibull,
    attention_kl,
    families,
    install,
)
from bayesformer.bench.tasks import TASKS
from bayesformer.core.types import Batch, Draw, Inputs
from bayesformer.laws import Samples
from bayesformer.likelihoods import Categorical, Likelihood
from bayesformer.model.calling import apply
from bayesformer.posterior import Posterior
from benchmarks.harness import Comparison
from benchmarks.workloads import Workload, large_images, large_vit, minilm, of_task

B, H, T, D = 64, 1, 49, 32
MASK = torch.ones(1, 1, 1, T, dtype=torch.bool)
PASSES = 8


def comparisons() -> Iterator[Comparison]:
    """All comparisons of this file."""
    softmax = passes(Softmax())
    ours: dict[str, tuple[Callable[..., Draw], float]] = {
        "gaussian": (GaussianLogits(), 2.2),
        "gaussian, data dependent": (GaussianLogits(DataDependent(0.1, 5)), 9.0),
        "lognormal": (Lognormal(), 2.2),
        "lognormal, contextual": (Lognormal(contextual=Contextual(D)), 2.4),
        "weibull": (Weibull(), 2.6),
        "weibull, contextual": (Weibull(contextual=Contextual(D)), 2.8),
        "dirichlet": (Dirichlet(), 8.0),
        "dirichlet, surrogate": (Dirichlet(gradient="surrogate"), 8.0),
    }
    for name, (family, budget) in ours.items():
        yield Comparison(f"attention, {name}", passes(family), softmax, budget, rounds=25)
    peers = {"softmax without a mask": plain, "torch Weibull": torch_weibull, "torch Dirichlet": torch_dirichlet}
    for name, peer in peers.items():
        yield Comparison(f"attention, {name}", passes(peer), softmax, None, rounds=9)
    for batch in (1, 64):
        yield draws_together(30, batch, 6.5 if batch == 1 else 36.0)
    yield draws_together(10, 64, 11.5)
    for work in (of_task("vit", "digits"), large(), minilm()):
        if work is not None:
            yield from whole_steps(work)


def large() -> Workload:
    """The ViT of 49 tokens."""
    data = large_images(64)
    return Workload("vit 28 x 28", large_vit, Categorical(), Batch(data.inputs, data.targets))


def whole_steps(work: Workload) -> Iterator[Comparison]:
    """A training step with stochastic attention and its KL, by Adam, in units of the step of the model as it is."""
    plain = steps(work, work.model())
    for family, budget in {"weibull": 1.3, "lognormal": 1.3, "gaussian": 1.3, "dirichlet": 2.4}.items():
        made = steps(work, install(work.model(), family))
        yield Comparison(f"training step, {family} attention, {work.label}", made, plain, budget, rounds=work.rounds)


def steps(work: Workload, model: torch.nn.Module) -> Callable[[], None]:
    """Plain PyTorch, with the KL added where there is one."""
    optimizer, batch = torch.optim.Adam(model.parameters(), lr=1e-4), work.batch
    random = bool(families(model))

    def run() -> None:
        for _ in range(work.steps):
            optimizer.zero_grad()
            loss = -work.likelihood.log_prob(apply(model, batch.inputs), batch.targets, batch.mask).mean()
            (loss + attention_kl(model).mean() if random else loss).backward()
            optimizer.step()

    return run


def passes(family: Callable[..., Draw]) -> Callable[[], None]:
    """Forward and backward through queries, keys, values."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, T, D, requires_grad=True) for _ in range(3))
    upstream = torch.randn(B, H, T, D)
    wants = getattr(family, "wants_keys", False)

    def run() -> None:
        for _ in range(PASSES):
            logits = q @ k.mT / math.sqrt(D)
            weights, kl = family(logits, MASK, k) if wants else family(logits, MASK)
            loss = (weights @ v * upstream).sum() + kl.mean()
            torch.autograd.grad(loss, [q, k, v])

    return run


def plain(logits: Tensor, mask: Tensor) -> Draw:  # noqa: ARG001
    """What is written down first."""
    return Draw(logits.softmax(-1), logits.new_zeros(B))


def torch_weibull(logits: Tensor, mask: Tensor) -> Draw:  # noqa: ARG001
    """Without a KL: torch has none of a Weibull to a Gamma."""
    s = laws.Weibull(logits.exp() / math.gamma(1.1), 10.0, validate_args=False).rsample()
    return Draw(s / s.sum(-1, keepdim=True), logits.new_zeros(B))


def torch_dirichlet(logits: Tensor, mask: Tensor) -> Draw:  # noqa: ARG001
    """With the KL to a centred prior."""
    m = logits.softmax(-1)
    q, p = laws.Dirichlet(10 * m, validate_args=False), laws.Dirichlet(5 * m, validate_args=False)
    return Draw(q.rsample(), laws.kl_divergence(q, p).sum((1, 2)))


def draws_together(draws: int, batch: int, budget: float) -> Comparison:
    """A predictive of some draws, as the engine chooses to make it, in units of one forward pass."""
    task = TASKS["toy/m1"]()
    model = install(task.model()).eval()
    inputs = task.load().train.subset(slice(0, batch)).inputs
    made = _posterior(model, task.likelihood, draws)
    return Comparison(
        f"{draws} draws of attention, toy, batch {batch}",
        partial(made.outputs, inputs),
        partial(_forward, model, inputs),
        budget,
        rounds=25,
    )


def _posterior(model: torch.nn.Module, likelihood: Likelihood, draws: int) -> Posterior:
    theta = parameters_to_vector(model.parameters()).detach()
    return Posterior(model, likelihood, Samples(theta[None]), noisy_draws=draws)


def _forward(model: torch.nn.Module, inputs: Inputs) -> Tensor:
    with torch.inference_mode():
        return model(inputs)
