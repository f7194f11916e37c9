"""Whether uncertainty finds prompts that a model does not know: a table with intervals, histograms, members."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bayesformer import evaluate
from bayesformer.bench.report.axis import Scale
from bayesformer.bench.report.plot import Plot
from bayesformer.bench.report.standalone import Key, write_figure
from bayesformer.bench.statistics import Result, summarise
from bayesformer.core.seeds import generator
from bayesformer.datasets.statements import CONTRASTS

TITLES = {
    "samoan": "Samoan",
    "joined": "halves joined",
    "invented": "invented word",
    "wikipedia": "other subjects",
}
WAYS = {
    "base": "pretrained",
    "tuned": "one network",
    "serial": "SGHMC, one chain",
    "parallel": "SGHMC, chains",
    "ensemble": "ensemble",
}
PLACE_NAMES = {"lora": "adapters in all layers", "last": "last attention layer"}
RESAMPLED = 2000


def evaluations(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """Evaluations by place and way, those of several seeds together."""
    found: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result["settings"].get("part") == "evaluation":
            found.setdefault((result["settings"]["place"], result["method"]), []).append(result)
    return found


def scores(result: Result, name: str, score: str, members: int | None = None) -> Tensor:
    """(N,): a score of the prompts of a set under the first members, by default under all."""
    count = int(result["metrics"]["members"]) if members is None else members
    return torch.tensor(result["figures"][name][str(count)][score], dtype=torch.float64)


def interval(familiar: Tensor, foreign: Tensor, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """An interval of the AUROC by drawing statements with replacement; a prompt and what was made of it go together."""
    return _resampled(lambda rows: (familiar[rows], foreign[rows]), len(familiar), level, seed)


def interval_of_errors(values: Tensor, right: Tensor, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """An interval of the AUROC of right against wrong answers (N,), by drawing statements with replacement."""
    return _resampled(lambda rows: (values[rows][right[rows]], values[rows][~right[rows]]), len(values), level, seed)


def _resampled(
    pair: Callable[[Tensor], tuple[Tensor, Tensor]], count: int, level: float, seed: int
) -> tuple[float, float]:
    source = generator(seed, "bootstrap")
    found = []
    for _ in range(RESAMPLED):
        familiar, foreign = pair(torch.randint(count, (count,), generator=source))
        if len(familiar) and len(foreign):
            found.append(area(familiar, foreign))
    tail = (1 - level) / 2
    low, high = torch.tensor(found, dtype=torch.float64).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return float(low), float(high)


def area(familiar: Tensor, foreign: Tensor) -> float:
    """The AUROC, ties counting half: evaluate.auroc by the N² pairs, fast enough to be resampled."""
    gaps = foreign.unsqueeze(1) - familiar.unsqueeze(0)
    return float(((gaps > 0).double() + 0.5 * (gaps == 0).double()).mean())


def table(results: Sequence[Result]) -> str:
    """Markdown: losses and AUROCs of total and epistemic uncertainty per way, a table per place."""
    found = evaluations(results)
    if not found:
        raise ValueError("results must hold evaluations of `bayesformer study unknown`; got none.")
    parts = []
    for place, title in PLACE_NAMES.items():
        if any(own == place for own, _ in found):
            parts.append(_place(found, place, title))
    return "\n\n".join([*parts, _lengths(next(iter(found.values()))[0])])


def _place(found: Mapping[tuple[str, str], list[Result]], place: str, title: str) -> str:
    head = ["members", "loss, English", "loss, Samoan"]
    head += [f"{TITLES[name]}, {score}" for name in CONTRASTS for score in ("total", "epistemic")]
    head += ["wrong last words, total", "wrong last words, epistemic"]
    lines = [f"| AUROC [95 %]: {title} | {' | '.join(head)} |", "|---|" + "---|" * len(head)]
    for way, label in WAYS.items():
        cells = found.get((place, way))
        if cells is None:
            lines.append(f"| {label} | " + " | ".join(["not run"] * len(head)) + " |")
        else:
            lines.append(f"| {label} | {' | '.join(_row(cells))} |")
    return "\n".join(lines)


def _row(cells: Sequence[Result]) -> list[str]:
    """Entries of a way: one evaluation with intervals, or the mean of several with their standard deviation."""
    count = int(cells[0]["metrics"]["members"])
    entries = [str(count), *(_mean([r["metrics"][f"loss/{name}"] for r in cells]) for name in ("english", "samoan"))]
    kinds = ("total", "epistemic")
    entries += [_told(count, kind, [_against(r, name, kind) for r in cells]) for name in CONTRASTS for kind in kinds]
    return entries + [_told(count, kind, [_errors(r, kind) for r in cells]) for kind in kinds]


class Area(NamedTuple):
    """An AUROC and its bootstrap interval."""

    value: float
    low: float
    high: float


def _against(result: Result, name: str, kind: str) -> Area:
    """How well an uncertainty tells a set of prompts from the English statements."""
    familiar, foreign = scores(result, "english", kind), scores(result, name, kind)
    return Area(evaluate.auroc(familiar, foreign), *interval(familiar, foreign))


def _errors(result: Result, kind: str) -> Area | None:
    """How well the uncertainty at the missing word tells statements that were ended wrongly; None if none was."""
    right, values = scores(result, "english", "right") > 0.5, scores(result, "english", f"last_{kind}")
    if bool(right.all()) or not bool(right.any()):
        return None
    return Area(evaluate.auroc(values[right], values[~right]), *interval_of_errors(values, right))


def _told(count: int, kind: str, areas: Sequence[Area | None]) -> str:
    if kind == "epistemic" and count == 1:
        return "0"
    known = [found for found in areas if found is not None]
    if not known:
        return "all alike"
    if len(known) > 1:
        return _mean([found.value for found in known])
    return f"{known[0].value:.2f} [{known[0].low:.2f}, {known[0].high:.2f}]"


def _mean(values: Sequence[float]) -> str:
    found = summarise(values)
    assert found is not None
    return f"{found.mean:.2f}" + ("" if found.sd is None else f" ± {found.sd:.2f}")


def _lengths(result: Result) -> str:
    """What the number of tokens alone can tell."""
    english = torch.tensor(result["figures"]["english"]["tokens"], dtype=torch.float64)
    lines = [
        f"| AUROC of the number of tokens alone | {' | '.join(TITLES[name] for name in CONTRASTS)} |",
        "|---|" + "---|" * len(CONTRASTS),
    ]
    areas = [
        evaluate.auroc(english, torch.tensor(result["figures"][name]["tokens"], dtype=torch.float64))
        for name in CONTRASTS
    ]
    lines.append(f"| tokens | {' | '.join(f'{value:.2f}' for value in areas)} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------ the figure


def figure(results: Sequence[Result], path: Path) -> Path:
    """Per place: histograms of both uncertainties under the ensemble, and epistemic detection against members."""
    found = evaluations(results)
    panels = []
    for place, title in PLACE_NAMES.items():
        way = next((w for w in ("ensemble", "parallel", "serial", "tuned", "base") if (place, w) in found), None)
        if way is None:
            continue
        result = found[place, way][0]
        several = result["metrics"]["members"] > 1
        kinds = ("total", "epistemic") if several else ("total",)
        panels += [(f"{score}, {WAYS[way]}, {title}", _histogram(result, score)) for score in kinds]
        if several:
            panels.append((f"epistemic by members, {WAYS[way]}, {title}", _growth(result)))
    if not panels:
        raise ValueError("results must hold evaluations of `bayesformer study unknown`; got none.")
    sets = ["english", *CONTRASTS]
    key = [Key({"english": "English", **TITLES}[name], f"m{i}", i) for i, name in enumerate(sets)]
    return write_figure(path, panels, key, columns=3)


def _histogram(result: Result, score: str, bins: int = 20) -> Plot:
    values = {name: scores(result, name, score) for name in ("english", *CONTRASTS)}
    top = max(float(value.quantile(0.99)) for value in values.values())
    edges = torch.linspace(0, top, bins + 1, dtype=torch.float64)
    shares = {name: torch.histogram(v.clamp(0, top), edges)[0] / len(v) for name, v in values.items()}
    y = Scale.over([0.0, *(float(s.max()) for s in shares.values())], pad=0.05)
    plot = Plot(Scale.over([0.0, top], pad=0.02), y, 320, 220, f"{score} uncertainty, nats", "share of prompts")
    for i, share in enumerate(shares.values()):
        plot.histogram(edges.tolist(), share.tolist(), f"stroke m{i}", closed=False)
    return plot


def _growth(result: Result) -> Plot:
    """AUROC of epistemic uncertainty against the number of members."""
    counts = [k for k in result["figures"]["counts"] if k > 1]
    lines = {
        name: [
            evaluate.auroc(scores(result, "english", "epistemic", k), scores(result, name, "epistemic", k))
            for k in counts
        ]
        for name in CONTRASTS
    }
    y = Scale.over([0.5, 1.0, *(v for line in lines.values() for v in line)], pad=0.03)
    plot = Plot(Scale.over(counts, pad=0.05), y, 320, 220, "members", "AUROC of epistemic uncertainty")
    plot.line([counts[0], counts[-1]], [0.5, 0.5], "guide")
    for i, line in enumerate(lines.values(), 1):
        plot.line(counts, line, f"stroke m{i}")
        for k, value in zip(counts, line, strict=True):
            plot.point(k, value, f"fill m{i}", shape=i)
    return plot
