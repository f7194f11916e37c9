"""Choosing the prior's precisions and the noise: by the evidence, or by the best of a grid on other data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
BOUNDS = (1e-6, 1e8)  # of a precision: beyond, the posterior is the prior or a point, and float32 loses both


def maximise(
    objective: Callable[[Tensor], Tensor], start: Tensor, bounds: tuple[float, float] = BOUNDS, steps: int = 100
) -> tuple[Tensor, Tensor]:
    """Positive values that maximise an objective, by L-BFGS on their logarithms; returns them and the maximum.

    Logarithms are held within the bounds; where the objective only grows beyond one, the bound is the answer.
    """
    if not ((start > 0).all() and torch.isfinite(start).all()):
        raise ValueError(f"start must be positive and finite; got {start.tolist()}.")
    low, high = (math.log(bound) for bound in bounds)
    logs = start.detach().double().log().clamp(low, high).requires_grad_()
    # The history holds curvature along the path; a fresh start would be plain gradient descent.
    optimiser = torch.optim.LBFGS([logs], max_iter=steps, line_search_fn="strong_wolfe", tolerance_grad=1e-6)

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = -objective(logs.clamp(low, high).exp())
        value.backward()
        return value

    optimiser.step(closure)
    found = logs.detach().clamp(low, high).exp()
    with torch.no_grad():
        value = objective(found)
    if not torch.isfinite(value) or not torch.isfinite(found).all():
        raise ValueError(f"the objective must be finite; at {found.tolist()} it is {float(value)}.")
    return found, value


class BestCandidate(NamedTuple, Generic[T]):
    """The best of several candidates."""

    value: T
    score: float
    scores: list[float]  # of every candidate, -inf where it failed


def best_of(candidates: Iterable[T], score: Callable[[T], float]) -> BestCandidate[T]:
    """The candidate of the highest score. One whose matrix is not positive definite scores minus infinity."""
    tried, scores, problem = [], [], "a score that is NaN"
    for candidate in candidates:
        try:
            value = float(score(candidate))
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            value, problem = -math.inf, str(error).splitlines()[0]
        tried.append(candidate)
        scores.append(-math.inf if math.isnan(value) else value)
    if not tried or max(scores) == -math.inf:
        raise ValueError(f"at least one of the {len(tried)} candidates must have a finite score; none has: {problem}.")
    best = max(range(len(tried)), key=scores.__getitem__)
    return BestCandidate(tried[best], scores[best], scores)
