"""The Fisher information of a likelihood in its outputs, by autograd from the log density alone.

    Λ(f) = E_{y ~ p(y | f)} [ -∂² log p(y | f) / ∂f² ]

The expectation is exact where the likelihood lists the values that a target can take and they are few; otherwise it is
an average over targets drawn from the likelihood with a generator of fixed seed, so that equal outputs give equal
matrices. It is free of noise where the second derivative does not depend on y, as in exponential families with natural
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from bayesformer.likelihoods.base import Likelihood

SUPPORT = 64  # values of a target up to which the expectation is a sum over all of them
DRAWS = 128  # targets drawn per position otherwise
SEED = 0


def expected_hessian(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """(B, ..., K, K): Λ of every position of outputs (B, ..., K), at K + 1 backward passes per target value or draw."""
    rows = outputs.detach().reshape(-1, outputs.shape[-1])
    total = _expectation(likelihood, rows, rows.new_zeros(*rows.shape, rows.shape[-1]), _matrix)
    return total.view(*outputs.shape, outputs.shape[-1])


def expected_second_derivative(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """(B, ...): Λ of every output on its own, for likelihoods in which each output has a target to itself."""
    rows = outputs.detach().reshape(-1)
    return _expectation(likelihood, rows, torch.zeros_like(rows), _scalar).view(outputs.shape)


def _expectation(
    likelihood: Likelihood, rows: Tensor, total: Tensor, derivative: Callable[[Likelihood, Tensor, Tensor], Tensor]
) -> Tensor:
    for targets, weight in _targets(likelihood, rows):
        shape = (-1, *[1] * (total.dim() - 1))
        total = total + derivative(likelihood, rows, targets) * weight.reshape(shape)
    return total


def _targets(likelihood: Likelihood, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Targets (N, ...) of all rows and their weights, (N,) or (1,)."""
    support = likelihood.support(rows)
    if support is not None and len(support) <= SUPPORT:
        for value in support:
            targets = value.expand(len(rows))
            yield targets, likelihood.log_prob(rows, targets).exp()
        return
    source = torch.Generator(device="cpu").manual_seed(SEED)
    for _ in range(DRAWS):
        yield likelihood.sample(rows, source), rows.new_full((1,), 1 / DRAWS)


def _matrix(likelihood: Likelihood, rows: Tensor, targets: Tensor) -> Tensor:
    """(N, K, K): minus the second derivative of log p, row by row: rows are examples, independent of each other."""
    with torch.enable_grad():
        f, slope = _slope(likelihood, rows, targets)
        parts = [_derivative(slope[:, k], f) for k in range(rows.shape[-1])]
    return -torch.stack(parts, -2)


def _scalar(likelihood: Likelihood, rows: Tensor, targets: Tensor) -> Tensor:
    with torch.enable_grad():
        f, slope = _slope(likelihood, rows, targets)
        return -_derivative(slope, f)


def _slope(likelihood: Likelihood, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    f = rows.clone().requires_grad_()
    (slope,) = torch.autograd.grad(likelihood.log_prob(f, targets).sum(), f, create_graph=True)
    return f, slope


def _derivative(values: Tensor, f: Tensor) -> Tensor:
    if not values.requires_grad:  # the log density is linear in the outputs
        return torch.zeros_like(f)
    (found,) = torch.autograd.grad(values.sum(), f, retain_graph=True, allow_unused=True, materialize_grads=True)
    return found
