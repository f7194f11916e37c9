"""Regressions and last layers whose posterior is known, in closed form or from long chains (NUTS), for `study bars`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer.core.seeds import generator, stream
from bayesformer.core.storage import read_checked, write_tensors
from bayesformer.fitting import fit
from bayesformer.likelihoods import Bernoulli, Gaussian, Likelihood, as_likelihood
from bayesformer.methods import Nuts
from bayesformer.posterior import Posterior
from bayesformer.reference.logistic_regression import LogOdds

WEIGHTS = 20  # of the regressions
CHAINS, KEPT, WARM_UP = 4, 500, 300  # of the reference where it is not exact
AVERAGED = 200  # draws that a curvature is averaged over


@dataclass(frozen=True)
class KnownProblem:
    """Data, a model and the mean and spread of its exact posterior under the prior N(0, 1)."""

    model: Callable[[], nn.Module]
    data: tuple[Tensor, Tensor]
    likelihood: Likelihood
    asked: Tensor  # new inputs
    mean: Tensor | None = None  # (P,), where it is known in closed form
    precision: Tensor | None = None  # (P, P)


def problems() -> dict[str, Callable[[int], KnownProblem]]:
    """Every problem by name, as a function of the seed."""
    found: dict[str, Callable[[int], KnownProblem]] = {}
    for count in (200, 1000, 5000):
        for condition in (10, 1000):
            found[f"linear N={count} k={condition}"] = partial(linear, count, condition)
    for count in (100, 500, 2000):
        found[f"logistic N={count}"] = partial(logistic, count)
    for width in (64, 256):
        found[f"softmax P={10 * width + 10}"] = partial(softmax, width)
    return found


def linear(count: int, condition: int, seed: int) -> KnownProblem:
    """Linear regression with noise 1 and inputs of a condition number."""
    source = generator(seed, "bars", "linear", count, condition)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64, device="cpu")

    turn, _ = torch.linalg.qr(randn(WEIGHTS, WEIGHTS))
    scale = torch.logspace(0, -math.log10(condition), WEIGHTS, dtype=torch.float64, device="cpu")
    inputs = randn(count + 50, WEIGHTS) @ (turn * scale) @ turn.T
    inputs = inputs / inputs.std()
    x, asked = inputs[:count], inputs[count:]
    y = x @ randn(WEIGHTS, 1) + randn(count, 1)
    precision = x.T @ x + torch.eye(WEIGHTS, dtype=torch.float64, device="cpu")
    mean = torch.linalg.solve(precision, x.T @ y)[:, 0]
    model = lambda: nn.Linear(WEIGHTS, 1, bias=False, device="cpu")  # noqa: E731
    return KnownProblem(model, (x.float(), y.float()), Gaussian(1.0), asked.float(), mean, precision)


def logistic(count: int, seed: int) -> KnownProblem:
    """Logistic regression with correlated inputs."""
    source = generator(seed, "bars", "logistic", count)
    place = torch.arange(WEIGHTS, device="cpu")
    root = torch.linalg.cholesky(0.8 ** (place[:, None] - place).abs().double())
    inputs = torch.randn(count + 50, WEIGHTS, generator=source, dtype=torch.float64, device="cpu") @ root.T
    truth = torch.randn(WEIGHTS, generator=source, dtype=torch.float64, device="cpu")
    chance = torch.rand(count, generator=source, dtype=torch.float64, device="cpu")
    y = (chance < torch.sigmoid(inputs[:count] @ truth)).float()
    inputs = inputs.float()
    return KnownProblem(lambda: LogOdds(WEIGHTS, bias=False), (inputs[:count], y), Bernoulli(), inputs[count:])


def softmax(width: int, seed: int, count: int = 1000, classes: int = 10) -> KnownProblem:
    """The last layer of a classifier: softmax regression on fixed ReLU features of variance about 1."""
    source = generator(seed, "bars", "softmax", width)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, device="cpu")

    inputs = randn(count + 50, 10)
    features = torch.relu(inputs @ randn(10, width) / math.sqrt(10)) * math.sqrt(2 / width) * 4
    logits = features @ randn(width, classes)
    y = torch.multinomial(logits[:count].softmax(1), 1, generator=source)[:, 0]
    model = lambda: nn.Linear(width, classes, device="cpu")  # noqa: E731
    return KnownProblem(model, (features[:count], y), as_likelihood("categorical"), features[count:])


@dataclass(frozen=True)
class Truth:
    """What fits are compared with: mean and spread of the weights, the best diagonal, the spread of outputs."""

    mean: Tensor
    sd: Tensor
    diagonal: Tensor | None = None
    outputs: Tensor | None = None


def exact_truth(problem: KnownProblem, precision: float = 1.0) -> Truth:
    """The posterior in closed form under the prior N(0, 1/precision)."""
    assert problem.precision is not None
    assert problem.mean is not None
    eye = torch.eye(len(problem.mean), dtype=torch.float64, device="cpu")
    changed = problem.precision + (precision - 1) * eye
    mean = torch.linalg.solve(changed, problem.precision @ problem.mean)
    covariance, asked = torch.linalg.inv(changed), problem.asked.double()
    outputs = ((asked @ covariance) * asked).sum(1, keepdim=True).sqrt()
    return Truth(mean, covariance.diagonal().sqrt(), changed.diagonal().rsqrt(), outputs)


def sampled_truth(problem: KnownProblem, seed: int, path: Path) -> Truth:
    """The posterior by long chains; made once and kept in the problem's file, with what they say of themselves."""
    tensors, facts = read_checked(path, "truth") if path.exists() else ({}, {})
    if str(seed) not in facts:
        found = quiet_fit(problem, Nuts(chains=CHAINS, draws=KEPT, thin=1, warm_up=WARM_UP), seed)
        draws = found.theta.double()
        outputs = spread_of_outputs(found, problem.asked)
        known = {"mean": draws.mean(0), "sd": draws.std(0), "diagonal": best_diagonal(problem, draws)}
        tensors |= {f"{seed}.{name}": value for name, value in {**known, "outputs": outputs}.items()}
        facts[str(seed)] = {name: found.facts[name] for name in ("seconds", "diagnostics", "doubts")}
        write_tensors(path, tensors, facts)
    return Truth(*(tensors[f"{seed}.{name}"] for name in ("mean", "sd", "diagonal", "outputs")))


