"""Do one-line calls give the posterior? Every method with nothing set, on problems whose posterior is known.

    error   RMS over the weights of (mean - exact mean) / exact sd
    ratio   median over the weights of sd / exact sd; of a diagonal family, over the best diagonal, H_ii^-½
    logits  the same ratio for the outputs at new inputs, where the exact posterior is one of long chains (NUTS)

A fit is right if both are within the bar. What it doubts of itself is counted beside: doubts of right fits are false
alarms, doubts of wrong ones are catches. Results are stored one by one, so that a second call runs what is missing.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bayesformer.core.seeds import generator, stream
from bayesformer.core.storage import read_json, write_json
from bayesformer.fitting import fit
from bayesformer.laws import GaussianLaw
from bayesformer.likelihoods import Bernoulli, Gaussian, Likelihood, as_likelihood
from bayesformer.methods import build_method
from bayesformer.posterior import Posterior
from bayesformer.reference.logistic_regression import LogOdds

WEIGHTS = 20  # of the regressions
CHAINS, KEPT = 4, 500  # of the reference where it is not exact


@dataclass(frozen=True)
class KnownProblem:
    """Data, a model and the mean and spread of its exact posterior under the prior N(0, 1)."""

    model: Callable[[], nn.Module]
    data: tuple[Tensor, Tensor]
    likelihood: Likelihood
    asked: Tensor  # new inputs
    mean: Tensor | None = None  # (P,), where it is known in closed form
    precision: Tensor | None = None  # (P, P)


@dataclass(frozen=True)
class Bar:
    """What a fit must reach to count as right."""

    error: float
    low: float
    high: float

    def holds(self, row: Mapping[str, Any], slack: float = 1.0) -> bool:
        """Whether a row is within the bar, or within `slack` times its width."""
        ratios = [row["ratio"], *([row["logits"]] if row.get("logits") is not None else [])]
        low, high = 1 - slack * (1 - self.low), 1 + slack * (self.high - 1)
        return row["error"] < slack * self.error and all(low <= ratio <= high for ratio in ratios)


LINEAR, LOGISTIC, SOFTMAX = Bar(0.3, 0.85, 1.15), Bar(0.4, 0.8, 1.2), Bar(0.4, 0.9, 1.1)

RIGHT: dict[str, dict[str, Any]] = {
    "sgld": {},
    "sghmc": {},
    "sgnht": {},
    "baoab": {},
    "psgld": {},
    "laplace full": {"structure": "full"},
    "laplace kron": {},
    "laplace diag": {"structure": "diag"},
    "vi": {},
    "vi dense": {"kind": "dense"},
    "ivon": {},
    "ekf": {},
    "ekf dense": {"kind": "dense"},
}
"""Methods as they are called, with what chooses their family alone."""
DIAGONAL = {"laplace diag", "vi", "ivon", "ekf"}
WRONG: dict[str, dict[str, Any]] = {
    "sghmc 10 epochs": {"epochs": 10},
    "sghmc lr=0.01": {"lr": 1e-2, "friction": 10.0, "warm_up": 0.5, "draws": 30},
    "sgld lr=0.0002": {"lr": 2e-4, "warm_up": 0.5, "draws": 30},
}
"""Fits that cannot be right: too short, or with one step size for every problem."""


def problems() -> dict[str, tuple[Bar, Callable[[int], KnownProblem]]]:
    """Every problem by name, with its bar."""
    found: dict[str, tuple[Bar, Callable[[int], KnownProblem]]] = {}
    for count in (200, 1000, 5000):
        for condition in (10, 1000):
            found[f"linear N={count} k={condition}"] = (LINEAR, _with(linear, count, condition))
    for count in (100, 500, 2000):
        found[f"logistic N={count}"] = (LOGISTIC, _with(logistic, count))
    for width in (64, 256):
        found[f"softmax P={10 * width + 10}"] = (SOFTMAX, _with(softmax, width))
    return found


def _with(make: Callable[..., KnownProblem], *arguments: int) -> Callable[[int], KnownProblem]:
    return lambda seed: make(*arguments, seed)


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
    diagonal: Tensor | None
    outputs: Tensor | None


def truth_of(problem: KnownProblem, seed: int, precision: float = 1.0) -> Truth:
    """The exact posterior under N(0, 1/precision); from long chains where there is no closed form."""
    if problem.precision is not None and problem.mean is not None:
        eye = torch.eye(len(problem.mean), dtype=torch.float64, device="cpu")
        changed = problem.precision + (precision - 1) * eye
        mean = torch.linalg.solve(changed, problem.precision @ problem.mean)
        return Truth(mean, torch.linalg.inv(changed).diagonal().sqrt(), changed.diagonal().rsqrt(), None)
    settings = {"chains": CHAINS, "draws": KEPT, "prior": f"normal(0, {precision**-0.5!r})"}
    found = _fit(problem, build_method("nuts", settings), seed)
    draws = found.theta.double()
    outputs = found.outputs(problem.asked).values.double()  # type: ignore[union-attr]
    return Truth(draws.mean(0), draws.std(0), None, outputs.std(0))


def _fit(problem: KnownProblem, method: Any, seed: int) -> Posterior:
    with stream(seed, "bars"):
        model = problem.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(model, problem.data, likelihood=problem.likelihood, method=method, seed=seed, progress=False)


def measure(label: str, problem: KnownProblem, truth: Truth, seed: int) -> dict[str, Any]:
    """One fit of a method, and how far it is from the truth."""
    name = label.split(maxsplit=1)[0]
    settings = {**RIGHT.get(label, {}), **WRONG.get(label, {})}
    if name == "laplace" and problem.precision is None:
        settings["prior_precision"] = 1.0  # the prior of the chains that it is compared with
    began = time.perf_counter()
    posterior = _fit(problem, build_method(name, settings), seed)
    seconds = time.perf_counter() - began
    chosen = posterior.facts.get("prior_precision")
    if problem.precision is not None and chosen:
        truth = truth_of(problem, seed, float(chosen[0]))
    law = posterior.law
    mean, spread = (law.mean, law.sd) if isinstance(law, GaussianLaw) else (law.mean, posterior.theta.std(0))
    exact = truth.diagonal if label in DIAGONAL and truth.diagonal is not None else truth.sd
    row: dict[str, Any] = {
        "error": float(((mean.double() - truth.mean) / truth.sd).square().mean().sqrt()),
        "ratio": float((spread.double() / exact).median()),
        "doubts": [doubt.check for doubt in posterior.doubts],
        "seconds": seconds,
    }
    if truth.outputs is not None:
        own = posterior.outputs(problem.asked, 100, predictive="sampled").values.double().std(0)  # type: ignore[union-attr]
        row["logits"] = float((own / truth.outputs).median())
    return row


def run(
    names: Sequence[str], methods: Sequence[str], seeds: Iterable[int], path: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """All rows of these problems, methods and seeds; those that are not in the file are run and added to it."""
    rows: list[dict[str, Any]] = read_json(path, "bars")["rows"] if path.exists() else []
    known = {(row["problem"], row["method"], row["seed"]) for row in rows}
    every = {**RIGHT, **WRONG}
    for name, (_, make) in problems().items():
        if not any(fnmatchcase(name, pattern) for pattern in names):
            continue
        for seed in seeds:
            wanted = [m for m in every if any(fnmatchcase(m, pattern) for pattern in methods)]
            missing = [m for m in wanted if (name, m, seed) not in known and _applies(name, m)]
            if not missing:
                continue
            problem = make(seed)
            truth = truth_of(problem, seed)
            for method in missing:
                row = {"problem": name, "method": method, "seed": seed, **measure(method, problem, truth, seed)}
                rows.append(row)
                write_json(path, {"rows": rows})
                say(f"{name}, {method}, seed {seed}: error {row['error']:.2f}, ratio {row['ratio']:.2f}")
    return rows


def _applies(problem: str, method: str) -> bool:
    """Fits that are to be caught are made on the small problems only; a full matrix for at most 2000 weights."""
    if method in WRONG:
        return problem.startswith("linear N=200") or problem == "linear N=1000 k=10"
    return not (method == "laplace full" and problem == "softmax P=2570")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per problem and method: medians over seeds, the worst seed, whether the bar holds, doubts."""
    lines = [
        "| problem | method | error | sd ratio | logits | seeds | bar | doubts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for problem, (bar, _) in problems().items():
        for method in {**RIGHT, **WRONG}:
            own = [row for row in rows if (row["problem"], row["method"]) == (problem, method)]
            if own:
                lines.append(_line(problem, method, own, bar))
    return "\n".join(lines)


def _line(problem: str, method: str, own: Sequence[Mapping[str, Any]], bar: Bar) -> str:
    logits = [row["logits"] for row in own if row.get("logits") is not None]
    middle = {"error": median(r["error"] for r in own), "ratio": median(r["ratio"] for r in own)}
    if logits:
        middle["logits"] = median(logits)
    every = all(bar.holds(row, 1.5) for row in own)
    verdict = "yes" if bar.holds(middle) and every else "median" if bar.holds(middle) else "no"
    doubts = sum(bool(row["doubts"]) for row in own)
    ratios = [row["ratio"] for row in own]
    shown = "" if not logits else f"{median(logits):.2f}"
    spread = f"{middle['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| {problem} | {method} | {middle['error']:.2f} | {spread} | {shown} | {len(own)} | {verdict} | {doubts} |"


def alarms(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many right fits doubted themselves, and how many wrong ones did not."""
    bars = {name: bar for name, (bar, _) in problems().items()}
    right = [row for row in rows if bars[row["problem"]].holds(row)]
    wrong = [row for row in rows if not bars[row["problem"]].holds(row, 1.5)]
    false = [row for row in right if row["doubts"]]
    caught = [row for row in wrong if row["doubts"]]
    lines = [
        "| fits | number | of these doubted |",
        "|---|---|---|",
        f"| within the bar | {len(right)} | {len(false)} (false alarms) |",
        f"| beyond 1.5 times the bar | {len(wrong)} | {len(caught)} (catches) |",
    ]
    missed = sorted({f"{row['method']} on {row['problem']}" for row in wrong if not row["doubts"]})
    return "\n".join(lines) + (f"\n\nNot caught: {'; '.join(missed)}." if missed else "")
