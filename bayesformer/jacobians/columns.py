"""What to send back through a network: columns whose outer products add up to the curvature in the outputs.

A column is (B, ..., K), like the outputs f. For the generalised Gauss-Newton matrix they are the columns of a square
root S of the likelihood's Fisher information, S Sᵀ = Λ, position by position; for the Fisher matrix by Monte
Carlo, gradients of -log p(y | f) at targets y drawn from the model; for the empirical one, at the true targets.
Columns are 0 where no target counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bayesformer.core.seeds import generator
from bayesformer.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood

KINDS = ("ggn", "mc", "fisher")


def count(kind: str, likelihood: Likelihood, outputs: Tensor, samples: int = 1) -> int:
    """How many columns there are."""
    if kind == "ggn":
        width = outputs.shape[-1] if _has_values(likelihood, outputs) else 1
        positions = outputs[0].numel() // width
        return positions * max(width - isinstance(likelihood, Categorical), 1)
    return samples if kind == "mc" else 1


def exact(likelihood: Likelihood, outputs: Tensor, mask: Tensor | None) -> Iterator[Tensor]:
    """Columns of S, one position at a time: T · K of them for outputs (B, T, K), K for (B, K).

    For classes one fewer: diag(p) - p pᵀ has rank K - 1, and with v = √p a Householder reflection H that takes v
    to the last axis gives S = diag(v) H without its last column.
    """
    outputs = outputs.detach()
    shaped = outputs if _has_values(likelihood, outputs) else outputs.unsqueeze(-1)
    flat = shaped.reshape(len(shaped), -1, shaped.shape[-1])  # (B, T, K)
    kept = None if mask is None else mask.reshape(len(mask), -1)
    root = _root(likelihood, outputs, flat)
    for t in range(flat.shape[1]):
        if kept is not None and not bool(kept[:, t].any()):
            continue
        for column in root(t):
            whole = torch.zeros_like(flat)
            whole[:, t] = column if kept is None else column * kept[:, t, None]
            yield whole.view(outputs.shape)


def _root(likelihood: Likelihood, outputs: Tensor, flat: Tensor) -> Callable[[int], Iterator[Tensor]]:
    """For each position, the columns (B, K) of S. Nothing here is K by K for the likelihoods known."""
    if isinstance(likelihood, Categorical):
        return lambda t: _softmax_root(flat[:, t])
    if isinstance(likelihood, Gaussian | Bernoulli):
        scale = _diagonal(likelihood, outputs).reshape(flat.shape).sqrt()
        return lambda t: _diagonal_root(scale[:, t])
    matrix = likelihood.hessian(outputs).reshape(*flat.shape, flat.shape[-1])
    return lambda t: _general_root(matrix[:, t])


def _softmax_root(logits: Tensor) -> Iterator[Tensor]:
    v = logits.softmax(-1).sqrt()
    last = v.shape[-1] - 1
    mirror = v.clone()
    mirror[:, last] += 1  # v + e: never small, since v >= 0
    for k in range(last):
        column = -mirror * (v[:, k] / (1 + v[:, last])).unsqueeze(-1)
        column[:, k] += 1
        yield v * column


def _diagonal_root(scale: Tensor) -> Iterator[Tensor]:
    for k in range(scale.shape[-1]):
        column = torch.zeros_like(scale)
        column[:, k] = scale[:, k]
        yield column


def _general_root(matrix: Tensor) -> Iterator[Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    yield from (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).unbind(-1)


def _diagonal(likelihood: Gaussian | Bernoulli, outputs: Tensor) -> Tensor:
    """The diagonal of Λ, which is all of it for these."""
    if isinstance(likelihood, Bernoulli):
        probs = torch.sigmoid(outputs)
        return probs * (1 - probs)
    _, scale = likelihood.split(outputs)
    precision = scale.square().reciprocal()
    if likelihood.scale is not None:
        return precision
    slope = torch.sigmoid(outputs.chunk(2, -1)[1])
    return torch.cat([precision, 2 * slope.square() * precision], -1)


def diagonal(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """(B, ..., K): the diagonal of Λ, without Λ where the likelihood is known."""
    if isinstance(likelihood, Categorical):
        probs = outputs.softmax(-1)
        return probs * (1 - probs)
    if isinstance(likelihood, Gaussian | Bernoulli):
        return _diagonal(likelihood, outputs)
    return likelihood.hessian(outputs).diagonal(dim1=-2, dim2=-1)


def score(likelihood: Likelihood, outputs: Tensor, targets: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradient of -log p(y | f) in f, each example's positions summed; and log p(y | f), (B,)."""
    with torch.enable_grad():
        f = outputs.detach().requires_grad_()
        log_prob = likelihood.log_prob(f, targets, mask)
        (gradient,) = torch.autograd.grad(log_prob, f, -torch.ones_like(log_prob))
    return gradient, log_prob.detach()


def sampled(likelihood: Likelihood, outputs: Tensor, mask: Tensor | None, samples: int, seed: int) -> Iterator[Tensor]:
    """Scores at targets drawn from the model, over √samples.

    One column serves all positions of an example: scores of separate draws are uncorrelated, so their cross terms
    are 0 on average.
    """
    source = generator(seed, "fisher")
    for _ in range(samples):
        targets = draw(likelihood, outputs.detach(), source)
        yield score(likelihood, outputs, targets, mask)[0] / samples**0.5


def draw(likelihood: Likelihood, outputs: Tensor, source: torch.Generator) -> Tensor:
    """Targets from the model's own predictive; drawn on the CPU, so the same on every device."""
    if isinstance(likelihood, Categorical):
        probs = outputs.softmax(-1)
        return (
            torch.multinomial(probs.flatten(0, -2).cpu(), 1, generator=source).to(outputs.device).view(probs.shape[:-1])
        )
    if isinstance(likelihood, Bernoulli):
        return torch.bernoulli(torch.sigmoid(outputs).cpu(), generator=source).to(outputs.device)
    if isinstance(likelihood, Gaussian):
        mean, scale = likelihood.split(outputs)
        noise = torch.randn(mean.shape, generator=source, dtype=mean.dtype)
        return mean + scale * noise.to(mean.device)
    raise ValueError(
        f"likelihood must be Categorical, Gaussian or Bernoulli for kind='mc', which draws targets; "
        f"got {type(likelihood).__name__}. Use kind='ggn' or 'fisher'."
    )


def _has_values(likelihood: Likelihood, outputs: Tensor) -> bool:
    """Whether the last axis holds the K outputs of one position; for Bernoulli every logit is a position."""
    return not isinstance(likelihood, Bernoulli) and outputs.dim() > 1


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
