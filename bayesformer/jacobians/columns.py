"""What to send back through a network: columns whose outer products add up to the curvature in the outputs.

A column is (B, ..., K), like the outputs f. For the generalised Gauss-Newton matrix they are the columns of a square
root S of the likelihood's Fisher information, S Sᵀ = Λ, position by position; for the Fisher matrix by Monte
Carlo, gradients of -log p(y | f) at targets y drawn from the model; for the empirical one, at the true targets.
Columns are 0 where no target counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from bayesformer.core.seeds import generator
from bayesformer.likelihoods import Likelihood

KINDS = ("ggn", "mc", "fisher")
PIECE = 2**21  # numbers of outputs, 8 MiB in float32, whose scores are computed at a time
FEW = 100  # columns of an example without positions that are always taken
EXACT = 2**34  # columns times examples times weights, about ten seconds of one core


def count(kind: str, likelihood: Likelihood, outputs: Tensor, samples: int = 1) -> int:
    """How many columns an example has: positions times those of a root, or draws."""
    if kind == "ggn":
        return likelihood.positions(outputs).shape[1] * max(likelihood.rank(outputs), 1)
    return samples if kind == "mc" else 1


def default_kind(likelihood: Likelihood, outputs: Tensor, weights: int, num_data: int) -> Literal["ggn", "mc"]:
    """ "ggn", the exact matrix, for outputs (B, K) of few classes or if its backward passes are not many; else "mc".

    There is a pass for each column of each of `num_data` examples, through a model of so many `weights`.
    """
    each = count("ggn", likelihood, outputs)
    few = each <= FEW and not likelihood.per_token(outputs)
    return "ggn" if few or each * num_data * weights <= EXACT else "mc"


def exact(likelihood: Likelihood, outputs: Tensor, mask: Tensor | None) -> Iterator[Tensor]:
    """Columns of S, one position at a time: T · R of them for outputs (B, T, K), with R columns of a position's root.

    `mask` says which positions of the outputs count.
    """
    outputs = outputs.detach()
    flat = likelihood.positions(outputs)  # (B, T, K)
    kept = None if mask is None else mask.reshape(len(mask), -1)
    root = likelihood.position_roots(outputs)
    for t in range(flat.shape[1]):
        if kept is not None and not bool(kept[:, t].any()):
            continue
        for column in root(t):
            whole = torch.zeros_like(flat)
            whole[:, t] = column if kept is None else column * kept[:, t, None]
            yield whole.view(outputs.shape)


def score(likelihood: Likelihood, outputs: Tensor, targets: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradient of -log p(y | f) in f, each example's positions summed; and log p(y | f), (B,)."""
    few = max(1, PIECE // max(1, outputs[0].numel()))
    if len(outputs) <= few:
        return _score(likelihood, outputs, targets, mask)
    gradient, log_probs = torch.empty_like(outputs), []
    for start in range(0, len(outputs), few):  # a vocabulary: what autograd keeps is several times the outputs
        rows = slice(start, start + few)
        found = _score(likelihood, outputs[rows], targets[rows], None if mask is None else mask[rows])
        gradient[rows] = found[0]
        log_probs.append(found[1])
    return gradient, torch.cat(log_probs)


def _score(likelihood: Likelihood, outputs: Tensor, targets: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        f = outputs.detach().requires_grad_()
        log_prob = likelihood.log_prob(f, targets, mask)
        (gradient,) = torch.autograd.grad(log_prob, f, -torch.ones_like(log_prob))
    return gradient, log_prob.detach()


def sampled(likelihood: Likelihood, outputs: Tensor, mask: Tensor | None, samples: int, seed: int) -> Iterator[Tensor]:
    """Scores at targets drawn from the model, over √samples; `mask` says which targets count.

    One column serves all positions of an example: scores of separate draws are uncorrelated, so their cross terms
    are 0 on average.
    """
    source = generator(seed, "fisher")
    for _ in range(samples):
        targets = likelihood.sample(outputs.detach(), source)
        yield score(likelihood, outputs, targets, mask)[0].div_(samples**0.5)


def one_hot(outputs: Tensor, start: int, stop: int) -> Tensor:
    """(C, B, ...): 1 at one output of every example, for the outputs from `start` to `stop`."""
    rows = torch.zeros(stop - start, outputs[0].numel(), dtype=outputs.dtype, device=outputs.device)
    rows.diagonal(start).fill_(1)
    return rows.view(-1, 1, *outputs.shape[1:]).expand(-1, len(outputs), *outputs.shape[1:])


def at_position(outputs: Tensor, position: int, vectors: Tensor) -> Tensor:
    """(C, B, ..., K): vectors (C, K) at one position of every example, 0 at the others."""
    rows = vectors.new_zeros(len(vectors), outputs[0].numel() // vectors.shape[1], vectors.shape[1])
    rows[:, position] = vectors
    return rows.view(-1, 1, *outputs.shape[1:]).expand(-1, len(outputs), *outputs.shape[1:])