def spread_of_outputs(posterior: Posterior, inputs: Tensor, draws: int | None = None) -> Tensor:
    """(B, K), float64: standard deviations of the outputs that the likelihood identifies, over draws of the weights."""
    values = posterior.outputs(inputs, draws, predictive="sampled").values.double()  # type: ignore[union-attr]
    return posterior.likelihood.identified(values).std(0)


def best_diagonal(problem: KnownProblem, draws: Tensor) -> Tensor:
    """(P,): standard deviations E[H_ii]^-½ of the nearest Gaussian with independent weights, by KL(q | p).

    For one linear layer of log odds or logits under N(0, 1), whose curvature Σ_n π (1 - π) x² is known; averaged over
    some of the draws.
    """
    x, layer = problem.data[0].double(), problem.model()
    assert isinstance(layer, nn.Linear)
    few = draws[:: max(1, len(draws) // AVERAGED)]
    weights, bias = few.split([layer.weight.numel(), few.shape[1] - layer.weight.numel()], 1)
    logits = x @ weights.unflatten(1, layer.weight.shape).mT  # (L, N, K)
    if bias.shape[1]:
        logits = logits + bias[:, None]
    chance = logits.sigmoid() if layer.out_features == 1 else logits.softmax(-1)
    curvature = (chance * (1 - chance)).mean(0)  # (N, K)
    data = (curvature.T @ x.square()).flatten()
    return (torch.cat([data, curvature.sum(0)]) if bias.shape[1] else data).add(1).rsqrt()


def quiet_fit(problem: KnownProblem, method: Any, seed: int) -> Posterior:
    """One fit from a new model, whose warnings are read from its doubts."""
    with stream(seed, "bars"):
        model = problem.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(model, problem.data, likelihood=problem.likelihood, method=method, seed=seed, progress=False)
