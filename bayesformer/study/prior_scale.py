"""Log-likelihood against the scale of a Gaussian prior, and under the priors of the weight study (figure 3.10 of the
thesis that Cinquin et al. (2021) is the paper of).

Variational inference with the prior N(0, scale²) on every weight. Where the curve is steep, the prior decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bayesformer.bench.planning import Cell, plan
from bayesformer.bench.report.axis import Scale, without_outliers
from bayesformer.bench.report.plot import Plot
from bayesformer.bench.report.standalone import Key, write_figure
from bayesformer.bench.statistics import summarise

SCALES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def cells(
    tasks: Sequence[str],
    seeds: Sequence[int],
    derived: Mapping[str, Mapping[str, str]],
    settings: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """VI at every scale and, where the weight study of a task has been made, with its priors; and the MLE."""
    found = []
    for task in tasks:
        methods: list[Any] = ["mle", {"name": "vi", "prior": [f"normal(0, {scale:g})" for scale in SCALES]}]
        if task in derived:
            methods.append({"name": "vi", "prior": dict(derived[task])})
        found += plan([task], methods, seeds, settings)
    return found


def scale_of(result: Mapping[str, Any]) -> float | None:
    """The scale of a result's prior; None for priors by layer."""
    prior = result["settings"]["method"]["prior"]
    return None if isinstance(prior, Mapping) else float(prior.split(",")[1].strip(" )"))


def curve(results: Sequence[Mapping[str, Any]]) -> dict[float | None, tuple[float, float]]:
    """Scale -> mean and standard deviation of the log-likelihood over seeds; None is the priors of the study."""
    values: dict[float | None, list[float]] = defaultdict(list)
    for result in results:
        if result["method"] == "vi":
            values[scale_of(result)].append(result["metrics"]["log_likelihood"])
    found: dict[float | None, tuple[float, float]] = {}
    for scale in sorted(values, key=lambda scale: (scale is None, scale or 0.0)):
        summary = summarise(values[scale])
        if summary is not None:
            found[scale] = summary.mean, summary.sd or 0.0
    return found


def figure(results: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write one panel per task: VI by the scale of its prior, and the MLE."""
    tasks = sorted({result["task"] for result in results})
    if not tasks:
        raise ValueError("results must hold at least one result; got none.")
    panels = [(task, _panel([r for r in results if r["task"] == task])) for task in tasks]
    key = [Key("VI, N(0, scale²)", "m0", 0), Key("VI, priors of the weight study", "m1", None), Key("MLE", "m", None)]
    return write_figure(path, panels, key)


def _panel(results: Sequence[Mapping[str, Any]]) -> Plot:
    line = curve(results)
    derived, scales = line.pop(None, None), [scale for scale in line if scale is not None]
    baseline = summarise(r["metrics"]["log_likelihood"] for r in results if r["method"] == "mle")
    fixed = [value.mean for value in (baseline,) if value is not None] + ([derived[0]] if derived else [])
    ends = [mean + k * sd for mean, sd in line.values() for k in (-1, 1)]
    x, y = Scale.over(scales or [1.0], log=True, pad=0.05), Scale.over([*without_outliers(ends), *fixed], pad=0.08)
    plot = Plot(x, y, 380, 260, "scale of the prior", "log-likelihood, nats", clip=True)
    if baseline is not None:
        plot.line([x.low, x.high], [baseline.mean, baseline.mean], "guide")
    if derived is not None:
        plot.line([x.low, x.high], [derived[0], derived[0]], "stroke m1 dash")
    means, spread = [line[scale][0] for scale in scales], [line[scale][1] for scale in scales]
    lows, highs = ([m + k * s for m, s in zip(means, spread, strict=True)] for k in (-1, 1))
    plot.band(scales, lows, highs, "soft m0")
    plot.line(scales, means, "stroke m0")
    for scale, mean in zip(scales, means, strict=True):
        plot.point(scale, mean, "fill m0")
    return plot


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: per task the log-likelihood at every scale, of the priors of the study, and of the MLE."""
    heads = [f"N(0, {scale:g}²)" for scale in SCALES]
    rows = [f"| task | {' | '.join(heads)} | weight study | MLE |", "|---" * (len(SCALES) + 3) + "|"]
    for task in sorted({result["task"] for result in results}):
        mine = [r for r in results if r["task"] == task]
        line, baseline = curve(mine), summarise(r["metrics"]["log_likelihood"] for r in mine if r["method"] == "mle")
        told = [f"{line[key][0]:.2f}" if key in line else "–" for key in (*SCALES, None)]
        rows.append(f"| {task} | {' | '.join(told)} | {'–' if baseline is None else f'{baseline.mean:.2f}'} |")
    return "\n".join(rows)
