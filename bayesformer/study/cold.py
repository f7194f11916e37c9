"""The cold posterior effect: log-likelihood against temperature (Wenzel et al. 2020).

A posterior raised to 1/T is Bayes at T = 1 and a point at T = 0. If the predictive is best below 1, the posterior
is cold: either the model or the prior is wrong, or inference is. Compared are variational inference, SGHMC with
one long chain (serial), SGHMC with many chains of one draw each (parallel) and the Laplace approximation.

The task imdb/cnn_lstm is figure 4 of Duffield et al. (2025), "Scalable Bayesian learning with posteriors": all methods
have the prior N(0, 1/40), all Gaussians are diagonal, and variational inference and Laplace's method, by Gauss-Newton
and by the empirical Fisher, are sampled and linearised. It has a third of the paper's epochs and five chains of its 35.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from bayesformer.bench.planning import Cell, plan
from bayesformer.bench.report.axis import Scale, without_outliers
from bayesformer.bench.report.colours import PALETTE
from bayesformer.bench.report.plot import Plot
from bayesformer.bench.report.standalone import Key, write_figure
from bayesformer.bench.statistics import summarise
from bayesformer.bench.tasks import TASKS

TEMPERATURES = (1.0, 0.3, 0.1, 0.01, 0.001)
CHAINS = 4
CHAIN = {"chains": 1, "draws": 30, "lr": 1e-2, "friction": 10.0}  # one step size for all temperatures, as stored
SIZES: dict[str, dict[str, Any]] = {  # by task pattern, the same for every method and temperature: minutes, not hours
    "toy/*": {"training": {"epochs": 30}, "task": {"test": 1000}},
    # From scratch, words take most of the epochs to learn: a chain that starts earlier starts from nothing.
    "imdb": {"training": {"epochs": 8}, "task": {"train": 2000, "test": 1000, "length": 100}, "warm_up": 0.75},
}
METHODS = {
    "vi": "variational",
    "serial": "SGHMC, one chain",
    "parallel": "SGHMC, {chains} chains",
    "laplace": "Laplace",
    "vi_linearised": "variational, linearised",
    "ggn": "Laplace GGN, sampled",
    "ggn_linearised": "Laplace GGN, linearised",
    "fisher": "Laplace EF, sampled",
    "fisher_linearised": "Laplace EF, linearised",
}
"""Lines of the figure; {chains} is how many the results have."""
POINTS = {"mle": "MLE", "map": "MAP"}
"""Methods without a temperature, which are levels."""
CNN_LSTM = "imdb/cnn_lstm"
CNN_TEMPERATURES = (3.0, 1.0, 0.3, 0.1, 0.03)
CNN_PRIOR, CNN_PRECISION = "normal(0, 0.158113883)", 40.0
CNN_DRAWS = 50
STYLES = len(PALETTE)


def cells(tasks: Sequence[str], seeds: Sequence[int], temperatures: Sequence[float] = TEMPERATURES) -> list[Cell]:
    """Every method at every temperature, and the MLE to compare with."""
    found = []
    for task in tasks:
        if task == CNN_LSTM:
            hot = CNN_TEMPERATURES if temperatures is TEMPERATURES else temperatures
            found += plan([task], cnn_methods(list(hot)), seeds)
            continue
        size = next((size for pattern, size in SIZES.items() if fnmatchcase(task, pattern)), {})
        settings = {"training": size["training"], task: size["task"]} if size else {}
        found += plan([task], _methods(list(temperatures), size.get("warm_up", 0.5)), seeds, settings)
    return found


def _methods(hot: list[float], warm_up: float) -> list[str | dict[str, Any]]:
    """All with the prior N(0, 1): one chosen anew at every temperature would make up for it."""
    chain = {"name": "sghmc", "temperature": hot, "warm_up": warm_up, **CHAIN}
    return [
        "mle",
        {"name": "vi", "temperature": hot, "warm_up": warm_up, "log_sd": -5.0},  # the start of the stored results
        chain,
        {**chain, "chains": CHAINS, "draws": 1, "burn_in": 0.0},
        {"name": "laplace", "structure": "kron", "temperature": hot, "prior_precision": 1.0},
    ]


def cnn_methods(hot: list[float]) -> list[str | dict[str, Any]]:
    """The methods of the paper, with its settings but for the number of epochs and of chains.

    One training serves every temperature and both predictions of Laplace's method, and both of a variational posterior.
    The serial chain has twice the epochs and throws the first two fifths away; of parallel ones the last state is kept.
    """
    vi = {"name": "vi", "prior": CNN_PRIOR, "log_sd": -3.0, "warm_up": 0.0, "draws": CNN_DRAWS, "temperature": hot}
    laplace = {"name": "laplace", "structure": "diag", "prior_precision": CNN_PRECISION, "draws": CNN_DRAWS}
    ways = ["sampled", "linearised"]
    chain = {"name": "sghmc", "prior": CNN_PRIOR, "lr": 0.1, "friction": 1.0, "warm_up": 0.0, "temperature": hot}
    epochs = TASKS[CNN_LSTM]().training.epochs
    return [
        "mle",
        {"name": "map", "prior": CNN_PRIOR},
        {**laplace, "curvature": ["ggn", "fisher"], "predictive": ways, "temperature": hot},
        {**vi, "predictive": ways},
        {**chain, "chains": 1, "draws": 27, "burn_in": 0.4, "training": {"epochs": 2 * epochs}},
        {**chain, "chains": 5, "draws": 1, "burn_in": 0.0},
    ]


def line_of(result: Mapping[str, Any]) -> str:
    """The name of the line of the figure that a result belongs to, a key of `METHODS` or of `POINTS`."""
    method, settings = str(result["method"]), result["settings"]["method"]
    if method == "sghmc":
        return "parallel" if settings["chains"] > 1 else "serial"
    if method == "laplace" and settings.get("structure") == "diag":
        method = {"fisher": "fisher"}.get(settings["curvature"], "ggn")
    elif method != "vi":
        return method
    return f"{method}_linearised" if settings.get("predictive") == "linearised" else method


def label_of(name: str, results: Sequence[Mapping[str, Any]] = ()) -> str:
    """What a line is called, with the number of chains that its results have."""
    chains = {r["settings"]["method"]["chains"] for r in results if line_of(r) == name == "parallel"}
    return METHODS[name].format(chains=" or ".join(map(str, sorted(chains))) or "parallel")


def figure(results: Sequence[dict[str, Any]], path: Path) -> Path:
    """One panel per task: mean log-likelihood over seeds with its spread, against temperature."""
    by_task: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        by_task[result["task"]].append(result)
    if not by_task:
        raise ValueError("results must hold at least one result; got none.")
    panels = [(task, _panel(found)) for task, found in sorted(by_task.items())]
    present = {line_of(result) for result in results}
    key = [Key(label_of(name, results), f"m{i % STYLES}", i % 5) for i, name in enumerate(METHODS) if name in present]
    points = " and ".join(label for name, label in POINTS.items() if name in present)
    return write_figure(path, panels, [*key, Key(points, "m", None)])


def curve(results: Sequence[dict[str, Any]], name: str) -> dict[float, tuple[float, float]]:
    """Temperature -> mean and standard deviation of the log-likelihood over seeds, of one line."""
    values: dict[float, list[float]] = defaultdict(list)
    for result in results:
        if line_of(result) == name:
            values[result["settings"]["method"]["temperature"]].append(result["metrics"]["log_likelihood"])
    found = {}
    for temperature, scores in sorted(values.items()):
        summary = summarise(scores)
        if summary is not None:
            found[temperature] = summary.mean, summary.sd or 0.0
    return found


def chosen_temperature(results: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The temperature with the best mean validation score of a line; None if it has no result with one."""
    validation: dict[float, list[float]] = defaultdict(list)
    for result in results:
        if line_of(result) == name and result.get("validation") is not None:
            validation[result["settings"]["method"]["temperature"]].append(result["validation"])
    return max(validation, key=lambda t: sum(validation[t]) / len(validation[t])) if validation else None


def _panel(results: Sequence[dict[str, Any]]) -> Plot:
    curves = {name: curve(results, name) for name in METHODS}
    points = {name: [r["metrics"]["log_likelihood"] for r in results if r["method"] == name] for name in POINTS}
    baseline = [value for values in points.values() for value in values]
    levels = [m + k * s for line in curves.values() for m, s in line.values() for k in (-1, 1)] + baseline
    y = Scale.over([*without_outliers(levels), *baseline], pad=0.08)
    x = Scale.over([t for line in curves.values() for t in line] or [1.0], log=True, pad=0.05)
    plot = Plot(x, y, 380, 260, "temperature", "log-likelihood, nats", clip=True)
    for name, values in points.items():
        if values:
            level = sum(values) / len(values)
            plot.line([x.low, x.high], [level, level], "guide")
            if any(points[other] for other in POINTS if other != name):
                plot.text(2, plot.at(x.low, level)[1] - 3, POINTS[name])
    for i, line in enumerate(curves.values()):
        hot, means = list(line), [m for m, _ in line.values()]
        spread = [s for _, s in line.values()]
        pairs = list(zip(means, spread, strict=True))
        style = f"m{i % STYLES}"
        plot.band(hot, [m - s for m, s in pairs], [m + s for m, s in pairs], f"soft {style}")
        plot.line(hot, means, f"stroke {style}")
        for t, m in zip(hot, means, strict=True):
            plot.point(t, m, f"fill {style}", shape=i % 5)
    return plot


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: the best temperature of every line by validation, and what it gains over 1 on test data."""
    rows = ["| task | method | T by validation | test at T | test at 1 | MLE |", "|---|---|---|---|---|---|"]
    for task in sorted({r["task"] for r in results}):
        found = [r for r in results if r["task"] == task]
        baseline = summarise(r["metrics"]["log_likelihood"] for r in found if r["method"] == "mle")
        for name in METHODS:
            mine = [r for r in found if line_of(r) == name]
            best = chosen_temperature(mine, name)
            if best is None:
                continue
            scores = curve(mine, name)
            at, one = scores[best], scores.get(1.0, (math.nan, 0.0))
            base = "–" if baseline is None else f"{baseline.mean:.3f}"
            rows.append(f"| {task} | {label_of(name, mine)} | {best:g} | {_told(at)} | {_told(one)} | {base} |")
    return "\n".join(rows)


def _told(value: tuple[float, float]) -> str:
    mean, spread = value
    return f"{mean:.3f} ± {spread:.3f}" if spread else f"{mean:.3f}"  # one seed has no spread
